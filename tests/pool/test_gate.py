"""The gate before a connect, as an opening passes it: no permit is held there, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.ledger.states import Proof
from coordinator.link import LinkRefused
from pooler.errors import NoPermit
from pooler.pool.gate import BUSY, NotWanted, Place, PoolGate, ScalingCounts
from pooler.pool.opener import OpenSession, open_session
from pooler.pool.permits import Granted, Wish
from tests.pool.cancelling import run_cancelled
from tests.pool.fake_coordinator import DB
from tests.pool.world import World, world

POOL_MAX = 2
PLACE = Place(DB, "orders", "app", POOL_MAX, 8, 15.0)


def pool_gate(
    w: World, counts: ScalingCounts, *, wait_seconds: float = 60.0, wanted: Callable[[], bool] = lambda: True,
    insists: Callable[[], bool] = lambda: True,
) -> PoolGate:
    return PoolGate(w.permits, PLACE, counts, wait_seconds, 0.1, wanted, insists)


async def open_one(w: World, counts: ScalingCounts, opened: list[OpenSession], **gate: Any) -> None:
    opened.append(await open_session(w.permits, w.plan(gate=pool_gate(w, counts, **gate), seats=100)))


def inside(w: World) -> int:
    return w.coordinator.creating.gate.inside


def end(opened: list[OpenSession]) -> None:
    for session in opened:
        session.sock.close()


async def test_a_hundred_behind_the_gate_hold_two_permits_and_all_are_in_in_the_end(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with world(tmp_path) as w:
        w.ledger.slots_max, counts, opened = 100, ScalingCounts(), list[OpenSession]()
        w.server.logins_open = trio.Event()
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(open_one, w, counts, opened)
            await wait_all_tasks_blocked()
            assert (w.server.at_the_door, len(w.ledger.slots), opened) == (POOL_MAX, POOL_MAX, [])
            assert (counts.inflight_creates, counts.burst_gate_waits) == (POOL_MAX, 0)
            assert w.coordinator.creating.gate.waiting == 100 - POOL_MAX
            w.server.logins_open.set()
        assert len(opened) == counts.creates_started == 100
        assert counts.burst_gate_waits == 100 - POOL_MAX
        assert w.server.at_the_door_max == POOL_MAX
        assert (counts.inflight_creates, inside(w)) == (0, 0)
        assert w.permits.statistics().voided_total == 0
        end(opened)


async def test_while_the_ledger_is_waited_for_the_gate_is_free(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as w:
        room = when_there_is_room(w, monkeypatch)
        opened: list[OpenSession] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_one, w, ScalingCounts(), opened)
            await wait_all_tasks_blocked()
            assert inside(w) == 0
            room.set()
        assert len(opened) == 1
        assert inside(w) == 0
        end(opened)


async def test_a_permit_that_was_waited_for_goes_back_if_the_gate_is_busy_by_then(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as w:
        room, opened = when_there_is_room(w, monkeypatch), list[OpenSession]()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_one, w, ScalingCounts(), opened)
            await wait_all_tasks_blocked()
            others = [pool_gate(w, ScalingCounts()) for _ in range(POOL_MAX)]
            for other in others:
                assert await other.enter(waits=False)
            room.set()
            await wait_all_tasks_blocked()
            assert (opened, w.ledger.slots) == ([], {})
            assert [proof for _, proof in w.ledger.releases] == [Proof.UNUSED]
            others[0].leave()
        assert len(opened) == 1
        end(opened)


def when_there_is_room(w: World, monkeypatch: pytest.MonkeyPatch) -> trio.Event:
    """Until then the ledger is full, and who may wait there waits."""
    room, reserve = trio.Event(), w.permits.reserve

    async def waiting(wish: Wish, wait_seconds: float) -> Granted:
        if not room.is_set():
            if not wait_seconds:
                raise NoPermit("all are in use", "full")
            await room.wait()
        return await reserve(wish, wait_seconds)

    monkeypatch.setattr(w.permits, "reserve", waiting)
    return room


async def test_cancelled_at_any_step_before_within_and_behind_the_gate_place_and_permit_are_conserved(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    steps, reached = 0, 0
    while True:
        directory = tmp_path / str(steps)
        directory.mkdir()
        async with world(directory) as w:
            other, counts, opened = pool_gate(w, ScalingCounts()), ScalingCounts(), list[OpenSession]()
            another = pool_gate(w, ScalingCounts())
            assert await other.enter(waits=False)
            assert await another.enter(waits=False)
            async with trio.open_nursery() as nursery:

                async def leave(gate: PoolGate = other) -> None:
                    await trio.testing.wait_all_tasks_blocked()
                    gate.leave()

                nursery.start_soon(leave)
                fired, _ = await run_cancelled(
                    lambda: open_one(w, counts, opened), steps)  # noqa: B023 - run within the loop
            another.leave()
            end(opened)
            await wait_all_tasks_blocked()
            if opened:
                w.permits.released(DB, opened[0].permit, Proof.EOF)
            await w.settled()
            w.check()
            await wait_all_tasks_blocked()
            assert (inside(w), w.coordinator.creating.gate.waiting, counts.inflight_creates) == (0, 0, 0)
        if not fired:
            break
        steps, reached = steps + 1, reached + 1
    print(f"cancelled at {reached} steps")  # noqa: T201 - how far it reached is part of the result
    assert reached > 10


async def test_who_waited_for_it_was_served_meanwhile_and_nothing_is_opened(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with world(tmp_path) as w:
        holders = [pool_gate(w, ScalingCounts()) for _ in range(POOL_MAX)]
        for holder in holders:
            await holder.enter(waits=False)
        async with trio.open_nursery() as nursery:

            async def not_wanted() -> None:
                with pytest.raises(NotWanted):
                    await open_one(w, ScalingCounts(), [], wanted=lambda: False)

            nursery.start_soon(not_wanted)
            await wait_all_tasks_blocked()
            holders[0].leave()
        await wait_all_tasks_blocked()
        assert (inside(w), w.ledger.generation, w.server.born) == (1, 100, 0)


@pytest.mark.parametrize("has_idle", [True, False])
async def test_once_the_budget_is_spent_a_pool_that_has_none_idle_insists(
    tmp_path: Path, autojump_clock: MockClock, *, has_idle: bool
) -> None:
    async with world(tmp_path) as w:
        counts, outcome = ScalingCounts(), list[bool]()
        holders = [pool_gate(w, ScalingCounts()) for _ in range(POOL_MAX)]
        for holder in holders:
            await holder.enter(waits=False)
        async with trio.open_nursery() as nursery:

            async def enter() -> None:
                gate = pool_gate(w, counts, wanted=lambda: False, insists=lambda: not has_idle)
                try:
                    outcome.append(await gate.enter(waits=True))
                except NotWanted:
                    outcome.append(False)

            nursery.start_soon(enter)
            await trio.sleep(0.2)  # noqa: TID251 - on a clock that jumps
            holders[0].leave()
        assert outcome == [not has_idle]
        assert counts.burst_gate_budget_exhausted == 1


async def test_for_min_pool_size_alone_nobody_stands_there(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with world(tmp_path) as w:
        for _ in range(POOL_MAX):
            await pool_gate(w, ScalingCounts()).enter(waits=False)
        begun = trio.current_time()
        with pytest.raises(NoPermit) as refused:
            await open_one(w, ScalingCounts(), [], wait_seconds=0.0)
        assert refused.value.reason == BUSY
        assert trio.current_time() == begun


async def test_a_coordinator_that_knows_no_gate_lets_in_whoever_asks(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.coordinator.no_gate = LinkRefused("unknown_operation", "no operation 'create'")
        opened: list[OpenSession] = []
        for _ in range(3):
            await open_one(w, ScalingCounts(), opened)
        assert len(opened) == 3
        end(opened)


async def test_with_the_link_lost_it_asks_again_and_no_place_is_kept(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with world(tmp_path) as w:
        lost = {"create": "after"}
        w.coordinator.fault = lambda op, nth: lost.pop(op, None)
        opened: list[OpenSession] = []
        await open_one(w, ScalingCounts(), opened)
        await wait_all_tasks_blocked()
        assert (len(opened), inside(w)) == (1, 0)
        end(opened)


async def test_without_a_coordinator_the_wait_is_bounded(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with world(tmp_path) as w:
        w.coordinator.down = True
        w.coordinator.cut()
        await wait_all_tasks_blocked()
        with pytest.raises(NoPermit) as refused:
            await open_one(w, ScalingCounts(), [], wait_seconds=3.0)
        assert refused.value.reason == "unreachable"
