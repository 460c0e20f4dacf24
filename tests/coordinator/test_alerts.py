"""What stands too long, is leaked or is checked out for too long is told once, by whom it concerns."""

from __future__ import annotations

from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from coordinator.alerting import Alerting
from coordinator.alerts import Watchlist, What, unwatched
from coordinator.http import Figures, make_scrape
from coordinator.ledger.record import COMMAND_INDEX, Kind, Permit, Worker
from coordinator.ledger.snapshot import Held
from coordinator.ledger.states import SessionState
from coordinator.link_values import parse_permit, permit_list
from coordinator.session_table import SessionTable, encode_who
from coordinator.store.api import Put
from tests.coordinator.parts import Worker as StandIn
from tests.coordinator.stage import DB, TTL_SECONDS, Stage, row, stage
from tests.ledger.ground import BACKEND, KEYS, session, write

Logs = Sequence[MutableMapping[str, Any]]


def clock_us() -> int:
    return int(trio.current_time() * 1_000_000)


@asynccontextmanager
async def watched(run_dir: Path) -> AsyncIterator[tuple[Stage, StandIn, Alerting]]:
    """A worker `A` whose coordinator watches it."""
    async with stage(run_dir) as on, on.worker("A") as worker:
        alerting = Alerting(on.store, on.views, on.registry, host="host", run_dir=run_dir,
                            ttl_seconds=TTL_SECONDS, clock_us=clock_us)
        on.workers.on_report.append(alerting.reported)
        on.nursery.start_soon(alerting.run)
        yield on, worker, alerting


async def opened(worker: StandIn, pid: int = 42) -> Permit:
    answer = await worker.reserve(db=DB)
    backend = {"address": BACKEND.address, "system_identifier": BACKEND.system_identifier,
               "timeline": 1, "postmaster_start_us": BACKEND.postmaster_start_us}
    await worker.call(
        "open", db=DB, permit=answer["permit"], pid=pid, backend_start_us=5_000, backend=backend)
    return parse_permit(answer["permit"])


async def tell(worker: StandIn, held: list[Permit], late: list[dict[str, Any]] | None = None) -> None:
    await worker.call("heartbeat", held=[[DB, permit_list(each)] for each in held], late=late or [])


async def cycles(count: float) -> None:
    await trio.sleep(count * TTL_SECONDS)  # noqa: TID251 - on a clock that jumps


def told(logs: Logs, event: str) -> list[MutableMapping[str, Any]]:
    return [line for line in logs if line["event"] == event]


@pytest.mark.parametrize("op", ["unknown", "closing"])
async def test_a_permit_of_a_live_worker_that_stays_unknown_or_closing_is_told_within_two_lease_cycles(
    tmp_path: Path, clock: MockClock, op: str
) -> None:
    async with watched(tmp_path) as (_, worker, alerting):
        permit = await opened(worker)
        table = SessionTable.create(tmp_path, "A")
        table.take(DB, permit, 42).busy(7, encode_who("acme", "batch", "10.0.0.9"), 1)
        table.close()
        await worker.call(op, db=DB, permit=permit_list(permit), abandoned=False)
        with capture_logs() as logs:
            await cycles(1)
            assert told(logs, "session_permit_stuck") == []
            await cycles(1)
            (line,) = told(logs, "session_permit_stuck")
            assert {name: line[name] for name in ("owner", "pid", "tenant", "ticket", "permit", "host")} == {
                "owner": "A", "pid": 42, "tenant": "acme", "ticket": "7", "permit": str(permit),
                "host": "host"}
            assert TTL_SECONDS <= line["age_seconds"] <= 2 * TTL_SECONDS
            await cycles(3)
            assert len(told(logs, "session_permit_stuck")) == 1
            assert [each.what for each in alerting.standing] == [What[op.upper()]]
            await worker.release(permit_list(permit), "eof", db=DB)
            await cycles(1)
            assert (alerting.standing, len(told(logs, "session_alert_over"))) == ((), 1)


