"""Execution permits over the workers of a fleet: never more than there are, by weight wherever clients are,
none idle beside one that waits, and nothing written while nothing changes."""

from __future__ import annotations

import base64
import json
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg.rows import dict_row

from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

PERMITS = 8
CLIENTS = 12  # of each tenant: more than all permits
SECONDS = 3.0
TENANTS = ({"match": {"application_name": "heavy"}, "tenant": "heavy"},
           {"match": {"application_name": "light"}, "tenant": "light"})
POLICY = {"executionClasses": {"all": {"permits": PERMITS, "maxQueue": 100}},
          "tenants": {"heavy": {"weight": 3}}}


class Load:
    """Each tenant's clients on a worker of its own, from `begin` to `end`."""

    def __init__(self, fleet: RunningFleet) -> None:
        self._fleet = fleet
        self.served: Counter[str] = Counter()
        self._over = {"heavy": threading.Event(), "light": threading.Event()}
        self._threads: list[threading.Thread] = []
        self.raised: list[psycopg.Error] = []

    def begin(self, tenant: str, worker: int) -> None:
        port = self._fleet.fleet.ports.primary + worker
        for _ in range(CLIENTS):
            thread = threading.Thread(target=self._work, args=(tenant, port))
            thread.start()
            self._threads.append(thread)

    def _work(self, tenant: str, port: int) -> None:
        try:
            with psycopg.connect(self._fleet.dsn(port, application_name=tenant), autocommit=True) as one:
                while not self._over[tenant].is_set():
                    one.execute("select pg_sleep(0.02)")
                    self.served[tenant] += 1
        except psycopg.Error as fault:
            self.raised.append(fault)

    def end(self, *tenants: str) -> None:
        for tenant in tenants:
            self._over[tenant].set()

    def join(self) -> None:
        self.end(*self._over)
        for thread in self._threads:
            thread.join()


@contextmanager
def loaded(fleet: RunningFleet) -> Iterator[Load]:
    load = Load(fleet)
    try:
        yield load
    finally:
        load.join()
    assert load.raised == []


class Executing:
    """How many of the application's sessions execute, as the server says."""

    def __init__(self, database: Database, connection: psycopg.Connection) -> None:
        self._user = database.user
        self._connection = connection

    def now(self) -> int:
        row = self._connection.execute(
            "select count(*) from pg_stat_activity where usename = %s and state = 'active'"
            " and pid <> pg_backend_pid()", [self._user]).fetchone()
        assert row is not None
        return int(row[0])

    def during(self, seconds: float) -> list[int]:
        deadline, seen = time.monotonic() + seconds, []
        while time.monotonic() < deadline:
            seen.append(self.now())
        return seen


def revision(etcd: Etcd) -> int:
    body = json.dumps({"key": base64.b64encode(b"none").decode()}).encode()
    with urllib.request.urlopen(f"http://{etcd.endpoints[0]}/v3/kv/range", body) as answer:
        return int(json.load(answer)["header"]["revision"])


def allotted(fleet: RunningFleet) -> list[int]:
    """Of the class, by worker."""
    with psycopg.connect(fleet.console(), autocommit=True, row_factory=dict_row) as console:
        rows = console.execute("show classes").fetchall()
    return [int(row["allotted"] or 0) for row in sorted(rows, key=lambda row: int(row["worker"]))]


@pytest.mark.timeout(240)
def test_two_tenants_on_two_workers_share_the_permits_of_the_fleet_by_weight(
    make_fleet: MakeFleet, etcd: Etcd, postgres_newest: Database
) -> None:
    fleet = make_fleet(postgres_newest, etcd, permits=3 * PERMITS, workers=2, policy=POLICY, tenants=TENANTS,
                       more={"pool": {"default_pool_size": 2 * PERMITS},
                                                     "fleet": {"proxy_protocol_from": []}})
    wait_until(lambda: allotted(fleet) == [PERMITS // 2] * 2, "all are out, even over the workers", 30)
    with loaded(fleet) as load, psycopg.connect(postgres_newest.dsn(), autocommit=True) as direct:
        server = Executing(postgres_newest, direct)
        load.begin("heavy", 0)
        wait_until(lambda: allotted(fleet) == [PERMITS, 0], "who needs them has all permits", 30)
        wait_until(lambda: server.now() == PERMITS, "and executes on all of them", 30)
        load.begin("light", 1)
        wait_until(lambda: allotted(fleet) == [6, 2], "shares by weight", 30)
        load.served.clear()
        before = revision(etcd)
        seen = server.during(SECONDS)
        assert revision(etcd) == before  # a steady load writes nothing
        heavy = load.served["heavy"] / load.served.total()
        load.end("heavy")
        wait_until(lambda: allotted(fleet)[1] == PERMITS, "what nobody else needs", 30)
        seen += server.during(0.5)
    print(f"{heavy:.3f} of the transactions are heavy's; at most {max(seen)} executed")  # noqa: T201
    assert max(seen) <= PERMITS
    assert sum(seen) / len(seen) >= 0.8 * PERMITS
    assert heavy == pytest.approx(0.75, abs=0.05)
