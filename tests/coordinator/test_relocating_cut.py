"""A pass that is cut short, or whose write lands late: nothing leaks, nothing is doubled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.ledger.record import Permit
from tests.coordinator.moving import follows, has_slots, moving, slots_of, take
from tests.coordinator.stage import DB
from tests.ledger.ground import record_exit

Names = dict[tuple[str, Permit], str]


class CancelsAt(trio.abc.Instrument):
    """Cancels `scope` before the n-th step of the task that `watch` is given to."""

    def __init__(self, scope: trio.CancelScope, step: int) -> None:
        self.scope, self.left = scope, step
        self.task: Any = None

    def before_task_step(self, task: Any) -> None:
        if task is self.task:
            self.left -= 1
            if self.left == 0:
                self.scope.cancel()


async def cut_at(step: int, act: Callable[[], Any]) -> bool:
    """Runs it, cancelled at that step; whether it came to its end before."""
    scope = trio.CancelScope()
    instrument = CancelsAt(scope, step)
    done = False

    async def run() -> None:
        nonlocal done
        instrument.task = trio.lowlevel.current_task()
        with scope:
            await act()
            done = True

    trio.lowlevel.add_instrument(instrument)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
    finally:
        trio.lowlevel.remove_instrument(instrument)
    return done


@pytest.mark.parametrize("dies", [None, "coordinator", "worker"])
async def test_a_pass_cut_short_at_any_step_leaks_nothing_and_doubles_nothing(
    tmp_path: Path, clock: MockClock, dies: str | None
) -> None:
    step, done = 0, False
    while not done:
        step += 1
        run_dir = tmp_path / str(step)
        run_dir.mkdir()
        async with moving(run_dir) as m:
            async with m.on.worker("A") as worker:
                await has_slots(m, worker, 1, 4, 5)
                await m.publish(2, 3)
                done = await cut_at(step, m.go)
                names = dict(worker.permits)
                if dies is None:
                    await m.go()
                    assert slots_of(worker.permits) == [0, 1, 2]
            if dies == "coordinator":
                await m.on.restart()
                m.restart()
                async with m.on.worker("A", permits=names) as worker:
                    answer = await worker.hello()
                    for _, old, new in answer["moved"]:
                        take(worker, old, new)
                    follows(worker)
                    assert answer["gone"] == []
                    await m.go()
                    assert slots_of(worker.permits) == [0, 1, 2]
            if dies == "worker":
                m.on.expire("A")
                record_exit(m.on.keyspace, "A")
                for _ in range(3):
                    await m.on.reconcile()
                assert await m.held() == {}
            else:
                assert await m.held() in ({0: 104, 1: 101, 2: 105}, {0: 105, 1: 101, 2: 104})
    assert step > 5


async def test_a_move_that_lands_when_its_coordinator_is_gone_is_found_by_the_next(
    tmp_path: Path, clock: MockClock
) -> None:
    async with moving(tmp_path) as m:
        async with m.on.worker("A") as worker:
            await has_slots(m, worker, 4)
            names = dict(worker.permits)
            await m.publish(2, 3)
            m.on.store.lifted = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(m.go)
                await wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
        m.on.store.lifted.set()
        await m.on.restart()
        m.restart()
        assert await m.held() == {4: 104}
        assert len(m.on.store.late) == 1
        async with m.on.worker("A", permits=names) as worker:
            follows(worker)
            await m.on.store.lift()
            assert await m.held() == {0: 104}
            await worker.hello()
            await m.go()
            assert not await m.go()
            assert m.on.registry.workers["A"].permits.keys() == {
                (DB, held.permit) for held in (await m.on.ledger.snapshot()).sessions}
