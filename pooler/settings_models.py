"""The YAML config as strict frozen models.

Field names carry their unit, YAML keys do not (`query_wait_timeout` sets `query_wait_timeout_seconds`); names
and defaults are PgBouncer's where it has one, and every number is fleet-wide.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from pooler.settings_auth import AuthMethod
from pooler.settings_host import WORKERS_MAX, default_run_dir, default_workers
from pooler.settings_tenants import TenantSettings
from pooler.settings_tls import ClientTlsSettings, PemFile, ServerTlsSettings, plain_pem
from pooler.settings_units import (
    Address,
    Bytes,
    HostPort,
    HostPorts,
    Networks,
    PathValue,
    PolicyFile,
    PolicyValue,
    ReadableFile,
    Rows,
    Seconds,
    Secret,
    ServerPorts,
    Strings,
    WaitSeconds,
    as_tuple,
)

PoolMode = Literal["session", "transaction", "statement"]
Role = Literal["write", "read", "offline"]
Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=0)]
ANY_DATABASE = "*"  # the entry for names that have none of their own
FLEET_NAME = r"^[a-z0-9-]{1,24}$"


class Strict(BaseModel):
    """No unknown keys, no coercion, no change after load."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", hide_input_in_errors=True)


class FleetSettings(Strict):
    """The processes of this host."""

    name: str = Field(pattern=FLEET_NAME)
    host_name: str | None = Field(None, pattern=r"^[\w.-]{1,64}$", description="in the ledger")
    workers: int = Field(default_factory=default_workers, ge=1, le=WORKERS_MAX)
    listen: HostPorts = (Address("127.0.0.1", 6432),)
    worker_host: str | None = Field(None, description="where workers listen; default: the host of `listen`")
    cancel_address: HostPort | None = Field(
        None, description="where other hosts reach this one with cancel requests; default: `listen`")
    listen_backlog: int = Field(128, ge=1, le=65535)
    listen_proxy: bool = False
    reuse_port: bool = Field(False, description="other processes may listen on the ports of `listen`, too")
    peer_id: int = Field(0, ge=0, le=0xFFFF, description="one worker: its own among `admin.show_peers`")
    run_dir: PathValue = Field(default_factory=default_run_dir)
    proxy_protocol_from: Networks = ()
    unix_socket_dir: PathValue | None = None
    unix_socket_mode: int = Field(0o777, ge=0, le=0o777)
    unix_socket_group: str | None = Field(None, min_length=1)
    unix_socket_port: Port | None = Field(None, description="in its name; default: the port of `listen`")
    drain_timeout_seconds: Seconds = Field(60.0, alias="drain_timeout")
    drain_notice_seconds: Seconds = Field(3.0, alias="drain_notice")

    @property
    def host_for_workers(self) -> str:
        """The host each worker's own ports are on."""
        return self.worker_host if self.worker_host is not None else self.listen_host

    @property
    def listen_host(self) -> str:
        """The first host of `listen`; loopback where only a unix socket is listened on."""
        return self.listen[0].host if self.listen else "127.0.0.1"

    @property
    def unix_socket(self) -> Path | None:
        """Where the unix socket is, if there is one."""
        if self.unix_socket_dir is None:
            return None
        port = self.unix_socket_port or (self.listen[0].port if self.listen else 6432)
        return self.unix_socket_dir / f".s.PGSQL.{port}"


class ServiceSettings(Strict):
    """Worker i listens on `worker_ports` + i; the port a client came in by is its service."""

    worker_ports: Port
    database_role: Role
    pool_mode: PoolMode | None = None
    haproxy_port: Port | None = None


class TlsSettings(Strict):
    """Files in PEM."""

    ca: ReadableFile | None = None
    cert: ReadableFile | None = None
    key: ReadableFile | None = None


