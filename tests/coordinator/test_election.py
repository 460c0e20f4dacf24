"""Exactly one leads; a leader that may have lost its lease stops; its fence no longer holds."""

from __future__ import annotations

from typing import Any

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.election import ABSTAIN_TTLS, Election, Leader
from coordinator.store.api import Compacted, Compare, Put, Txn, Won
from coordinator.store.memory import MemoryStore
from tests.ledger.ground import FLEET

TTL_SECONDS = 3.0


def candidate(store: MemoryStore, host: str) -> Election:
    return Election(store, FLEET, Leader(host, 1, 0), ttl_seconds=TTL_SECONDS)


class Led:
    """Notes when it leads and with which fence."""

    def __init__(self) -> None:
        self.fences: list[Compare] = []
        self.ended = 0

    async def __call__(self, fence: Compare) -> None:
        self.fences.append(fence)
        try:
            await trio.sleep_forever()
        finally:
            self.ended += 1


async def may_write(store: MemoryStore, fence: Compare) -> bool:
    return isinstance(await store.txn(Txn((fence,), (Put("/probe", b""),))), Won)


async def test_one_leads_and_the_other_follows_when_it_goes(clock: MockClock) -> None:
    store, first, second = MemoryStore(), Led(), Led()
    a, b = candidate(store, "a"), candidate(store, "b")
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def run_a() -> None:
            with scope:
                await a.run(first)

        nursery.start_soon(run_a)
        await wait_all_tasks_blocked()
        nursery.start_soon(b.run, second)
        await wait_all_tasks_blocked()
        assert (a.leading, b.leading) == (True, False)
        assert b.holder is not None
        assert b.holder.host == "a"
        began = trio.current_time()
        scope.cancel()  # gives its key back
        await wait_all_tasks_blocked()
        assert (a.leading, b.leading) == (False, True)
        assert trio.current_time() - began < 0.1
        assert not await may_write(store, first.fences[0])
        assert await may_write(store, second.fences[0])
        nursery.cancel_scope.cancel()


async def test_a_leader_whose_key_was_wiped_stops_and_stands_again_though_its_lease_lives(
    clock: MockClock,
) -> None:
    store, led = MemoryStore(), Led()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(candidate(store, "a").run, led)
        await wait_all_tasks_blocked()
        del store.keyspace.entries[FLEET.leader()]
        with trio.move_on_after(TTL_SECONDS):
            await trio.sleep_forever()
        assert (len(led.fences), led.ended) == (2, 1)
        assert await may_write(store, led.fences[1])
        nursery.cancel_scope.cancel()


async def test_a_leader_whose_lease_ended_stops_and_stands_again(clock: MockClock) -> None:
    store, led = MemoryStore(), Led()
    election = candidate(store, "a")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(election.run, led)
        await wait_all_tasks_blocked()
        store.expire(store.keyspace.entries[FLEET.leader()].lease)
        with trio.move_on_after(TTL_SECONDS):
            await trio.sleep_forever()
        assert (led.ended, len(led.fences)) == (1, 2)
        assert not await may_write(store, led.fences[0])
        nursery.cancel_scope.cancel()


async def test_a_leader_stays_for_as_long_as_its_lease_is_renewed(clock: MockClock) -> None:
    store, led = MemoryStore(), Led()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(candidate(store, "a").run, led)
        with trio.move_on_after(20 * TTL_SECONDS):
            await trio.sleep_forever()
        assert (led.ended, len(led.fences)) == (0, 1)
        nursery.cancel_scope.cancel()


async def test_who_resigned_abstains_once_and_who_lost_a_campaign_or_does_not_lead_not_at_all(
    clock: MockClock
) -> None:
    store, led = MemoryStore(), Led()
    a = candidate(store, "a")
    async with trio.open_nursery() as nursery:
        a.resign()
        nursery.start_soon(a.run, led)
        await wait_all_tasks_blocked()
        assert a.leading
        a.resign()
        await wait_all_tasks_blocked()
        assert not a.leading
        a.resign()
        with trio.move_on_after(ABSTAIN_TTLS * TTL_SECONDS + 0.1):
            await trio.sleep_forever()
        assert (a.leading, len(led.fences)) == (True, 2)
        with trio.move_on_after(20 * TTL_SECONDS):
            await trio.sleep_forever()
        assert (a.leading, len(led.fences)) == (True, 2)
        nursery.cancel_scope.cancel()


class Compacting(MemoryStore):
    """A store whose first watch finds its revision compacted."""

    def __init__(self) -> None:
        super().__init__()
        self.watches = 0

    def watch(self, prefix: str, *, after: int) -> Any:
        self.watches += 1
        if self.watches == 1:
            raise Compacted(after)
        return super().watch(prefix, after=after)


async def test_a_compacted_watch_ends_no_candidate(clock: MockClock) -> None:
    store, first, second = Compacting(), Led(), Led()
    a, b = candidate(store, "a"), candidate(store, "b")
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def run_a() -> None:
            with scope:
                await a.run(first)

        nursery.start_soon(run_a)
        await wait_all_tasks_blocked()
        nursery.start_soon(b.run, second)
        await trio.sleep(2 * TTL_SECONDS)  # noqa: TID251 - on a clock that jumps: it stands again
        assert store.watches > 1
        scope.cancel()
        await trio.sleep(TTL_SECONDS)  # noqa: TID251 - on a clock that jumps
        assert b.leading
        nursery.cancel_scope.cancel()
