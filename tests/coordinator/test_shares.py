"""Execution permits between workers, their coordinators and the leader, over the memory store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import trio
from trio.testing import MockClock, memory_stream_pair

from coordinator.host_shares import FLOOR_SECONDS
from coordinator.ledger.demand import HostDemand
from coordinator.ledger.execution import Raised, Share
from coordinator.ledger.record import Alias, Epoch, EpochState, Kind, LedgerHead, LedgerState, Session
from coordinator.ledger.states import SessionState
from coordinator.link import Args
from coordinator.parts import Coordinator
from coordinator.policy import encode_policy, load_policy
from coordinator.remembered import Remembered
from coordinator.spec import DatabaseSpec, Monitor
from coordinator.store.api import Entry, Put, Txn
from coordinator.store.memory import Keyspace, MemoryStore
from tests.coordinator.parts import Worker, policy_text
from tests.coordinator.stage import Server, make_spec
from tests.coordinator.test_unreadable import Looks
from tests.ledger.ground import BACKEND, FLEET, write

DB = "shop/write"
KEYS = FLEET.db(DB)
CLASS = "interactive"
PERMITS = 8


def founded(generation: int = 1) -> MemoryStore:
    """One for all hosts: its watches hear of each other's writes."""
    keyspace = Keyspace()
    write(keyspace, Put(KEYS.ledger(), LedgerHead(DB, LedgerState.ACTIVE, "abcd1234").encode()),
          Put(KEYS.epoch(), Epoch(1, EpochState.ACTIVE, BACKEND, 0, "test").encode()),
          Put(KEYS.policy(1), encode_policy(load_policy(policy_text(slots=PERMITS, db=DB))[1])),
          Put(KEYS.alias(), Alias(generation).encode()))
    return MemoryStore(keyspace)


async def revision(store: MemoryStore) -> int:
    return (await store.read(KEYS.ledger())).revision


async def found(store: MemoryStore, key: str) -> Entry | None:
    return next(iter((await store.read(key)).entries), None)


@asynccontextmanager
async def running(run_dir: Path, store: MemoryStore, host: str = "host-a") -> AsyncIterator[Coordinator]:
    """A whole coordinator of that host over that store."""
    await trio.Path(run_dir).mkdir(exist_ok=True)
    spec = replace(make_spec(run_dir, databases=(DatabaseSpec(
        DB, DB, "app", (BACKEND.address,), policy=policy_text(slots=PERMITS, db=DB),
        monitor=Monitor("monitor", "secret")),)), host=host)
    looks = Looks({BACKEND.address: Server(max_connections=100)})
    whole = Coordinator(spec, store, looks, Remembered(run_dir))  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        await nursery.start(whole.run)
        await trio.sleep(1)  # noqa: TID251 - the clock jumps: it is elected
        yield whole
        nursery.cancel_scope.cancel()


@dataclass
class Sharer:
    """A worker that keeps to its share as it is told, and gives back at once."""

    worker: Worker
    permits: int | None = None
    kept: int = 0
    revision: int = 0
    executing: int = 0

    async def hello(self, **shares: int) -> Args:
        answer = await self.worker.hello(shares={DB: shares} if shares else {})
        if CLASS in answer.get("shares", {}).get(DB, {}):
            self.permits, self.kept, self.revision = answer["shares"][DB][CLASS]
        return answer

    async def wants(self, **tenants: int) -> None:
        await self.worker.call("demand", db=DB, classes={CLASS: {
            "oldest_seconds": 0.0, "tenants": {name: [1, count, 0] for name, count in tenants.items()}}})

    async def follow(self) -> None:
        while True:
            self.worker.news = trio.Event()
            for args in self.worker.told_of("share"):
                if args["share"][2] > self.revision:
                    self.permits, self.kept, self.revision = args["share"]
            left = max(self.kept, self.executing)
            if self.permits is not None and left < self.permits:
                answer = await self.worker.call("share_lower", db=DB, to=left, **{"class": CLASS})
                self.permits, self.kept, self.revision = answer["share"]
            else:
                await self.worker.news.wait()


@asynccontextmanager
async def linked(whole: Coordinator, boot_id: str, *, hears: bool = True) -> AsyncIterator[Sharer]:
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(whole.workers.serve, theirs)
        sharer = Sharer(Worker(boot_id=boot_id))
        async with sharer.worker.linked(ours):
            if hears:
                await sharer.hello()
            else:
                await sharer.worker.hello()
            nursery.start_soon(sharer.follow)
            nursery.start_soon(beat, sharer)
            yield sharer
            nursery.cancel_scope.cancel()


async def beat(sharer: Sharer) -> None:
    while True:
        await trio.sleep(1)  # noqa: TID251 - the clock jumps
        await sharer.worker.call("heartbeat")


async def within(seconds: float, holds: Callable[[], bool]) -> None:
    """A share moves in so many seconds at most."""
    deadline = trio.current_time() + seconds
    while not holds():
        assert trio.current_time() < deadline
        await trio.sleep(0.01)  # noqa: TID251 - the clock jumps