async def test_what_was_told_stands_while_etcd_is_away_and_is_not_told_again(
    tmp_path: Path, clock: MockClock
) -> None:
    async with watched(tmp_path) as (on, worker, alerting):
        permit = await opened(worker)
        await worker.call("unknown", db=DB, permit=permit_list(permit), abandoned=False)
        with capture_logs() as logs:
            await cycles(2)
            on.store.silent = True
            await cycles(4)
            assert [each.what for each in alerting.standing] == [What.UNKNOWN]
            on.store.silent = False
            await cycles(2)
        assert len(told(logs, "session_permit_stuck")) == 1
        assert told(logs, "session_alert_over") == []


async def test_a_permit_in_no_pool_is_told_as_leaked_within_two_lease_cycles(
    tmp_path: Path, clock: MockClock
) -> None:
    async with watched(tmp_path) as (_, worker, _alerting):
        kept, lost = await opened(worker), await opened(worker, 43)
        await tell(worker, [kept, lost])
        with capture_logs() as logs:
            await cycles(1)
            await tell(worker, [kept])
            await cycles(1)
            assert told(logs, "session_leaked") == []
            await tell(worker, [kept])
            await trio.testing.wait_all_tasks_blocked()
            (line,) = told(logs, "session_leaked")
        assert (line["permit"], line["owner"], line["pid"]) == (str(lost), "A", 43)
        assert line["age_seconds"] == TTL_SECONDS


async def test_what_is_being_opened_is_not_leaked_whatever_the_worker_says(
    tmp_path: Path, clock: MockClock
) -> None:
    async with watched(tmp_path) as (_, worker, _alerting):
        await worker.reserve(db=DB)
        with capture_logs() as logs:
            for _ in range(3):
                await tell(worker, [])
                await cycles(1)
        assert told(logs, "session_leaked") == []


async def test_a_checkout_past_its_limit_is_told_at_the_workers_word_and_over_with_it(
    tmp_path: Path, clock: MockClock
) -> None:
    async with watched(tmp_path) as (_, worker, alerting):
        permit = await opened(worker)
        await cycles(1)
        late = {"db": DB, "permit": permit_list(permit), "pid": 42, "tenant": "acme", "age_us": 3_500_000,
                "limit_seconds": 3.0}
        with capture_logs() as logs:
            for _ in range(2):
                await tell(worker, [permit], [late])
                await trio.testing.wait_all_tasks_blocked()
            (line,) = told(logs, "checkout_late")
            assert (line["tenant"], line["pid"], line["limit_seconds"]) == ("acme", 42, 3.0)
            assert (line["owner"], line["age_seconds"]) == ("A", 3.5)
            await tell(worker, [permit])
            await cycles(1)
        assert alerting.standing == ()


async def test_a_word_that_makes_no_sense_costs_no_lease(
    tmp_path: Path, clock: MockClock
) -> None:
    async with watched(tmp_path) as (_, worker, _alerting):
        permit = await opened(worker)
        with capture_logs() as logs:
            answer = await worker.call("heartbeat", held=[[DB, permit_list(permit)]], late=[{"db": DB}])
        assert (answer, len(told(logs, "something_failed"))) == ({"alive": True}, 1)


