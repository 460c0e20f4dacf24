"""How a pool grows under load: at once while it is cold, else only once none came back in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pooler.errors import NoPermit
from pooler.pool import growth, janitor
from pooler.pool.gate import BUSY, Gates
from pooler.pool.growth import RETAIN_SECONDS
from pooler.pool.opener import OpenPlan, OpenSession
from pooler.pool.pressure import EXPECTED_COLD_SECONDS, SAMPLES_MIN
from tests.pool.running import Running, running

SIZE = 40
WARM = 8  # a fifth


class Gate:
    """As the coordinator's: `free` places; the pool's way there."""

    def __init__(self, free: int = 2) -> None:
        self.free, self.most, self.inside, self.refuses = free, 0, 0, False
        self._left = trio.Event()

    async def enter_gate(self, wait_seconds: float, **_: Any) -> tuple[bool, bool]:
        waited = False
        if self.refuses:
            return False, False
        with trio.move_on_after(wait_seconds):
            while self.inside >= self.free:
                waited = True
                await self._left.wait()
        if self.inside >= self.free:
            return False, waited
        self.inside += 1
        self.most = max(self.most, self.inside)
        return True, waited

    def leave_gate(self, request_id: str) -> None:
        assert request_id
        self.inside -= 1
        self._left.set()
        self._left = trio.Event()


class Clients:
    """Clients that hold a session for as long as they are told."""

    def __init__(self, run: Running) -> None:
        self.run = run
        self.served = 0
        self._one_more = trio.Event()
        self.done: dict[int, trio.Event] = {}

    async def one(self, number: int = 0, seconds: float | None = None) -> None:
        async with self.run.pool.checkout() as client:
            await client.query("select 1")
            self.served += 1
            self._one_more.set()
            if seconds is not None:
                await trio.sleep(seconds)  # noqa: TID251 - on a clock that jumps
            else:
                await self.done.setdefault(number, trio.Event()).wait()


    def leave(self) -> None:
        """All go."""
        for each in self.done.values():
            each.set()

    async def until(self, served: int) -> None:
        """So many were served."""
        with trio.fail_after(60):
            while self.served < served:
                self._one_more = trio.Event()
                await self._one_more.wait()


def prepared(
    run: Running, monkeypatch: pytest.MonkeyPatch, gate: Gate, connect_seconds: float = 0.05
) -> None:
    """Growth on trio's clock, through this gate, with sessions that take so long to be opened."""
    monkeypatch.setattr(growth, "monotonic", trio.current_time)
    monkeypatch.setattr("pooler.pool.pool.monotonic", trio.current_time)
    monkeypatch.setattr("pooler.relay.task.monotonic", trio.current_time, raising=False)
    run.pool.parts.gates = Gates(gate)
    run.pool.core.check_after = float("inf")

    async def through_the_gate(_: Any, plan: OpenPlan) -> OpenSession:
        if not await plan.gate.enter(waits=True):
            raise NoPermit("the gate is busy", BUSY)
        try:
            plan.gate.connecting()
            await trio.sleep(connect_seconds)  # noqa: TID251 - on a clock that jumps
            return await run.open_session()
        finally:
            plan.gate.leave()

    monkeypatch.setattr(growth, "open_session", through_the_gate)
    run.pool.plan = replace(run.pool.plan, size_max=SIZE)


async def hold(run: Running, nursery: trio.Nursery, clients: Clients, count: int) -> None:
    """So many clients hold a session each."""
    before = clients.served
    for number in range(count):
        nursery.start_soon(clients.one, 1000 + number)
    await clients.until(before + count)


def know_times(run: Running, seconds: float) -> None:
    run.pool.growth._times.p99(
        run.pool.transaction_times.bounds, run.pool.transaction_times.counts, trio.current_time())
    for _ in range(SAMPLES_MIN * 10):
        run.pool.transaction_times.observe(seconds)