async def test_all_permits_are_out_and_follow_need(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with running(tmp_path, founded()) as whole, linked(whole, "A") as a:
        await within(0.5, lambda: a.permits == PERMITS)
        async with linked(whole, "B") as b:
            await within(0.5, lambda: (a.permits, b.permits) == (4, 4))
            await a.wants(t=20)
            await within(0.15, lambda: (a.permits, b.permits) == (PERMITS, 0))
            a.executing = PERMITS
            await b.wants(u=20)
            await within(0.15, lambda: a.kept == 4)
            assert b.permits == 0  # not before it was given back
            a.executing = 3
            a.worker.news.set()
            await within(0.15, lambda: (a.permits, b.permits) == (4, 4))


async def test_a_steady_load_writes_nothing(tmp_path: Path, autojump_clock: MockClock) -> None:
    store = founded()
    async with running(tmp_path / "a", store) as whole, linked(whole, "A") as a, linked(whole, "B") as b, \
            running(tmp_path / "b", store, "host-b") as other, linked(other, "C") as c:
        for each in (a, b, c):
            await each.wants(t=6)
        await trio.sleep(5)  # noqa: TID251 - the clock jumps
        assert sum(each.permits or 0 for each in (a, b, c)) == PERMITS
        before = await revision(store)
        for count in (7, 6, 5, 7, 6):
            for each in (a, b, c):
                await each.wants(t=count)
            await trio.sleep(2)  # noqa: TID251 - the clock jumps
        assert await revision(store) == before


async def test_what_another_host_wants_is_written_and_served(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    store = founded()
    async with running(tmp_path / "a", store) as whole, linked(whole, "A") as a, \
            running(tmp_path / "b", store, "host-b") as other, linked(other, "C") as c:
        await within(1, lambda: (a.permits, c.permits) == (4, 4))
        await c.wants(t=8)
        await within(0.5, lambda: (a.permits, c.permits) == (0, PERMITS))
        entry = await found(store, KEYS.demand("host-b"))
        assert entry is not None
        assert entry.lease
        assert HostDemand.decode(entry.value).classes == {CLASS: {"C": {"t": 8}}}
        assert await found(store, KEYS.demand("host-a")) is None  # the leader knows its own host's


async def test_nothing_is_given_before_every_worker_keeps_to_its_share(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with running(tmp_path, founded()) as whole, linked(whole, "old", hears=False), \
            linked(whole, "A") as a:
        await trio.sleep(10)  # noqa: TID251 - the clock jumps
        assert a.permits is None
        assert (await a.hello())["shares"] == {DB: {}}


async def test_a_worker_that_comes_again_keeps_its_share_and_has_no_more_than_it_believes(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with running(tmp_path, founded()) as whole, linked(whole, "A") as a, linked(whole, "B"):
        await within(0.5, lambda: a.permits == 4)
        before = a.revision
        await a.hello(**{CLASS: 4})
        assert (a.permits, a.kept) == (4, 4)
        assert a.revision > before
        await a.hello(**{CLASS: 3})
        assert a.permits == 3


async def test_the_share_of_a_dead_worker_goes_with_its_last_session(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    store = founded()
    async with running(tmp_path, store) as whole, linked(whole, "A") as a, linked(whole, "B"):
        await within(0.5, lambda: a.permits == 4)
        held = Session(Kind.MAIN, 0, 1, SessionState.RESERVED, "B", "host-a", "app", "app", 0, "r", 1, 1)
        await store.txn(Txn(puts=(Put(KEYS.session(Kind.MAIN, 0), held.encode()),)))
        await whole.worker_exited({"boot_id": "B", "how": "killed", "at_us": 1})
        await a.wants(t=20)
        await within(1, lambda: a.permits == PERMITS - 1)
        await store.txn(Txn(deletes=(KEYS.session(Kind.MAIN, 0),)))
        await within(1, lambda: a.permits == PERMITS)
        assert await found(store, KEYS.share(CLASS, "B")) is None


async def test_a_worker_without_a_share_serves_one_at_a_time_where_no_leader_gives_any(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    store = founded(generation=2)  # which is not there: nobody can allot by it
    await store.txn(Txn(puts=(Put(KEYS.raised(CLASS), Raised(1).encode()),)))
    async with running(tmp_path, store) as whole, linked(whole, "A") as a:
        assert (a.permits, a.kept) == (0, 0)
        await within(FLOOR_SECONDS + 0.1, lambda: a.permits == 1)
        await store.txn(Txn(puts=(Put(KEYS.share(CLASS, "A"), Share(3).encode()),)))
        await within(0.1, lambda: a.permits == 3)


async def test_workers_that_are_more_than_the_permits_take_turns(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    store = founded()
    async with running(tmp_path, store) as whole, AsyncExitStack() as stack:
        sharers = [await stack.enter_async_context(linked(whole, f"W{n}")) for n in range(PERMITS + 1)]
        served = set[int]()
        for each in sharers:
            await each.wants(t=3)
        deadline = trio.current_time() + 20
        while len(served) <= PERMITS:
            assert trio.current_time() < deadline
            served |= {n for n, each in enumerate(sharers) if each.permits}
            assert sum(each.permits or 0 for each in sharers) <= PERMITS
            await trio.sleep(0.05)  # noqa: TID251 - the clock jumps
