"""The gate at a server that took over: so many logins at a time, each in turn, no permit lost on the way."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.ledger.states import Proof
from pooler.pool.gate import CONNECTS_OF_HOST_MAX, NARROW_SECONDS, Gate, Gates
from pooler.pool.opener import OpenSession, open_session
from tests.pool.world import World, world

WANTED = 50


async def open_many(w: World, gate: Gate, opened: list[OpenSession], count: int) -> None:
    async def open_one() -> None:
        opened.append(await open_session(w.permits, w.plan(gate=gate, seats=count)))

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(open_one)


async def test_after_an_advance_a_few_are_let_in_at_a_time_and_all_are_in_the_end(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with world(tmp_path) as w:
        w.ledger.slots_max = WANTED
        gate, opened = Gate(4, trio.current_time), list[OpenSession]()
        gate.advanced(1)
        gate.advanced(2)
        w.server.logins_open = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_many, w, gate, opened, WANTED)
            await wait_all_tasks_blocked()
            assert (w.server.at_the_door, gate.waiting, len(opened)) == (4, WANTED - 4, 0)
            w.server.logins_open.set()
        assert len(opened) == WANTED
        assert w.server.at_the_door_max == 4
        for session in opened:
            session.sock.close()


async def test_who_is_cancelled_before_the_gate_gives_its_permit_back_unused(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with world(tmp_path) as w:
        w.ledger.slots_max = WANTED
        gate = Gate(1, trio.current_time)
        gate.advanced(1)
        gate.advanced(2)
        w.server.logins_open = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_many, w, gate, [], 3)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        w.server.logins_open.set()
        await w.settled()
        proofs = [proof for _, proof in w.ledger.releases]
        assert proofs.count(Proof.UNUSED) == 2
        assert gate.waiting == 0
        w.check()


async def test_one_that_hangs_holds_up_nobody_once_the_advance_is_over(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with world(tmp_path) as w:
        w.ledger.slots_max = WANTED
        gate = Gate(1, trio.current_time)
        gate.advanced(1)
        gate.advanced(2)
        await trio.sleep(NARROW_SECONDS)  # noqa: TID251 - on a clock that jumps
        w.server.logins_open = trio.Event()
        opened: list[OpenSession] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_many, w, gate, opened, 5)
            await wait_all_tasks_blocked()
            assert w.server.at_the_door == 5
            w.server.logins_open.set()
        for session in opened:
            session.sock.close()


async def test_the_same_epoch_heard_again_does_not_narrow_it(autojump_clock: MockClock) -> None:
    gate = Gate(1, trio.current_time)
    gate.advanced(1)
    gate.advanced(2)
    await trio.sleep(NARROW_SECONDS)  # noqa: TID251 - on a clock that jumps
    gate.advanced(2)
    async with gate.turn(), gate.turn():
        assert gate.waiting == 0
    gate.advanced(3)
    async with gate.turn():
        with trio.move_on_after(1) as waited:
            async with gate.turn():
                raise AssertionError("two at a time")
        assert waited.cancelled_caught


@pytest.mark.parametrize(("workers", "each"), [(1, CONNECTS_OF_HOST_MAX), (2, 4), (3, 2), (16, 1)])
async def test_the_workers_of_a_host_share_what_it_may_and_each_may_one(workers: int, each: int) -> None:
    gates = Gates(workers)
    gate = gates.of("orders")
    assert gates.of("orders") is gate is not gates.of("other")
    gate.advanced(1)
    assert gate._limiter.total_tokens == inf  # a start is no advance
    gate.advanced(2)
    assert gate._limiter.total_tokens == each
    assert gates.of("other")._limiter.total_tokens == inf
