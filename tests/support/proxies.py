"""Fixtures of a real HAProxy and a real PgBouncer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import pytest

from pooler.demo.haproxy import HAProxy, find_program
from pooler.demo.pgbouncer import PgBouncer
from pooler.demo.postgres import temporary_directory
from tests.support.need import missing
from tests.support.postgres import Database

RunHAProxy = Callable[[str, list[int]], HAProxy]
RunPgBouncer = Callable[..., PgBouncer]


@pytest.fixture
def run_haproxy() -> Iterator[RunHAProxy]:
    """run_haproxy(configuration, ports) → a HAProxy that accepts on these ports."""
    if find_program("haproxy") is None:
        missing("no haproxy (Debian's haproxy)")
    base = temporary_directory("haproxy")
    with ExitStack() as started:
        started.callback(shutil.rmtree, base)

        def run(configuration: str, ports: list[int]) -> HAProxy:
            directory = base / f"h{len(list(base.iterdir()))}"
            directory.mkdir()
            proxy = HAProxy(directory, configuration, ports)
            started.callback(proxy.stop)
            proxy.start()
            return proxy

        yield run


@pytest.fixture
def run_pgbouncer() -> Iterator[RunPgBouncer]:
    """run_pgbouncer(database, pool_mode=…) → a PgBouncer in front of that database."""
    if find_program("pgbouncer") is None:
        missing("no pgbouncer (Debian's pgbouncer)")
    base = temporary_directory("pgbouncer")
    with ExitStack() as started:
        started.callback(shutil.rmtree, base)

        def run(database: Database, settings: Mapping[str, str] | None = None) -> PgBouncer:
            directory = base / f"p{len(list(base.iterdir()))}"
            directory.mkdir(mode=0o755)
            target = f"host=127.0.0.1 port={database.port} dbname={database.dbname}"
            users = {database.user: database.password}
            bouncer = PgBouncer(directory, database.dbname, target, users, settings)
            started.callback(bouncer.stop)
            bouncer.start()
            return bouncer

        yield run
