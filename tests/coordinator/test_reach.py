"""Trace 25: a leader that cannot reach a server makes way for one that can, and for nobody else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from coordinator.election import Election, Leader
from coordinator.ledger.proofs import Look
from coordinator.looks import LookFailed
from coordinator.reach import (
    BLIND_SECONDS,
    LOOKED_AT_SECONDS,
    Present,
    Reach,
    Sight,
    better,
    can_connect,
    present,
)
from coordinator.store.api import Compare
from coordinator.store.memory import MemoryStore
from tests.coordinator.stage import FakeEyes, Server
from tests.ledger.ground import BACKEND, FLEET

TTL_SECONDS = 3.0
HERE, THERE = BACKEND.address, "127.0.0.1:5433"


class Eyes(FakeEyes):
    """Only what `reached` says can be looked at."""

    def __init__(self, reached: set[str]) -> None:
        super().__init__({address: Server() for address in (HERE, THERE)})
        self.reached = reached

    async def look(self, address: str, *, fresh: bool = False) -> Look:
        if address not in self.reached:
            await trio.lowlevel.checkpoint()
            raise LookFailed(f"{address}: connection refused")
        return await super().look(address, fresh=fresh)


@dataclass
class Host:
    """One coordinator: what it reaches, what it looks at while it leads, and for how long it led."""

    name: str
    store: MemoryStore
    reached: set[str]
    by_tcp: set[str] | None = None  # else what it reaches
    terms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.election = Election(self.store, FLEET, Leader(self.name, 1, 0), ttl_seconds=TTL_SECONDS)
        self.sight = Sight(Eyes(self.reached))
        self.tried: list[str] = []
        self.reach = Reach(self.store, FLEET, self.election, self.sight, host=self.name,
                           ttl_seconds=TTL_SECONDS, connect=self.connect)

    async def connect(self, address: str) -> bool:
        await trio.lowlevel.checkpoint()
        self.tried.append(address)
        return address in (self.reached if self.by_tcp is None else self.by_tcp)

    async def lead(self, fence: Compare) -> None:
        self.terms.append(trio.current_time())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.reach.lead)
            while True:
                for address in (HERE, THERE):
                    with suppress(LookFailed):
                        await self.sight.look(address)
                await trio.sleep(TTL_SECONDS)  # noqa: TID251 - on a clock that jumps


@asynccontextmanager
async def running(*hosts: Host) -> AsyncIterator[None]:
    """The first leads."""
    async with trio.open_nursery() as nursery:
        for host in hosts:
            nursery.start_soon(host.election.run, host.lead)
            nursery.start_soon(host.reach.run)
            await trio.testing.wait_all_tasks_blocked()
        yield
        nursery.cancel_scope.cancel()


async def after(seconds: float) -> None:
    await trio.sleep(seconds)  # noqa: TID251 - on a clock that jumps


def leads(hosts: Sequence[Host]) -> list[str]:
    return [host.name for host in hosts if host.election.leading]


async def test_25_a_leader_without_a_look_for_ten_seconds_resigns_for_one_that_reaches_the_server(
    clock: MockClock,
) -> None:
    store = MemoryStore()
    hosts = Host("a", store, {HERE}), Host("b", store, {HERE, THERE})
    async with running(*hosts):
        with capture_logs() as logs:
            await after(BLIND_SECONDS - 1)
            assert leads(hosts) == ["a"]
            await after(3)
            assert leads(hosts) == ["b"]
        (why,) = [line for line in logs if line["event"] == "leader_blind"]
        assert (why["nodes"], why["reached_by"]) == ([THERE], "b")
        await after(60)
        assert leads(hosts) == ["b"]
        assert [len(host.terms) for host in hosts] == [1, 1]


async def test_25_nobody_is_asked_while_everything_is_seen_and_who_is_asked_opens_no_session(
    clock: MockClock,
) -> None:
    store = MemoryStore()
    hosts = Host("a", store, {HERE, THERE}), Host("b", store, {HERE, THERE})
    async with running(*hosts):
        await after(30)
        assert hosts[1].tried == []
        hosts[0].reached.discard(THERE)
        await after(6)
        assert set(hosts[1].tried) == {HERE, THERE}
        assert hosts[1].sight.seen_at == {}


async def test_25_who_sees_less_than_the_leader_is_no_better_one(clock: MockClock) -> None:
    store = MemoryStore()
    hosts = Host("a", store, {HERE}), Host("b", store, {THERE}), Host("c", store, set())
    async with running(*hosts):
        await after(60)
        assert leads(hosts) == ["a"]
        assert len(hosts[0].terms) == 1


async def test_25_a_server_that_refuses_the_login_is_reached_all_the_same(clock: MockClock) -> None:
    store = MemoryStore()
    hosts = (Host("a", store, {HERE}, by_tcp={HERE, THERE}), Host("b", store, {HERE, THERE}))
    async with running(*hosts):
        await after(60)
        assert leads(hosts) == ["a"]


async def test_25_a_leader_whose_server_comes_back_in_time_stays(clock: MockClock) -> None:
    store = MemoryStore()
    hosts = Host("a", store, {HERE}), Host("b", store, {HERE, THERE})
    async with running(*hosts):
        await after(8)
        hosts[0].reached.add(THERE)
        await after(60)
        assert leads(hosts) == ["a"]
        holder = hosts[1].election.holder
        assert holder is not None
        assert holder.blind == ()


async def test_25_who_resigned_stands_again_when_nobody_else_does(clock: MockClock) -> None:
    store = MemoryStore()
    hosts = Host("a", store, {HERE}), Host("b", store, {HERE, THERE})
    async with running(hosts[0]), trio.open_nursery() as nursery:
        nursery.start_soon(hosts[1].reach.run)  # it answers and stands for nothing
        hosts[1].election.holder = Leader("a", 1, 0, blind=(THERE,), seen=(HERE,))
        await after(BLIND_SECONDS + 1)
        assert leads(hosts[:1]) == []
        await after(2 * TTL_SECONDS)
        assert leads(hosts[:1]) == ["a"]
        nursery.cancel_scope.cancel()


async def test_25_a_server_that_nobody_looks_at_any_more_costs_no_leader_its_place(clock: MockClock) -> None:
    store = MemoryStore()
    a, b = Host("a", store, {HERE, THERE}), Host("b", store, {HERE, THERE})
    async with running(a, b):
        await after(6)
        a.reached.discard("gone:5432")
        a.sight.failed.add("gone:5432")  # as after a look that failed
        with suppress(LookFailed):
            await a.sight.look("gone:5432")
        assert "gone:5432" in a.sight.failed
        await after(LOOKED_AT_SECONDS + 2)
        assert "gone:5432" not in a.sight.failed
        assert a.sight.seen_at.keys() == {HERE, THERE}
        assert b.election.holder is not None
        assert b.election.holder.blind == ()


async def test_25_who_resigned_answers_the_next_leader_at_once(clock: MockClock) -> None:
    store = MemoryStore()
    a, b = Host("a", store, {HERE}), Host("b", store, {HERE, THERE})
    async with running(a, b):
        await after(BLIND_SECONDS + 1.5)
        assert leads((a, b)) == ["b"]
        assert a.election.holder is not None
        assert a.election.holder.host == "b"


async def test_a_coordinator_that_is_there_has_a_key_and_one_that_ends_has_none(clock: MockClock) -> None:
    store = MemoryStore()
    async with running(Host("a", store, {HERE}), Host("b", store, {HERE})):
        await after(10 * TTL_SECONDS)
        there = present((await store.range(FLEET.reaches())).entries)
        assert {each.host for each in there.values()} == {"a", "b"}
    assert present((await store.range(FLEET.reaches())).entries) == {}


def test_one_is_better_that_reaches_what_is_missing_and_all_that_is_seen() -> None:
    others = [Present("less", (THERE,)), Present("same", (HERE,)), Present("more", (HERE, THERE))]
    assert better([THERE], [HERE], others) == others[2]
    assert better([THERE], [HERE], others[:2]) is None


async def test_a_port_that_listens_can_be_connected_to_and_a_closed_one_cannot() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    assert await can_connect(f"127.0.0.1:{port}")
    await listener.aclose()
    assert not await can_connect(f"127.0.0.1:{port}")
