"""Reloads, and a pause in which the server changes, under clients that come and go all the time."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
import yaml

from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]

RELOADS = int(os.environ.get("POOLER_RELOADS", "20"))  # the field report had 100
COMING, STAYING = 6, 4


class Traffic:
    """Clients that come, ask once and go; `errors` is everything that went wrong for one of them."""

    def __init__(self, fleet: RunningFleet) -> None:
        self._fleet = fleet
        self._stop = threading.Event()
        self.seen: Counter[str] = Counter()
        self.errors: list[str] = []

    @contextmanager
    def coming(self) -> Iterator[None]:
        with ThreadPoolExecutor(COMING) as threads:
            for _ in range(COMING):
                threads.submit(self._come)
            try:
                yield
            finally:
                self._stop.set()

    def _come(self) -> None:
        while not self._stop.is_set():
            try:
                with psycopg.connect(self._fleet.dsn(), autocommit=True) as client:
                    client.execute("select 1")
                    self.seen["served"] += 1
            except psycopg.Error as error:
                self.errors.append(str(error))


def reload(console: psycopg.Connection[Any]) -> None:
    console.execute("RELOAD")


def test_reloads_drop_nobody_and_refuse_nobody_but_for_a_database_that_is_gone(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    """R76. Unchanged, and with another database that comes and goes."""
    fleet = make_fleet(postgres_newest, etcd, permits=8, workers=2, more={"pool": {"default_pool_size": 4}})
    alone = fleet.config.read_text()
    settings = yaml.safe_load(alone)
    name = postgres_newest.dbname
    settings["databases"]["another"] = {**settings["databases"][name], "dbname": "postgres"}
    both = yaml.safe_dump(settings)
    traffic = Traffic(fleet)
    staying = [psycopg.connect(fleet.dsn(), autocommit=True) for _ in range(STAYING)]
    with psycopg.connect(fleet.console(), autocommit=True) as console, traffic.coming():
        for _ in range(RELOADS):
            reload(console)
        for _ in range(max(2, RELOADS // 10)):
            fleet.config.write_text(both)
            reload(console)
            with psycopg.connect(fleet.dsn(dbname="another"), autocommit=True) as client:
                assert client.execute("select 1").fetchone() == (1,)
                fleet.config.write_text(alone)
                reload(console)
            with pytest.raises(psycopg.OperationalError, match='database "another" does not exist'):
                psycopg.connect(fleet.dsn(dbname="another"))
        at = traffic.seen["served"]
        wait_until(lambda: traffic.seen["served"] > at + 20, "they come and are served", 20)
    assert traffic.errors == []
    for client in staying:
        assert client.execute("select 1").fetchone() == (1,)
        client.close()


def test_while_paused_clients_wait_and_none_is_refused_and_every_worker_says_so(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    """R62. The reload in it names the server in another way; logins under way are no failures of its pool."""
    fleet = make_fleet(postgres_newest, etcd, permits=4, workers=2)
    name = postgres_newest.dbname
    settings = yaml.safe_load(fleet.config.read_text())
    settings["databases"][name]["hosts"] = [f"localhost:{postgres_newest.port}"]
    traffic = Traffic(fleet)
    with psycopg.connect(fleet.console(), autocommit=True) as console:

        def paused() -> list[object]:
            shown = console.cursor(row_factory=psycopg.rows.dict_row).execute("SHOW DATABASES WORKERS")
            return [row["paused"] for row in shown.fetchall() if row["name"] == name]

        with traffic.coming():
            wait_until(lambda: traffic.seen["served"] > 20, "they come and are served", 20)
            console.execute("PAUSE")
            assert paused() == [1, 1]
            fleet.config.write_text(yaml.safe_dump(settings))
            reload(console)
            at, began = traffic.seen["served"], time.monotonic()
            wait_until(lambda: time.monotonic() > began + 1, "a second has gone", 5)
            assert traffic.seen["served"] <= at
            assert paused() == [1, 1]
            console.execute("RESUME")
            wait_until(lambda: traffic.seen["served"] > at + 20, "they are served again", 30)
            assert paused() == [0, 0]
    assert traffic.errors == []
