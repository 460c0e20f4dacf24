"""What a suite runs against: a PostgreSQL of its own and, for a pooled run, a fleet in front of it.

Both are made anew for each run, so that what one leaves behind cannot be seen by the next.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from psycopg import sql

from pooler.demo.etcd import Etcd
from pooler.demo.fleet import Fleet, FleetPlan
from pooler.demo.postgres import MONITOR_GRANTS, Limits, Role, Server, installations, temporary_directory
from pooler.demo.process import PartFailed

Pool = Literal["direct", "session", "transaction"]
PERMITS = 80
POOL_SIZE = 70
REPLICATIONS = 8
CONNECTIONS = 100
USER, PASSWORD, DATABASE = "scott", "tiger", "test"  # the ones that SQLAlchemy's suite expects
MONITOR = "suite_monitor"
NEVER = "8760h"
LOGIN_TIMEOUT = "5s"  # of the server and of the pooler: who is never let in holds up both as long
ASKS = {"user": "postgres", "dbname": "postgres"}  # for the secrets of roles that a suite makes itself


@dataclass(frozen=True, slots=True)
class Target:
    """Where a suite connects, as a superuser with a password. `server` is the PostgreSQL itself."""

    host: str
    port: int
    user: str
    password: str
    dbname: str
    pool: Pool
    version: int
    server: Server
    log: Path | None = None

    @property
    def url(self) -> str:
        return f"postgresql://{self.user}:{self.password}@{self.host}:{self.port}/{self.dbname}"

    @property
    def libpq(self) -> dict[str, str]:
        """libpq's environment."""
        return {"PGHOST": self.host, "PGPORT": str(self.port), "PGUSER": self.user,
                "PGPASSWORD": self.password, "PGDATABASE": self.dbname}


class SuiteFleet(Fleet):
    """A fleet that serves every database of one server, under one ledger."""

    pool: Pool = "session"

    def settings(self) -> dict[str, Any]:
        values = super().settings()
        (entry,) = values["databases"].values()
        shared = {**entry, "pool_mode": self.pool, "pool_size": POOL_SIZE}
        values["databases"] = {
            self.plan.dbname: shared, "*": {key: value for key, value in shared.items() if key != "dbname"}}
        return values


@contextmanager
def target(
    pool: Pool, version: int, *, settings: Mapping[str, str] | None = None,
    set_up: Callable[[Server], None] | None = None, workers: int = 1,
    sections: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[Target]:
    """A server of that version with database, superuser and what `set_up` adds, and a fleet unless `direct`.

    `settings` are PostgreSQL's, `sections` are merged into pooler.yaml. Raises PartFailed.
    """
    if version not in installations():
        raise PartFailed(f"no PostgreSQL {version} here: there is {', '.join(map(str, installations()))}")
    base = temporary_directory("suite")
    with ExitStack() as running:
        running.callback(shutil.rmtree, base, ignore_errors=True)
        server = _server(version, base / "server", settings or {})
        running.callback(server.stop, immediate=True)
        if set_up is not None:
            set_up(server)
        port, log = server.port, None
        if pool != "direct":
            fleet = _fleet(running, base, server, pool, workers, sections or {})
            port, log = fleet.ports.listen, fleet.log
        yield Target("127.0.0.1", port, USER, PASSWORD, DATABASE, pool, version, server, log)


def _server(version: int, directory: Path, settings: Mapping[str, str]) -> Server:
    server = Server.create(
        installations()[version], directory, limits=Limits(max_connections=CONNECTIONS),
        settings={"max_wal_senders": str(REPLICATIONS), "authentication_timeout": LOGIN_TIMEOUT, **settings})
    server.start()
    server.create_role(Role(USER, PASSWORD))
    server.execute(sql.SQL("ALTER ROLE {} SUPERUSER").format(sql.Identifier(USER)))
    server.execute(sql.SQL("ALTER ROLE postgres PASSWORD {}").format(sql.Literal(PASSWORD)))
    server.create_role(Role(MONITOR, PASSWORD, MONITOR_GRANTS))
    server.create_database(DATABASE, USER)
    return server


def _fleet(
    running: ExitStack, base: Path, server: Server, pool: Pool, workers: int,
    sections: Mapping[str, Mapping[str, Any]],
) -> Fleet:
    (base / "etcd").mkdir()
    etcd = Etcd(base / "etcd")
    etcd.start()
    running.callback(etcd.kill)
    fleet = SuiteFleet(FleetPlan(
        base / "fleet", (f"127.0.0.1:{server.port}",), DATABASE,
        {USER: PASSWORD, "postgres": PASSWORD, "admin": "console"},
        tuple(etcd.endpoints), (MONITOR, PASSWORD), name="suites", workers=workers, permits=PERMITS,
        more={"auth": ASKS, **sections, "pool": {"client_login_timeout": LOGIN_TIMEOUT} | dict(
            sections.get("pool", {})), "etcd": {"prefix": f"suite-{secrets.token_hex(6)}"}},
        policy={"replicationReserve": REPLICATIONS, "executionClasses": {"all": {
            "permits": PERMITS, "maxQueue": 5000, "queueDeadline": NEVER, "maxWait": NEVER,
            "transactionLimit": NEVER}}}))
    fleet.pool = pool
    fleet.write()
    running.callback(fleet.stop)
    fleet.start()
    return fleet
