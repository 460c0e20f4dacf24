"""Refused at once, on real sessions: no time for the queue, no tokens left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psycopg
import pytest
from psycopg.rows import dict_row

from pooler.admission.estimator import SAMPLES_MIN
from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

DEADLINE_SECONDS = 0.05
EXECUTION_SECONDS = 0.1
QUEUE = 50  # times that execution: five seconds
BURST = 3
TENANTS = (
    {"match": {"application_name": "slow"}, "tenant": "slow", "class": "slow"},
    {"match": {"application_name": "metered"}, "tenant": "metered"},
    {"match": {"application_name": "dear"}, "tenant": "dear"},
)
POLICY = {
    "executionClasses": {"interactive": {"permits": 3, "maxQueue": 100},
                         "slow": {"permits": 1, "maxQueue": 100, "queueDeadline": "60s"}},
    "tenants": {"metered": {"bucket": {"rate": 0.001, "burst": BURST, "mode": "reject"}},
                "dear": {"bucket": {"rate": 1, "burst": 1, "cost": 2}}},
}


@pytest.fixture(scope="module")
def fleet(make_shared_fleet: MakeFleet, etcd: Etcd, postgres_newest: Database) -> RunningFleet:
    return make_shared_fleet(postgres_newest, etcd, permits=4, workers=1, policy=POLICY, tenants=TENANTS,
                             more={"pool": {"default_pool_size": 4}})


def rows_of(fleet: RunningFleet, what: str) -> list[dict[str, object]]:
    with psycopg.connect(fleet.console(), autocommit=True, row_factory=dict_row) as console:
        return console.execute(f"show {what}").fetchall()


def client(fleet: RunningFleet, name: str) -> psycopg.Connection:
    return psycopg.connect(fleet.dsn(application_name=name), autocommit=True)


@contextmanager
def queued(fleet: RunningFleet, count: int) -> Iterator[None]:
    """So many wait behind one that executes, until the block is over."""
    with ExitStack() as stack:
        holder = stack.enter_context(psycopg.connect(fleet.dsn(application_name="slow")))
        waiters = [stack.enter_context(client(fleet, "slow")) for _ in range(count)]
        holder.execute("select 1")
        threads = [threading.Thread(target=each.execute, args=("select 1",)) for each in waiters]
        for each in threads:
            each.start()
        try:
            wait_until(lambda: len(rows_of(fleet, "waiters")) == count, "they wait", 30)
            yield
        finally:
            holder.rollback()
            for each in threads:
                each.join()


def test_a_deadline_of_50_ms_behind_a_queue_of_5_s_is_refused_long_before_it_is_over(
    fleet: RunningFleet
) -> None:
    with client(fleet, "slow") as slow:
        for _ in range(SAMPLES_MIN):
            slow.execute(f"select pg_sleep({EXECUTION_SECONDS})")
    took = []
    with queued(fleet, QUEUE), client(fleet, "slow") as hasty:
        hasty.execute(f"set pooler.deadline = {DEADLINE_SECONDS * 1000:.0f}")
        for _ in range(5):
            began = time.perf_counter()
            with pytest.raises(psycopg.errors.TooManyConnections, match="50 ms are left") as refused:
                hasty.execute("select 1")
            took.append(time.perf_counter() - began)
            hint = refused.value.diag.message_hint
            assert hint is not None
            assert hint.startswith("retry=after after_ms=")
        waiting = rows_of(fleet, "waiters")
        assert len(waiting) == QUEUE
        assert {row["expected_ms"] for row in waiting} != {None}
    assert min(took) < DEADLINE_SECONDS / 5
    with client(fleet, "slow") as again:
        again.execute(f"set pooler.deadline = {DEADLINE_SECONDS * 1000:.0f}")
        assert again.execute("select 1").fetchone() == (1,)


def test_a_tenant_is_admitted_its_burst_at_once_and_told_when_to_come_again(fleet: RunningFleet) -> None:
    with client(fleet, "metered") as one, client(fleet, "metered") as other, client(fleet, "free") as free:
        for each in (one, other, one):
            each.execute("select 1")
        with pytest.raises(psycopg.errors.ConfigurationLimitExceeded, match='tenant "metered"') as refused:
            other.execute("select 1")
        hint = refused.value.diag.message_hint
        assert hint is not None
        assert hint.startswith("retry=after after_ms=")
        assert int(hint.split()[1].removeprefix("after_ms=")) > 500_000
        free.execute("select 1")
        (row,) = [row for row in rows_of(fleet, "tenants") if row["tenant"] == "metered"]
        shown = [float(str(row[name])) for name in ("burst", "admitted_cost", "refused_cost")]
        assert shown == [BURST, BURST, 1]


def test_what_can_never_be_paid_is_said_to_be_so(fleet: RunningFleet) -> None:
    with client(fleet, "dear") as dear:
        with pytest.raises(psycopg.errors.ProgramLimitExceeded) as refused:
            dear.execute("select 1")
        assert (refused.value.diag.message_hint or "").startswith("retry=never\n")