async def test_the_leader_tells_of_those_that_no_other_coordinator_watches(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        for boot_id, index in (("far", 0), ("command-1", COMMAND_INDEX)):
            record = Worker(boot_id, index, index, "other", "m", "k", 1, 2)
            write(on.keyspace, Put(KEYS.worker(boot_id), record.encode(), on.keyspace.grant()))
        for slot, owner in enumerate(("far", "command-1", "dead")):
            held = session(SessionState.CLOSING, slot=slot, seat=slot, owner=owner, request_id=f"r{slot}",
                           pid=40 + slot, backend_start_us=1)
            await on.put(KEYS.session(Kind.MAIN, slot), held.encode())
        found = unwatched(await on.ledger.snapshot())
        assert {each.session.owner for each in found} == {"command-1", "dead"}


async def test_a_worker_of_its_own_whose_lease_is_over_is_told_of_once_by_a_coordinator_that_leads(
    tmp_path: Path, clock: MockClock
) -> None:
    async with watched(tmp_path) as (on, worker, alerting):
        on.reconciler.owners.watched_here = alerting.watches
        permit = await opened(worker)
        on.eyes.server.rows = [row(42, 5_000)]
        on.expire("A")
        with capture_logs() as logs:
            for _ in range(4):
                await on.reconcile()
                await cycles(1)
            assert await on.states() == {0: str(SessionState.UNKNOWN)}
            assert len(told(logs, "session_permit_stuck")) == 1
            stands = (*alerting.standing, *on.reconciler.owners.standing)
            assert [each.permit for each in stands] == [permit]


def test_an_alert_goes_on_when_the_order_to_end_the_session_is_noted_in_its_permit() -> None:
    watchlist, held = Watchlist(), session(SessionState.UNKNOWN, pid=42, backend_start_us=1)
    watchlist.look(DB, [Held(held, 10)], 1_000_000, 5_000_000)
    (alert,) = watchlist.look(DB, [Held(replace(held, terminating=True), 11)], 9_000_000, 5_000_000)
    assert alert.age_seconds(9_000_000) == 8.0
    closing = Held(replace(held, state=SessionState.CLOSING), 12)
    assert watchlist.look(DB, [closing], 9_500_000, 5_000_000) == []


async def test_a_metric_names_owner_pid_tenant_and_age_of_each(tmp_path: Path, clock: MockClock) -> None:
    async with watched(tmp_path) as (_, worker, alerting):
        permit = await opened(worker)
        late = {"db": DB, "permit": permit_list(permit), "pid": 42, "tenant": "acme", "age_us": 3_500_000,
                "limit_seconds": 3.0}
        await tell(worker, [permit], [late])
        await trio.testing.wait_all_tasks_blocked()
        now = clock_us()
        text = make_scrape(Figures(
            leading=False, workers_linked=1, waiting={}, unknown_age_seconds={}, unknown_old={}, released={},
            requests={}, alerts=[(each, each.age_seconds(now) - less) for each in alerting.standing
                                 for less in (1.0, 0.0)]), {}, {})  # of the leader's watch, too
        (line,) = [line for line in text.decode().splitlines()
                   if line.startswith("pooler_session_alert_age_seconds{")]
        labels = {'alert="late_checkout"', 'owner="A"', 'pid="42"', 'tenant="acme"', 'host="host"',
                  f'permit="{permit}"'}
        assert all(label in line for label in labels)
        assert float(line.rpartition(" ")[2]) == 3.5


async def test_what_stands_in_a_ledger_that_is_lost_stands_until_it_can_be_told(
    tmp_path: Path, clock: MockClock
) -> None:
    async with watched(tmp_path) as (on, worker, alerting):
        permit = await opened(worker)
        await worker.call("unknown", db=DB, permit=permit_list(permit))
        await cycles(2)
        (stands,) = alerting.standing
        with capture_logs() as logs:
            on.views.views[DB] = replace(on.views.views[DB], lost="wiped")
            await alerting.look()
            assert alerting.standing == (stands,)
        assert told(logs, "session_alert_over") == []


async def test_a_late_checkout_that_its_worker_tells_of_no_more_ends(
    tmp_path: Path, clock: MockClock
) -> None:
    async with watched(tmp_path) as (on, worker, alerting):
        permit = await opened(worker)
        late = {"db": DB, "permit": permit_list(permit), "pid": 42, "tenant": "acme", "age_us": 3_500_000,
                "limit_seconds": 3.0}
        await tell(worker, [permit], [late])
        on.registry.workers["A"].link = None  # its link is lost: it is not dead, and tells nothing
        with capture_logs() as logs:
            await cycles(2)
            assert [each.what for each in alerting.standing] == [What.LATE_CHECKOUT]
            await cycles(2)
            assert alerting.standing == ()
            assert len(told(logs, "session_alert_over")) == 1
