"""Whose turn it is, on real sessions: shares by weight, a class within its permits, a full queue."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import psycopg
import pytest
from psycopg.rows import dict_row

from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

SESSIONS = 4
TENANTS = (
    {"match": {"application_name": "heavy"}, "tenant": "heavy"},
    {"match": {"application_name": "light"}, "tenant": "light"},
    {"match": {"application_name": "batch"}, "tenant": "batch", "class": "batch"},
)
POLICY = {
    "executionClasses": {"interactive": {"permits": SESSIONS, "maxQueue": 100, "maxLend": 0},
                         "batch": {"permits": 2, "maxQueue": 3}},
    "tenants": {"heavy": {"weight": 3}},
}


@pytest.fixture(scope="module")
def fleet(make_shared_fleet: MakeFleet, etcd: Etcd, postgres_newest: Database) -> RunningFleet:
    return make_shared_fleet(postgres_newest, etcd, permits=SESSIONS + 2, workers=1, policy=POLICY,
                             tenants=TENANTS, more={"pool": {"default_pool_size": SESSIONS}})


@contextmanager
def running(calls: list[Callable[[], None]]) -> Iterator[list[BaseException]]:
    """Each in a thread of its own for as long as the block lasts, and till it ends; what they raised."""
    raised: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as fault:  # noqa: BLE001 - told to the test
            raised.append(fault)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    try:
        yield raised
    finally:
        for thread in threads:
            thread.join()


def rows_of(fleet: RunningFleet, what: str) -> list[dict[str, object]]:
    with psycopg.connect(fleet.console(), autocommit=True, row_factory=dict_row) as console:
        return console.execute(f"show {what}").fetchall()


def class_row(fleet: RunningFleet, name: str) -> dict[str, object]:
    (row,) = [row for row in rows_of(fleet, "classes") if row["class"] == name]
    return row


def test_two_tenants_of_one_pool_share_it_by_their_weights(fleet: RunningFleet) -> None:
    served: Counter[str] = Counter()
    stop = threading.Event()
    counting = threading.Event()

    def client(tenant: str) -> None:
        with psycopg.connect(fleet.dsn(application_name=tenant), autocommit=True) as connection:
            while not stop.is_set():
                connection.execute("select pg_sleep(0.01)")
                if counting.is_set():
                    served[tenant] += 1

    with running([lambda tenant=tenant: client(tenant) for tenant in ("heavy", "light")  # type: ignore[misc]
                  for _ in range(8)]) as raised:
        try:
            wait_until(
                lambda: class_row(fleet, "interactive")["waiting"] == 16 - SESSIONS, "all clients ask", 30)
            counting.set()
            wait_until(lambda: served.total() >= 1_500, "enough transactions", 60)
            counting.clear()
        finally:
            stop.set()
    assert raised == []
    assert served["heavy"] / served.total() == pytest.approx(0.75, rel=0.05)


def test_a_class_keeps_to_its_permits_and_a_full_queue_refuses_at_once(fleet: RunningFleet) -> None:
    """Two of the class hold sessions, three wait; one more is refused, stays connected, and others pass."""
    with ExitStack() as stack:
        holders = [stack.enter_context(psycopg.connect(fleet.dsn(application_name="batch")))
                   for _ in range(2)]
        waiters = [stack.enter_context(psycopg.connect(fleet.dsn(application_name="batch"), autocommit=True))
                   for _ in range(3)]
        extra = stack.enter_context(psycopg.connect(fleet.dsn(application_name="batch"), autocommit=True))
        other = stack.enter_context(psycopg.connect(fleet.dsn(application_name="light"), autocommit=True))
        for holder in holders:
            holder.execute("select 1")
        with running([lambda waiter=waiter: waiter.execute("select 1")  # type: ignore[misc]
                      for waiter in waiters]) as raised:
            wait_until(lambda: class_row(fleet, "batch")["waiting"] == 3, "they wait", 30)
            began = time.monotonic()
            with pytest.raises(psycopg.errors.TooManyConnections, match=r'class "batch".*maxQueue is 3'):
                extra.execute("select 1")
            other.execute("select 1")
            assert time.monotonic() - began < 1.0
            shown = class_row(fleet, "batch")
            assert (shown["executing"], shown["permits"], shown["refused"]) == (2, 2, 1)
            (tenant,) = [row for row in rows_of(fleet, "tenants") if row["tenant"] == "batch"]
            assert (tenant["executing"], tenant["waiting"], tenant["refused"]) == (2, 3, 1)
            bound = [row["bound_by"] for row in rows_of(fleet, "waiters") if row["tenant"] == "batch"]
            assert bound == ["class permits"] * 3
            for holder in holders:
                holder.commit()
        assert raised == []
        extra.execute("select 1")
