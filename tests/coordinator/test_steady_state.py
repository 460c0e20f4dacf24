"""Where nothing moves, nothing is asked of etcd: not by those who wait, not by those who come again."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from coordinator.ledger.rules import Release
from coordinator.ledger.states import Actor, Proof
from coordinator.link import LinkRefused
from coordinator.link_values import parse_permit
from coordinator.store.memory import MemoryStore
from tests.coordinator.parts import Worker
from tests.coordinator.stage import DB, Stage, stage
from tests.ledger.ground import ledger_on

MINUTE = 60.0


async def ask_for_ever(worker: Worker, seats: int = 10) -> None:
    """As a pool does whose clients wait."""
    while True:
        with suppress(LinkRefused):
            await worker.reserve(5.0, db=DB, seats=seats)
        await trio.sleep(0.25)  # noqa: TID251 - the pool's own back-off, on a clock that jumps


async def reserve_in_time(worker: Worker) -> None:
    await worker.reserve(60.0, db=DB)


async def in_a_minute(on: Stage) -> int:
    before = on.store.asked
    await trio.sleep(MINUTE)  # noqa: TID251 - on a clock that jumps
    return on.store.asked - before


@pytest.mark.parametrize(("slots", "seats"), [(4, 10), (10, 4)])
async def test_pools_that_wait_for_room_ask_no_more_than_idle_ones(
    tmp_path: Path, clock: MockClock, slots: int, seats: int
) -> None:
    async with stage(tmp_path, slots=slots) as on, AsyncExitStack() as ends:
        workers = [await ends.enter_async_context(on.worker(name)) for name in ("A", "B")]
        for worker in workers * 2:
            await worker.reserve(db=DB, seats=seats)
        idle = await in_a_minute(on)
        async with trio.open_nursery() as nursery:
            for worker in workers * 2:
                nursery.start_soon(ask_for_ever, worker, seats)
            await trio.sleep(10)  # noqa: TID251 - until all have found that there is no room
            assert abs(await in_a_minute(on) - idle) <= 1
            assert [worker.told_of("shed") for worker in workers] == [[], []]
            nursery.cancel_scope.cancel()


async def test_who_waits_without_being_told_of_anything_tries_again_when_the_store_has_moved(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path, slots=1) as on, on.worker("A") as holder, on.worker("B") as waiter:
        permit = (await holder.reserve(db=DB))["permit"]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reserve_in_time, waiter)
            await trio.sleep(10)  # noqa: TID251 - on a clock that jumps
            unheard = ledger_on(MemoryStore(on.keyspace))  # no watch of the stage's store hears of it
            await unheard.apply(Release(parse_permit(permit), Proof.UNUSED, Actor.OWNER))
        assert len(waiter.permits) == 1
        assert trio.current_time() < 10 + 5
