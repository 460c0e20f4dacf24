"""Checks across sections of the config: ports that collide, ledgers that contradict, paths too long.

Pure. Each section is None when it was not sound; then what needs it is not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from pooler.net.tls_context import TlsFault, client_tls, server_tls
from pooler.settings_auth import auth_faults
from pooler.settings_etcd import EtcdSettings
from pooler.settings_models import (
    AdminSettings,
    AuthSettings,
    DatabaseSettings,
    FailoverSettings,
    FleetSettings,
    HttpSettings,
    PoolSettings,
    ServiceSettings,
)
from pooler.settings_tls import ClientTlsSettings, ServerTlsSettings
from pooler.settings_units import UNIX_PATH_BYTES_MAX, Address

Found = tuple[str, str]
HAPROXY_PORTS = {"primary": 5433, "replica": 5434, "default": 5436, "offline": 5438}


def faults_across(sections: Mapping[str, Any]) -> Iterator[Found]:
    """(path, what is wrong) for each contradiction among sound sections."""
    fleet: FleetSettings | None = sections["fleet"]
    services: dict[str, ServiceSettings] | None = sections["services"]
    databases: dict[str, DatabaseSettings] | None = sections["databases"]
    if fleet is not None:
        yield from _paths(fleet)
        yield from _ports(fleet, services or {}, sections["http"])
    if databases is not None:
        yield from _ledgers(databases)
        yield from _pools(databases, sections["pool"])
    if services is not None:
        yield from _services(services)
    yield from _etcd(sections["etcd"])
    yield from _failover(sections["failover"])
    yield from _tls(sections["client_tls"], sections["server_tls"])
    auth: AuthSettings | None = sections["auth"]
    if auth is not None:
        admin: AdminSettings | None = sections["admin"]
        yield from auth_faults(auth, databases, sections["client_tls"],
                               as_pgbouncer=admin is not None and admin.as_pgbouncer)


def haproxy_port(name: str, service: ServiceSettings) -> int | None:
    """The port HAProxy offers this service on; None if its name has no default and none is set."""
    return service.haproxy_port or HAPROXY_PORTS.get(name)


def _paths(fleet: FleetSettings) -> Iterator[Found]:
    longest = fleet.run_dir / "coordinator.sock"
    if len(str(longest).encode()) > UNIX_PATH_BYTES_MAX:
        yield "fleet.run_dir", f"{fleet.run_dir} is too long: {longest} must fit {UNIX_PATH_BYTES_MAX} bytes"
    socket = fleet.unix_socket
    if socket is None and not fleet.listen:
        yield "fleet.listen", "is empty, and so is fleet.unix_socket_dir: nobody could come in"
    if socket is not None and len(str(socket).encode()) > UNIX_PATH_BYTES_MAX:
        yield "fleet.unix_socket_dir", f"too long: {socket} must fit {UNIX_PATH_BYTES_MAX} bytes"


def _ports(
    fleet: FleetSettings, services: Mapping[str, ServiceSettings], http: HttpSettings | None
) -> Iterator[Found]:
    ranges = [(f"services.{name}.worker_ports", fleet.host_for_workers, service.worker_ports)
              for name, service in services.items()]
    single = [("fleet.listen", address) for address in fleet.listen]
    if http is not None:
        ranges.append(("http.worker_ports", http.listen.host, http.worker_ports))
        ranges.append(("http.agent_ports", fleet.host_for_workers, http.agent_ports))
        single.append(("http.listen", http.listen))
    taken = list(single)
    for path, host, base in ranges:
        if base + fleet.workers - 1 > 65535:
            yield path, f"{base} is too high for {fleet.workers} workers: the last port would be above 65535"
        else:
            taken += [(path, Address(host, base + index)) for index in range(fleet.workers)]
    told: set[tuple[str, str]] = set()
    for position, (path, address) in enumerate(taken):
        for other_path, other in taken[:position]:
            if address.overlaps(other) and (path, other_path) not in told:
                told.add((path, other_path))
                yield path, f"port {address.port} is also taken by {other_path} ({fleet.workers} workers)"


def _ledgers(databases: Mapping[str, DatabaseSettings]) -> Iterator[Found]:
    first: dict[str, str] = {}
    for name, database in databases.items():
        other = first.setdefault(database.ledger, name)
        if other == name:
            continue
        if databases[other].role != database.role:
            yield (f"databases.{name}.policy",
                   f"ledger {database.ledger} is already that of databases.{other}, "
                   f"whose role is {databases[other].role}, not {database.role}")
        elif databases[other].policy.text != database.policy.text:
            yield (f"databases.{name}.policy",
                   f"ledger {database.ledger} has another policy file at databases.{other}")


def _pools(databases: Mapping[str, DatabaseSettings], pool: PoolSettings | None) -> Iterator[Found]:
    if pool is not None and pool.min_pool_size > pool.default_pool_size:
        yield ("pool.min_pool_size",
               f"{pool.min_pool_size} is more than the pool's size {pool.default_pool_size}")
    for name, database in databases.items():
        size = database.pool_size or (pool.default_pool_size if pool is not None else None)
        if database.min_pool_size is not None and size is not None and database.min_pool_size > size:
            yield (f"databases.{name}.min_pool_size",
                   f"{database.min_pool_size} is more than the pool's size {size}")
        if database.password is not None and database.user is None:
            yield f"databases.{name}.password", "needs `user`: it is the password of that server user"


def _services(services: Mapping[str, ServiceSettings]) -> Iterator[Found]:
    ports: dict[int, str] = {}
    for name, service in services.items():
        port = haproxy_port(name, service)
        if port is not None and ports.setdefault(port, name) != name:
            yield f"services.{name}.haproxy_port", f"{port} is also the port of services.{ports[port]}"


def _etcd(etcd: EtcdSettings | None) -> Iterator[Found]:
    if etcd is None:
        return
    if not etcd.embedded and not etcd.endpoints:
        yield "etcd.endpoints", "is required, such as [\"127.0.0.1:2379\"] (or write `etcd: embedded`)"
    if etcd.embedded and etcd.endpoints:
        yield "etcd.endpoints", "an embedded etcd has no endpoints: leave out one of the two"
    if (etcd.tls.cert is None) != (etcd.tls.key is None):
        yield "etcd.tls", "cert and key belong together: give both or none"
    if (etcd.user is None) != (etcd.password is None):
        yield "etcd.user", "user and password belong together: give both or none"


def _tls(clients: ClientTlsSettings | None, servers: ServerTlsSettings | None) -> Iterator[Found]:
    """What OpenSSL refuses, in one line each."""
    try:
        if clients is not None:
            client_tls(clients)
    except TlsFault as fault:
        yield f"client_tls.{fault.setting}", str(fault)
    try:
        if servers is not None:
            server_tls(servers)
    except TlsFault as fault:
        yield f"server_tls.{fault.setting}", str(fault)


def _failover(failover: FailoverSettings | None) -> Iterator[Found]:
    if failover is not None and failover.detect == "patroni" and not failover.patroni:
        yield "failover.patroni", "is required with detect: patroni: the URLs of its REST interface"
    for number, url in enumerate(failover.patroni if failover is not None else ()):
        if not _is_plain_url(url):
            yield f"failover.patroni[{number}]", "is no http://host:port or https://host:port"


def _is_plain_url(url: str) -> bool:
    """Of a scheme and a host, with or without a port, and nothing more: a login in it would be shown."""
    try:
        parts = urlsplit(url)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        return False
    return (has_port and parts.scheme in ("http", "https") and bool(parts.hostname)
            and parts.username is None and parts.path in ("", "/") and not parts.query and not parts.fragment)