class EtcdSettings(Strict):
    """Where the ledger is: endpoints, or one of our own with `etcd: embedded`."""

    embedded: bool = False
    endpoints: HostPorts = ()
    prefix: str = Field("pooler", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    lease_ttl_seconds: Seconds = Field(5.0, alias="lease_ttl", ge=1, le=600)
    tls: TlsSettings = Field(default_factory=TlsSettings)
    user: str | None = None
    password: Secret | None = None
    data_dir: PathValue | None = None


class MonitorSettings(Strict):
    """The role that looks at the server (pg_monitor)."""

    user: str = Field(min_length=1)
    password: Secret | None = None


class DatabaseSettings(Strict):
    """One name clients may ask for. What is unset here comes from `pool`."""

    hosts: ServerPorts = Field(min_length=1, description="host:port, or /directory:port of a unix socket")
    policy: PolicyValue
    dbname: str | None = Field(None, min_length=1, description="at the server; default: the entry's own name")
    role: Role = "write"
    pool_mode: PoolMode | None = None
    monitor: MonitorSettings | None = None
    max_replica_lag_seconds: Seconds | None = Field(None, alias="max_replica_lag")
    user: str | None = Field(None, min_length=1, description="forced server user")
    password: Secret | None = None
    pool_size: int | None = Field(None, ge=1)
    min_pool_size: Count | None = None
    reserve_pool_size: Count | None = None
    max_db_client_connections: Count | None = None
    query_wait_timeout_seconds: WaitSeconds | None = Field(None, alias="query_wait_timeout")
    server_lifetime_seconds: Seconds | None = Field(None, alias="server_lifetime")
    connect_query: str | None = None
    auth_user: str | None = Field(None, min_length=1, description="instead of `auth.user`")
    auth_query: str | None = Field(None, min_length=1, description="instead of `auth.query`")
    auth_dbname: str | None = Field(None, min_length=1, description="instead of `auth.dbname`")

    @property
    def ledger(self) -> str:
        """The ledger's `db`: the policy's `database`."""
        return self.policy.database


class UserSettings(Strict):
    """Of the clients of one user; what is given here counts more than what a database or `pool` says."""

    pool_mode: PoolMode | None = None
    pool_size: int | None = Field(None, ge=1)
    reserve_pool_size: Count | None = None
    max_user_connections: Count | None = None
    max_user_client_connections: Count | None = None
    query_timeout_seconds: Seconds | None = Field(None, alias="query_timeout")
    query_wait_timeout_seconds: WaitSeconds | None = Field(None, alias="query_wait_timeout")
    transaction_timeout_seconds: Seconds | None = Field(None, alias="transaction_timeout")
    idle_transaction_timeout_seconds: Seconds | None = Field(None, alias="idle_transaction_timeout")
    client_idle_timeout_seconds: Seconds | None = Field(None, alias="client_idle_timeout")


class FailoverSettings(Strict):
    """What happens when a backend goes."""

    detect: Literal["none", "patroni"] = "none"
    patroni: Strings = ()
    drain_timeout_seconds: Seconds = Field(30.0, alias="drain_timeout")
    on_ledger_loss: Literal["serve", "stop"] = "serve"
    reconcile: Literal["observe", "terminate"] = "observe"
    unknown_terminate_after_seconds: Seconds = Field(60.0, alias="unknown_terminate_after")
    orphan_connect_grace_seconds: Seconds = Field(120.0, alias="orphan_connect_grace")
    fence_command: str | None = None
    node_identity: Literal["node", "provider"] = "node"
    server_eof_is_proof: Literal["auto", True, False] = "auto"


class AuthSettings(Strict):
    """How clients log in. `user`, `query` and `dbname` are PgBouncer's auth_user, auth_query, auth_dbname."""

    type: AuthMethod = "scram-sha-256"
    file: ReadableFile | None = None
    hba_file: ReadableFile | None = Field(None, description="rules of pg_hba.conf, for `type: hba`")
    ident_file: ReadableFile | None = Field(None, description="maps of pg_ident.conf, for cert and peer")
    map: str | None = Field(None, min_length=1, description="the map for `type: cert` and `type: peer`")
    user: str | None = Field(None, min_length=1, description="asks the server for secrets that `file` lacks")
    password: Secret | None = Field(None, description="of `user`; default: its line in `file`")
    query: str | None = Field(None, min_length=1, description="gives name and secret of user $1")
    dbname: str | None = Field(None, min_length=1, description="the entry of `databases` that is asked")
    scram_iterations: int = Field(4096, ge=1, le=10_000_000, description="for who has no SCRAM secret")
    query_timeout_seconds: Seconds = Field(10.0, alias="query_timeout", gt=0)
    query_cache_seconds: Seconds = Field(0.0, alias="query_cache", le=60)
    failed_logins_free: Count = Field(10, description="of one address before each more is answered later")
    failed_login_delay_max_seconds: Seconds = Field(4.0, alias="failed_login_delay_max", le=30)


class PoolSettings(Strict):
    """PgBouncer's names and defaults; 0 turns a time-out off."""

    pool_mode: PoolMode = "transaction"
    default_pool_size: int = Field(20, ge=1)
    min_pool_size: Count = 0
    reserve_pool_size: Count = 0
    reserve_pool_timeout_seconds: Seconds = Field(5.0, alias="reserve_pool_timeout")
    max_client_conn: int = Field(100, ge=1)
    max_db_client_connections: Count = 0
    max_user_client_connections: Count = 0
    max_user_connections: Count = Field(0, description="sessions of a user over all databases of a worker")
    max_prepared_statements: Count = 200
    query_wait_timeout_seconds: WaitSeconds = Field(120.0, alias="query_wait_timeout")
    query_wait_notify_seconds: Seconds = Field(5.0, alias="query_wait_notify")
    login_notify_message: str = Field("", description="a NOTICE for each client at its login")
    application_name_add_host: bool = Field(False, description="the client's address, behind its name")
    query_timeout_seconds: Seconds = Field(0.0, alias="query_timeout")
    transaction_timeout_seconds: Seconds = Field(0.0, alias="transaction_timeout")
    idle_transaction_timeout_seconds: Seconds = Field(0.0, alias="idle_transaction_timeout")
    client_idle_timeout_seconds: Seconds = Field(0.0, alias="client_idle_timeout")
    client_login_timeout_seconds: Seconds = Field(60.0, alias="client_login_timeout")
    cancel_wait_timeout_seconds: Seconds = Field(10.0, alias="cancel_wait_timeout")
    server_connect_timeout_seconds: Seconds = Field(15.0, alias="server_connect_timeout")
    server_login_retry_seconds: Seconds = Field(15.0, alias="server_login_retry")
    autodb_idle_timeout_seconds: Seconds = Field(3600.0, alias="autodb_idle_timeout")
    server_idle_timeout_seconds: Seconds = Field(600.0, alias="server_idle_timeout")
    server_lifetime_seconds: Seconds = Field(3600.0, alias="server_lifetime")
    server_reset_query: str = "DISCARD ALL"
    server_reset_query_always: bool = False
    server_fast_close: bool = False
    server_check_query: str = Field("<empty>", description="so: the empty query; empty: nothing is asked")
    server_check_delay_seconds: Seconds = Field(30.0, alias="server_check_delay")
    session_state: Literal["clean", "pin", "reject", "allow", "warn"] = "clean"
    session_state_functions: Strings = ()
    max_pinned: Count = 10
    track_extra_parameters: Strings = ("IntervalStyle",)
    ignore_startup_parameters: Strings = ()
    max_packet_size_bytes: Bytes = Field(2_147_483_647, alias="max_packet_size", ge=65_536)
    pkt_buf_bytes: Bytes = Field(65_536, alias="pkt_buf", ge=4096, le=16 * 1024 * 1024)
    # of TCP connections to clients and servers, within what Linux takes (tcp(7)); 0: the system's own value,
    # and to servers 60 s, 10 s and 6 probes, for nobody else notices a server that vanished
    tcp_keepalive: bool = True
    tcp_keepcnt: int = Field(0, ge=0, le=127)
    tcp_keepidle_seconds: Seconds = Field(0.0, alias="tcp_keepidle", le=32_767)
    tcp_keepintvl_seconds: Seconds = Field(0.0, alias="tcp_keepintvl", le=32_767)
    tcp_user_timeout_seconds: Seconds = Field(0.0, alias="tcp_user_timeout", le=86_400)


class AdminSettings(Strict):
    """Who may use the console. `as_pgbouncer`: it has PgBouncer's columns, texts and door, and no more."""

    users: Strings = ()
    stats_users: Strings = ()
    as_pgbouncer: bool = False
    show_config: Rows = Field((), description="instead of our own rows: key, value, default, changeable")
    show_peers: Rows = Field((), description="peer_id, host, port, pool_size")
    show_hosts: Rows = Field((), description="of a database: name, host, load_balance_hosts")


class HttpSettings(Strict):
    """Health, metrics and agent ports; each worker at its base + i."""

    listen: HostPort = Address("127.0.0.1", 9180)
    worker_ports: Port = 9600
    agent_ports: Port = 9700
    token: Secret | None = None


class LogSettings(Strict):
    format: Literal["json", "console"] = "json"
    level: Literal["debug", "info", "warning", "error"] = "info"
    queries: bool = False


def _etcd(value: object) -> object:
    if value == "embedded":
        return {"embedded": True}
    return value


class Settings(Strict):
    """A whole config file, resolved: absolute paths, secrets read, policies read."""

    fleet: FleetSettings
    services: dict[str, ServiceSettings] = Field(default_factory=dict)
    etcd: Annotated[EtcdSettings, BeforeValidator(_etcd)]
    databases: dict[str, DatabaseSettings] = Field(min_length=1)
    failover: FailoverSettings = FailoverSettings.model_validate({})
    auth: AuthSettings = AuthSettings.model_validate({})
    pool: PoolSettings = PoolSettings.model_validate({})
    users: dict[str, UserSettings] = Field(default_factory=dict)
    client_tls: ClientTlsSettings = Field(default_factory=ClientTlsSettings)
    server_tls: ServerTlsSettings = Field(default_factory=ServerTlsSettings)
    tenants: Annotated[tuple[TenantSettings, ...], BeforeValidator(as_tuple)] = ()
    admin: AdminSettings = AdminSettings.model_validate({})
    http: HttpSettings = Field(default_factory=HttpSettings)
    log: LogSettings = Field(default_factory=LogSettings)

    @property
    def coordinator_socket(self) -> Path:
        return self.fleet.run_dir / "coordinator.sock"

    @property
    def control_socket(self) -> Path:
        return self.fleet.run_dir / "control.sock"

    def database(self, name: str) -> DatabaseSettings:
        """The entry that serves a name: its own, else the one for any name. KeyError if there is neither."""
        return self.databases[name] if name in self.databases else self.databases[ANY_DATABASE]

    def entries_of(self, ledger: str, dbname: str) -> frozenset[str]:
        """The `databases` entries for this database of this ledger."""
        return self._entries.get((ledger, dbname), frozenset())

    @cached_property
    def _entries(self) -> dict[tuple[str, str], frozenset[str]]:
        found: dict[tuple[str, str], frozenset[str]] = {}
        for name, entry in self.databases.items():
            key = entry.ledger, entry.dbname or name
            found[key] = found.get(key, frozenset()) | {name}
        return found

    def user(self, name: str) -> UserSettings:
        """What is set for the clients of one user."""
        return self.users.get(name, _NOTHING_OF_ITS_OWN)

    def pool_size(self, name: str, user: str = "") -> int:
        """Server sessions of one pool of database `name`, over the whole fleet."""
        return self.user(user).pool_size or self.database(name).pool_size or self.pool.default_pool_size

    def pool_mode(self, name: str, service: str | None = None, user: str = "") -> PoolMode:
        """The service's mode if it names one, else the user's, the database's, the pool's."""
        served = self.services[service].pool_mode if service is not None else None
        return served or self.user(user).pool_mode or self.database(name).pool_mode or self.pool.pool_mode

    def database_for(self, name: str, service: str | None) -> str | None:
        """The `databases` entry a client asking for `name` gets: by name on the shared port (None), and on a
        service's port the entry of that service's role with this dbname. None if there is none."""
        if service is None:
            return name if name in self.databases or ANY_DATABASE in self.databases else None
        role = self.services[service].database_role
        fitting = [n for n, d in self.databases.items() if d.role == role and name in (n, d.dbname or n)]
        return name if name in fitting else (fitting[0] if fitting else None)

    def to_wire(self) -> dict[str, Any]:
        """Plain values for the link, secrets in clear: never to a file, a log or a command line."""
        plain: dict[str, Any] = _plain(self)
        return plain

    @classmethod
    def from_wire(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of to_wire(); reads nothing from disk or environment."""
        return cls.model_validate(dict(values), context={"resolved": True})


_NOTHING_OF_ITS_OWN = UserSettings.model_validate({})


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        return {field.alias or name: _plain(getattr(value, name)) for name, field in fields.items()}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, PemFile):
        return plain_pem(value)
    if isinstance(value, PolicyFile):
        return {"path": str(value.path), "text": value.text, "database": value.database}
    return str(value) if isinstance(value, Path | Address) else value

