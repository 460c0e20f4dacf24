"""What a coordinator is to be: the answer to `spec` on the supervisor's link, checked once.

Secrets are kept out of every repr.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self


class SpecFault(Exception):
    """The supervisor's answer is not a specification: names the field."""


@dataclass(frozen=True, slots=True)
class Monitor:
    """The login of the coordinator's own looks at the servers (a role with pg_monitor). `tls`: libpq's
    parameters for it."""

    user: str
    password: str = field(repr=False)
    tls: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        return cls(values["user"], values.get("password") or "", dict(values.get("tls") or {}))


@dataclass(frozen=True, slots=True)
class DatabaseSpec:
    """One database of the config; several may share one ledger (`db`)."""

    db: str
    name: str
    dbname: str
    hosts: tuple[str, ...]
    role: str = "write"
    policy: str | None = None
    monitor: Monitor | None = None
    users: tuple[str, ...] = ()  # roles that the pools log in as, as far as the config knows them
    max_replica_lag_seconds: float | None = None  # of a standby that is read from; None: any

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        monitor = values.get("monitor")
        return cls(
            db=values["db"], name=values["name"], dbname=values["dbname"], hosts=tuple(values["hosts"]),
            role=values.get("role") or "write", policy=values.get("policy"),
            monitor=Monitor.parse(monitor) if monitor else None, users=tuple(values.get("users") or ()),
            max_replica_lag_seconds=values.get("max_replica_lag_seconds"),
        )


@dataclass(frozen=True, slots=True)
class EtcdSpec:
    """Where the ledger is; `embedded`: the coordinator runs an etcd of its own."""

    embedded: bool = False
    endpoints: tuple[str, ...] = ()
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    data_dir: str | None = None

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        names = ("user", "password", "ca", "cert", "key", "data_dir")
        return cls(
            embedded=bool(values.get("embedded")), endpoints=tuple(values.get("endpoints") or ()),
            **{name: values.get(name) for name in names},
        )


@dataclass(frozen=True, slots=True)
class LogSpec:
    """How lines of the log are written, and from which level on."""

    format: Literal["json", "console"] = "json"
    level: str = "info"

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        return cls(values.get("format") or "json", values.get("level") or "info")


@dataclass(frozen=True, slots=True)
class CoordinatorSpec:
    """Everything the coordinator of one host needs to know."""

    fleet: str
    prefix: str
    host: str
    machine_id: str
    run_dir: str
    socket: str
    lease_ttl_seconds: float
    etcd: EtcdSpec
    databases: tuple[DatabaseSpec, ...]
    http_fd: int | None = None
    http_token: str | None = field(default=None, repr=False)
    reconcile: str = "observe"  # or "terminate"
    unknown_terminate_after_seconds: float = 60.0
    orphan_connect_grace_seconds: float = 120.0
    node_identity: str = "node"  # or "provider"
    patroni: tuple[str, ...] = ()  # URLs of its REST interface, where failovers are heard of there
    fence_command: str = field(default="", repr=False)
    drain_timeout_seconds: float = 30.0
    log: LogSpec = LogSpec()

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Raises SpecFault naming a field that is missing."""
        try:
            return cls(
                fleet=values["fleet"], prefix=values["prefix"], host=values["host"],
                machine_id=values["machine_id"], run_dir=values["run_dir"], socket=values["socket"],
                lease_ttl_seconds=float(values["lease_ttl_seconds"]), etcd=EtcdSpec.parse(values["etcd"]),
                databases=tuple(DatabaseSpec.parse(each) for each in values["databases"]),
                http_fd=values.get("http_fd"), http_token=values.get("http_token"),
                reconcile=values.get("reconcile") or "observe",
                unknown_terminate_after_seconds=float(values.get("unknown_terminate_after_seconds") or 60.0),
                orphan_connect_grace_seconds=float(values.get("orphan_connect_grace_seconds", 120.0)),
                node_identity=values.get("node_identity") or "node",
                patroni=tuple(values.get("patroni") or ()), fence_command=values.get("fence_command") or "",
                drain_timeout_seconds=float(values.get("drain_timeout_seconds", 30.0)),
                log=LogSpec.parse(values.get("log") or {}),
            )
        except KeyError as missing:
            raise SpecFault(f"the coordinator's specification lacks {missing.args[0]!r}") from None

    def ledgers(self) -> dict[str, tuple[DatabaseSpec, ...]]:
        """The databases of the config by the ledger they share, in the config's order."""
        found: dict[str, tuple[DatabaseSpec, ...]] = {}
        for each in self.databases:
            found[each.db] = (*found.get(each.db, ()), each)
        return found