async def test_two_hundred_at_once_have_two_opened_at_a_time_and_never_more_than_the_pool(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with running(monkeypatch, size=SIZE) as run:
        gate, clients = Gate(), Clients(run)
        prepared(run, monkeypatch, gate)
        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(clients.one, 0, 0.02)
        assert clients.served == 200
        assert gate.most == 2
        await trio.sleep(1.0)  # noqa: TID251 - on a clock that jumps: what is insisted on is opened
        assert len(run.minis) <= SIZE
        counts = run.pool.growth.counts
        assert counts.creates_started == len(run.minis)
        assert counts.anticipation_wakes_timeout == counts.create_fallback > 0
        await run.check_whole()


async def test_below_the_threshold_one_is_opened_at_once(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with running(monkeypatch, size=SIZE) as run, trio.open_nursery() as nursery:
        clients = Clients(run)
        prepared(run, monkeypatch, Gate())
        begun = trio.current_time()
        await hold(run, nursery, clients, WARM)
        assert trio.current_time() - begun <= WARM / 2 * 0.05 + 0.05
        assert run.pool.growth.counts.create_fallback == 0
        clients.leave()


async def test_past_it_one_that_comes_back_in_time_costs_no_session(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with running(monkeypatch, size=SIZE) as run, trio.open_nursery() as nursery:
        clients = Clients(run)
        prepared(run, monkeypatch, Gate())
        await hold(run, nursery, clients, WARM)
        nursery.start_soon(clients.one, 1)
        await trio.sleep(EXPECTED_COLD_SECONDS / 2)  # noqa: TID251 - on a clock that jumps
        assert (run.pool.growth.counts.creates_started, clients.served) == (WARM, WARM)
        clients.done[1000].set()
        await trio.sleep(1.0)  # noqa: TID251 - on a clock that jumps
        counts = run.pool.growth.counts
        assert (counts.creates_started, clients.served) == (WARM, WARM + 1)
        assert (counts.anticipation_wakes_notify, counts.anticipation_wakes_timeout) == (1, 0)
        assert run.pool.core.opening == run.pool.growth.expecting == 0
        clients.leave()


async def test_past_it_one_is_opened_when_none_came_back_in_time(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with running(monkeypatch, size=SIZE) as run, trio.open_nursery() as nursery:
        clients = Clients(run)
        prepared(run, monkeypatch, Gate())
        await hold(run, nursery, clients, WARM)
        begun = trio.current_time()
        await hold(run, nursery, clients, 1)
        assert 0.8 * EXPECTED_COLD_SECONDS <= trio.current_time() - begun <= 1.2 * EXPECTED_COLD_SECONDS + 0.1
        counts = run.pool.growth.counts
        assert (counts.creates_started, counts.create_fallback) == (WARM + 1, 1)
        assert (counts.anticipation_wakes_notify, counts.anticipation_wakes_timeout) == (0, 1)
        clients.leave()


@pytest.mark.parametrize(("transaction_seconds", "least", "most"), [
    (0.0001, 0.004, 0.02), (0.1, 0.16, 0.26), (50.0, 0.4, 0.61)])
async def test_how_long_one_is_expected_follows_the_transactions_of_the_pool(
    transaction_seconds: float, least: float, most: float, monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
) -> None:
    async with running(monkeypatch, size=SIZE) as run, trio.open_nursery() as nursery:
        clients = Clients(run)
        prepared(run, monkeypatch, Gate(), connect_seconds=0.001)
        await hold(run, nursery, clients, WARM)
        know_times(run, transaction_seconds)
        begun = trio.current_time()
        await hold(run, nursery, clients, 1)
        assert least <= trio.current_time() - begun <= most + 0.02
        clients.leave()


@pytest.mark.parametrize("make", [
    lambda run: setattr(run.pool, "wait_timeout_seconds", 0.5),
    lambda run: setattr(run.pool, "holds_session", True),
])
async def test_with_no_time_for_it_and_in_session_pooling_none_is_expected(
    make: Callable[[Running], None], monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with running(monkeypatch, size=SIZE) as run, trio.open_nursery() as nursery:
        clients = Clients(run)
        prepared(run, monkeypatch, Gate(), connect_seconds=0.001)
        await hold(run, nursery, clients, WARM)
        make(run)
        know_times(run, 50.0)
        begun = trio.current_time()
        await hold(run, nursery, clients, 1)
        assert trio.current_time() - begun <= 0.1
        clients.leave()


async def test_a_pool_in_which_somebody_always_waits_grows_though_each_is_served_in_time(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with running(monkeypatch, size=SIZE) as run, trio.open_nursery() as nursery:
        clients, over = Clients(run), trio.Event()
        prepared(run, monkeypatch, Gate(), connect_seconds=0.001)

        async def work() -> None:
            while not over.is_set():
                await clients.one(0, 0.02)

        for _ in range(WARM * 2):
            nursery.start_soon(work)
        await trio.sleep(5)  # noqa: TID251 - on a clock that jumps
        over.set()
        assert WARM * 2 - 2 <= len(run.minis) <= WARM * 2


async def test_when_the_sessions_are_gone_nobody_expects_one(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with running(monkeypatch, size=1) as run, trio.open_nursery() as nursery:
        clients = Clients(run)
        prepared(run, monkeypatch, Gate(), connect_seconds=0.001)
        run.pool.core.size_max = 2
        monkeypatch.setattr(growth, "warm_threshold", lambda *_: 0.0)
        await hold(run, nursery, clients, 1)
        know_times(run, 50.0)
        begun = trio.current_time()
        nursery.start_soon(clients.one, 7)
        await wait_all_tasks_blocked()
        assert run.pool.growth.expecting == 1
        run.minis[0].leave()
        next(iter(run.pool.core.active)).lost(orderly=True)
        await clients.until(2)
        assert trio.current_time() - begun <= 0.1
        clients.leave()


async def test_a_session_that_is_being_cleaned_is_waited_for_by_a_cold_pool(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with running(monkeypatch, size=SIZE) as run, trio.open_nursery() as nursery:
        clients = Clients(run)
        prepared(run, monkeypatch, Gate())
        await hold(run, nursery, clients, 1)
        server = next(iter(run.pool.core.active))
        clients.done[1000].set()
        await wait_all_tasks_blocked()
        run.pool.core.idle.remove(server)  # as its reset query is sent
        run.pool.core.active.add(server)
        server.own = 1
        nursery.start_soon(clients.one, 1)
        await wait_all_tasks_blocked()
        assert run.pool.growth.expecting == 1
        server.own = 0
        run.pool.give(server, trio.current_time())
        await trio.sleep(1.0)  # noqa: TID251 - on a clock that jumps
        assert (clients.served, len(run.minis), run.pool.growth.counts.creates_started) == (2, 1, 1)
        clients.leave()


async def test_for_min_pool_size_a_busy_gate_is_counted_and_looked_at_again_later(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with running(monkeypatch, size=SIZE) as run, trio.open_nursery() as nursery:
        gate, clients = Gate(), Clients(run)
        prepared(run, monkeypatch, gate)
        await hold(run, nursery, clients, 1)
        run.pool.plan = replace(run.pool.plan, size_min=3)
        gate.refuses = True
        for _ in range(10):
            janitor.replenish(run.pool, trio.current_time())
            await wait_all_tasks_blocked()
        assert (run.pool.growth.counts.replenish_deferred, run.pool.core.opening) == (1, 0)
        gate.refuses = False
        await trio.sleep(RETAIN_SECONDS)  # noqa: TID251 - on a clock that jumps
        for _ in range(10):
            janitor.replenish(run.pool, trio.current_time())
            await trio.sleep(0.3)  # noqa: TID251 - on a clock that jumps
        assert run.pool.core.total == 3
        clients.leave()


