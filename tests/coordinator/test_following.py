"""The leader's watch over a backend: one write moves the epoch, and only what is seen now calls for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.following import ELSEWHERE_SECONDS, LEVEL_SECONDS
from coordinator.ledger.record import Epoch, EpochState, Kind, LedgerHead, LedgerState
from coordinator.ledger.states import SessionState
from coordinator.store.api import Compare, Field, Txn
from coordinator.topology import SETTLE_READ_SECONDS
from tests.coordinator.nodes import B2, A, B, C, Followed, Node, followed
from tests.coordinator.stage import DB, NO_FENCE
from tests.ledger.ground import KEYS, TAG, session


def primary_dies(on: Followed) -> None:
    on.nodes.at[A.address] = Node(None)


def standby_is_promoted(on: Followed) -> None:
    on.nodes.at[B.address] = Node(B2)


async def test_as_long_as_the_primary_serves_nobody_else_is_asked(tmp_path: Path, clock: MockClock) -> None:
    async with followed(tmp_path) as on:
        assert not await on.follow()
        assert on.nodes.asked == {A.address: 1}


async def test_once_a_standby_was_promoted_in_the_place_of_a_dead_primary_the_next_epoch_is_there(
    tmp_path: Path, clock: MockClock
) -> None:
    async with followed(tmp_path) as on:
        primary_dies(on)
        assert not await on.follow()
        assert (await on.epoch()).number == 1
        standby_is_promoted(on)
        with capture_logs() as logs:
            assert await on.follow()
        after = await on.epoch()
        assert (after.number, after.state, after.backend) == (2, EpochState.ACTIVE, B2)
        assert (after.failover, after.drain_timeout_seconds) == (True, 7.0)
        assert after.reason == f"{A.address} does not answer ({A.address}: refused); {B.address} was promoted"
        [line] = [each for each in logs if each["event"] == "epoch_failed_over"]
        assert (line["backend"], line["before"]) == (B.address, A.address)
        assert not await on.follow()


async def test_a_server_that_takes_the_connection_and_says_nothing_is_gone(
    tmp_path: Path, clock: MockClock
) -> None:
    async with followed(tmp_path) as on:
        on.nodes.at[A.address] = Node(A, is_silent=True)
        standby_is_promoted(on)
        assert await on.follow()


async def test_the_old_primary_is_never_gone_back_to_neither_as_a_standby_nor_as_a_stale_primary(
    tmp_path: Path, clock: MockClock
) -> None:
    async with followed(tmp_path) as on:
        primary_dies(on)
        standby_is_promoted(on)
        await on.follow()
        for back in (A, replace(A, postmaster_start_us=9, in_recovery=True, timeline=2)):
            on.nodes.at[A.address] = Node(back)
            for there in (Node(B2), Node(None)):
                on.nodes.at[B.address] = there
                assert not await on.follow()
        assert (await on.epoch()).backend == B2


async def test_where_nobody_can_serve_it_is_told_once_and_again_when_it_is_over(
    tmp_path: Path, clock: MockClock
) -> None:
    async with followed(tmp_path) as on:
        with capture_logs() as logs:
            primary_dies(on)
            for _ in range(3):
                await on.follow()
            assert list(on.following.reasons()) == [DB]
            assert on.following.unfit() == frozenset({DB})
            on.nodes.at[A.address] = Node(A)
            await on.follow()
            await on.follow()
        assert (on.following.reasons(), on.following.unfit()) == ({}, frozenset())
        told = [each["event"] for each in logs if each["event"].startswith("backend_")]
        assert told == ["backend_unfit", "backend_fit"]
        assert on.nodes.closed == []  # they are looked at again and again


async def test_a_server_that_was_promoted_in_its_place_is_left_only_for_a_later_timeline_than_that(
    tmp_path: Path, clock: MockClock
) -> None:
    async with followed(tmp_path) as on:
        on.nodes.at[A.address] = Node(replace(A, timeline=3))
        await on.follow()
        primary_dies(on)
        standby_is_promoted(on)  # on timeline 2: of before
        assert not await on.follow()
        on.nodes.at[C.address] = Node(replace(C, timeline=4, in_recovery=False))
        assert await on.follow()
        assert (await on.epoch()).backend.address == C.address


async def test_an_old_primary_that_follows_the_new_one_holds_up_no_failover(
    tmp_path: Path, clock: MockClock
) -> None:
    async with followed(tmp_path) as on:
        on.nodes.at[A.address] = Node(replace(A, timeline=2, in_recovery=True))
        standby_is_promoted(on)
        assert await on.follow()
        assert (await on.epoch()).backend == B2


async def test_a_second_primary_is_told_of_and_not_followed(tmp_path: Path, clock: MockClock) -> None:
    async with followed(tmp_path) as on:
        standby_is_promoted(on)
        on.following.hint(DB)
        with capture_logs() as logs:
            assert not await on.follow()
        assert "two primaries" in next(each for each in logs if each["event"] == "backend_doubtful")["why"]


async def test_a_second_primary_is_told_of_until_it_is_seen_to_be_none(
    tmp_path: Path, clock: MockClock
) -> None:
    async with followed(tmp_path) as on:
        standby_is_promoted(on)
        with capture_logs() as logs:
            for there in (Node(B2), None, Node(None), None):
                if there is not None:
                    on.nodes.at[B.address] = there
                    on.following.hint(DB)
                assert not await on.follow()
                assert "two primaries" in on.following.reasons()[DB]
            on.nodes.at[B.address] = Node(replace(B, timeline=2))
            on.following.hint(DB)
            await on.follow()
        assert on.following.reasons() == {}
        told = [each["event"] for each in logs if each["event"].startswith("backend_")]
        assert told == ["backend_doubtful", "backend_fit"]


async def test_a_second_primary_is_found_while_all_is_well_and_by_a_new_leader_at_once(
    tmp_path: Path, clock: MockClock
) -> None:
    async with followed(tmp_path) as on:
        async def within(seconds: float) -> bool:
            with trio.move_on_after(seconds):
                await trio.sleep_forever()
            return DB in on.following.reasons()

        async with trio.open_nursery() as term:
            term.start_soon(on.following.lead, NO_FENCE)
            assert not await within(3)
            standby_is_promoted(on)
            assert await within(ELSEWHERE_SECONDS + LEVEL_SECONDS)
            assert await within(60)
            term.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        assert on.following.reasons() == {}
        on.stage.nursery.start_soon(on.following.lead, NO_FENCE)
        assert await within(2 * LEVEL_SECONDS)


async def test_a_standby_that_takes_the_connection_and_says_nothing_holds_up_no_failover(
    tmp_path: Path, clock: MockClock
) -> None:
    async with followed(tmp_path) as on:
        on.nodes.at[C.address] = Node(C, is_silent=True)
        on.stage.nursery.start_soon(on.following.lead, NO_FENCE)
        before = 0
        for _ in range(20):
            with trio.move_on_after(LEVEL_SECONDS + 0.1):
                await trio.sleep_forever()
            assert on.nodes.asked[A.address] > before
            before = on.nodes.asked[A.address]


@pytest.mark.parametrize("change", ["drained", "lost", "rebuilt"])
async def test_an_epoch_that_others_move_is_left_alone(
    tmp_path: Path, clock: MockClock, change: str
) -> None:
    async with followed(tmp_path) as on:
        primary_dies(on)
        standby_is_promoted(on)
        if change == "drained":
            await on.put_epoch(state=EpochState.DRAINING)
        elif change == "lost":
            await on.stage.put(KEYS.ledger(), LedgerHead("other", LedgerState.ACTIVE, TAG).encode())
        else:
            await on.stage.put(
                KEYS.ledger(), LedgerHead("first", LedgerState.RECOVERING, TAG, rebuilt="x").encode())
        assert not await on.follow()
        assert (await on.epoch()).number == 1


async def test_an_epoch_that_moved_since_it_was_read_is_judged_anew(tmp_path: Path, clock: MockClock) -> None:
    async with followed(tmp_path) as on:
        primary_dies(on)
        standby_is_promoted(on)
        await on.stage.views.refresh()
        await on.put_epoch(reason="moved meanwhile")
        on.stage.views.views[DB] = replace(
            on.stage.views.views[DB], epoch=Epoch(1, EpochState.ACTIVE, A, 0, "test"))
        assert await on.following.follow(DB, NO_FENCE) is None
        assert (await on.epoch()).number == 1


async def test_who_does_not_lead_any_more_moves_nothing(tmp_path: Path, clock: MockClock) -> None:
    async with followed(tmp_path) as on:
        primary_dies(on)
        standby_is_promoted(on)
        over = Compare("/leader/of/before", Field.CREATE, 7)
        await on.stage.views.refresh()
        assert await on.following.follow(DB, over) is None
        assert (await on.epoch()).number == 1


async def test_the_failover_is_over_when_no_session_of_an_older_epoch_is_left_but_an_operators(
    tmp_path: Path, clock: MockClock
) -> None:
    async with followed(tmp_path) as on:
        await on.stage.put(KEYS.session(Kind.MAIN, 0), session(SessionState.UNKNOWN, epoch=1).encode())
        admin = session(SessionState.OPEN, kind=Kind.ADMIN, seat=-1, epoch=1)
        await on.stage.put(KEYS.session(Kind.ADMIN, 0), admin.encode())
        await on.put_epoch(number=2, failover=True)
        await on.follow()
        assert (await on.epoch()).failover
        await on.stage.store.txn(Txn(deletes=(KEYS.session(Kind.MAIN, 0),)))
        await trio.sleep(10)  # noqa: TID251 - on a clock that jumps
        await on.follow()
        after = await on.epoch()
        assert (after.failover, after.number, after.state) == (False, 2, EpochState.ACTIVE)


async def test_a_hint_has_every_host_looked_at_at_once(tmp_path: Path, clock: MockClock) -> None:
    async with followed(tmp_path) as on:
        on.stage.nursery.start_soon(on.following.lead, NO_FENCE)
        await wait_all_tasks_blocked()
        before, at = dict(on.nodes.asked), trio.current_time()
        for _ in range(3):
            on.following.hint(DB)
            await trio.sleep(LEVEL_SECONDS / 4)  # noqa: TID251 - on a clock that jumps
            await wait_all_tasks_blocked()
            if on.nodes.asked[B.address] > before[B.address]:
                break
        assert trio.current_time() - at < LEVEL_SECONDS / 2
        assert on.nodes.asked == {address: times + 1 for address, times in before.items()}


async def test_a_failover_is_followed_by_level_and_what_was_left_is_told(
    tmp_path: Path, clock: MockClock
) -> None:
    async with followed(tmp_path) as on:
        left = trio.Event()
        told: list[tuple[str, int]] = []

        async def listener(db: str, epoch: Epoch, seen: object, fence: Compare) -> None:
            told.append((db, epoch.number))
            left.set()

        on.following.on_left.append(listener)
        on.stage.nursery.start_soon(on.following.lead, NO_FENCE)
        await wait_all_tasks_blocked()
        primary_dies(on)
        standby_is_promoted(on)
        at = trio.current_time()
        await left.wait()
        assert trio.current_time() - at <= LEVEL_SECONDS
        assert told == [(DB, 1)]


async def test_patroni_is_followed_from_a_primary_that_still_answers(
    tmp_path: Path, clock: MockClock
) -> None:
    async with followed(tmp_path, asks_patroni=True) as on:
        standby_is_promoted(on)
        on.nodes.patroni = A.address
        on.stage.nursery.start_soon(on.following.lead, NO_FENCE)
        await trio.sleep(5)  # noqa: TID251 - on a clock that jumps
        assert (await on.epoch()).number == 1
        on.nodes.patroni = B.address
        await trio.sleep(5)  # noqa: TID251 - on a clock that jumps
        after = await on.epoch()
        assert (after.number, after.backend, after.reason) == (
            2, B2, f"Patroni names {B.address}; {B.address} was promoted")


async def test_a_server_that_patroni_names_is_not_dialled_unless_it_is_in_the_config(
    tmp_path: Path, clock: MockClock
) -> None:
    async with followed(tmp_path, asks_patroni=True) as on:
        thief = "127.0.0.66:5432"
        on.nodes.at[thief] = Node(replace(B2, address=thief, timeline=9))
        on.nodes.patroni = thief
        on.stage.nursery.start_soon(on.following.lead, NO_FENCE)
        with capture_logs() as logs:
            await trio.sleep(10)  # noqa: TID251 - on a clock that jumps
            assert "none of the hosts" in on.following.reasons()[DB]
            primary_dies(on)
            await trio.sleep(10)  # noqa: TID251 - on a clock that jumps
        assert on.following.unfit() == {DB}
        assert [each["event"] for each in logs if "none of the hosts" in str(each.get("why"))] == [
            "backend_doubtful", "backend_unfit"]
        assert thief not in on.nodes.asked
        assert (await on.epoch()).number == 1


async def test_patronis_silence_is_told_once_and_holds_up_no_failover(
    tmp_path: Path, clock: MockClock
) -> None:
    async with followed(tmp_path, asks_patroni=True) as on:
        primary_dies(on)
        standby_is_promoted(on)
        with capture_logs() as logs:
            on.stage.nursery.start_soon(on.following.lead, NO_FENCE)
            await trio.sleep(5)  # noqa: TID251 - on a clock that jumps
        assert (await on.epoch()).backend == B2
        assert sum(each["event"] == "patroni_silent" for each in logs) == 1


async def test_a_read_pool_leaves_a_standby_that_stays_behind_and_not_for_one_late_commit(
    tmp_path: Path, clock: MockClock
) -> None:
    async with followed(tmp_path, role="read", lag_max=10.0) as on:
        assert not await on.follow()
        on.nodes.at[B.address].lag_seconds = 3_600.0
        assert not await on.follow()
        on.nodes.at[B.address].lag_seconds = 0.0
        assert not await on.follow()
        on.nodes.at[B.address].lag_seconds = 11.0
        on.nodes.at[C.address].lag_seconds = 2.0
        moved = [await on.follow() for _ in range(3)]
        assert moved == [False, False, True]
        assert (await on.epoch()).backend == C
        await on.follow()
        assert set(on.nodes.closed) == {A.address, B.address}


async def test_a_read_pool_that_has_just_moved_is_not_moved_again_for_a_lag(
    tmp_path: Path, clock: MockClock
) -> None:
    async with followed(tmp_path, role="read", lag_max=10.0) as on:
        on.nodes.at[B.address].lag_seconds = 11.0
        assert await on.follow()
        on.nodes.at[B.address].lag_seconds, on.nodes.at[C.address].lag_seconds = 0.0, 11.0
        moved = [await on.follow() for _ in range(5)]
        assert moved == [False] * 5
        assert on.following.unfit() == {DB}
        with trio.move_on_after(SETTLE_READ_SECONDS):
            await trio.sleep_forever()
        assert await on.follow()
        assert (await on.epoch()).backend.address == B.address


async def test_a_read_pool_leaves_a_standby_that_was_promoted(tmp_path: Path, clock: MockClock) -> None:
    async with followed(tmp_path, role="read", lag_max=10.0) as on:
        primary_dies(on)
        standby_is_promoted(on)
        assert await on.follow()
        assert (await on.epoch()).backend == C


async def test_without_a_monitor_login_nothing_is_followed(tmp_path: Path, clock: MockClock) -> None:
    async with followed(tmp_path, monitor=None) as on:
        on.following.hint(DB)
        on.stage.nursery.start_soon(on.following.lead, NO_FENCE)
        await wait_all_tasks_blocked()
        assert on.nodes.asked == {}
