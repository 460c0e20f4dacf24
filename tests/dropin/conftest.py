"""A PostgreSQL to stand in front of, and either pooler."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.dropin.oracle import PGBOUNCER
from tests.dropin.rig import OURS, THEIRS, Played
from tests.support.need import missing
from tests.support.postgres import Database, make_database, postgres_servers

__all__ = ["postgres_servers"]  # a fixture

Play = Callable[..., Played]


@pytest.fixture(scope="module")
def server(postgres_servers: Callable[[int], object]) -> Database:
    """A database of this module's own; its role logs in by scram."""
    return make_database(postgres_servers(15))  # type: ignore[arg-type]


@pytest.fixture
def play(server: Database) -> Iterator[Play]:
    """play(side, settings=…) → it runs, in front of the database as `app`."""
    with playing(server) as start:
        yield start


@contextmanager
def playing(server: Database) -> Iterator[Play]:
    """Whatever it starts ends with the block."""
    with ExitStack() as made:
        def start(side: str = OURS, *, run: bool = True, **more: object) -> Played:
            if side == THEIRS and PGBOUNCER is None:
                missing("no pgbouncer on PATH")
            folder = Path(tempfile.mkdtemp(prefix="dropin-"))
            made.callback(shutil.rmtree, folder, ignore_errors=True)
            options: dict[str, object] = {
                "databases": f"app = host=127.0.0.1 port={server.port} dbname={server.dbname}",
                "users": {server.user: server.password}, **more,
            }
            played = Played(side, folder, **options)  # type: ignore[arg-type]
            made.callback(played.stop)
            if run:
                played.start()
            else:
                played.write()
            return played

        yield start
