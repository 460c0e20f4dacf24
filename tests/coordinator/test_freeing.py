"""Who waits hears of what other hosts free from the leader, and is told nothing of every other session."""

from __future__ import annotations

from pathlib import Path

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.freeing import PAUSE_SECONDS, Freeing
from coordinator.ledger.rules import Release
from coordinator.ledger.states import Actor, Proof
from coordinator.link_values import parse_permit
from coordinator.store.api import Change, Compare, Field
from coordinator.store.memory import MemoryStore
from tests.coordinator.parts import Worker
from tests.coordinator.stage import DB, NO_FENCE, Stage, stage
from tests.ledger.ground import FLEET, KEYS, found, ledger_on


async def reserve_in_time(worker: Worker) -> None:
    await worker.reserve(60.0, db=DB)


def watched(on: Stage) -> list[str]:
    return sorted(watcher.prefix for watcher in on.store._watchers)


async def test_a_slot_that_another_host_frees_is_had_at_once_where_the_leader_tells(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path, slots=1) as on, on.worker("A") as holder, on.worker("B") as waiter:
        permit = parse_permit((await holder.reserve(db=DB))["permit"])
        freeing = Freeing(on.store, FLEET, [DB])
        on.reconciler.on_event.append(freeing.heard)
        on.nursery.start_soon(on.reconciler.lead, NO_FENCE)
        on.nursery.start_soon(freeing.lead, NO_FENCE)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reserve_in_time, waiter)
            await wait_all_tasks_blocked()
            begun = trio.current_time()
            await ledger_on(on.store).apply(Release(permit, Proof.UNUSED, Actor.OWNER))
        assert len(waiter.permits) == 1
        assert trio.current_time() - begun < 0.5


async def test_who_waits_watches_no_sessions(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path, slots=1) as on, on.worker("A") as holder, on.worker("B") as waiter:
        await holder.reserve(db=DB)
        before = watched(on)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reserve_in_time, waiter)
            await wait_all_tasks_blocked()
            assert sorted([*before, KEYS.freed()]) == watched(on)
            nursery.cancel_scope.cancel()
        assert not any(each.startswith(FLEET.every_session()) for each in before)


async def touches(store: MemoryStore, freeing: Freeing, fence: Compare, frees: int) -> int:
    """How often the key was written while so many slots of each of two ledgers were freed."""
    before, other = store.keyspace.revision, store.keyspace.entries[KEYS.epoch()]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(freeing.lead, fence)
        for number in range(frees):
            freeing.heard(Change(f"{KEYS.sessions()}main/{number:06d}", None, 1))
            freeing.heard(Change(f"{FLEET.every_session()}another/main/{number:06d}", None, 1))
            freeing.heard(Change(f"{KEYS.sessions()}main/{number:06d}", other, 1))
            await trio.sleep(PAUSE_SECONDS / 50)  # noqa: TID251 - on a clock that jumps
        await trio.sleep(2 * PAUSE_SECONDS)  # noqa: TID251 - on a clock that jumps
        nursery.cancel_scope.cancel()
    return store.keyspace.revision - before


async def test_a_flock_of_frees_is_few_touches_of_the_ledgers_own_key(clock: MockClock) -> None:
    store = MemoryStore(found())
    assert 1 <= await touches(store, Freeing(store, FLEET, [DB]), NO_FENCE, 100) <= 5
    assert KEYS.freed() in store.keyspace.entries


async def test_one_that_leads_no_more_touches_nothing(clock: MockClock) -> None:
    store = MemoryStore(found())
    fence = Compare(FLEET.leader(), Field.CREATE, 7)
    assert await touches(store, Freeing(store, FLEET, [DB]), fence, 3) == 0


async def test_an_etcd_that_takes_no_writes_stops_nobody(clock: MockClock) -> None:
    store = MemoryStore(found())
    store.keyspace.full = True
    freeing = Freeing(store, FLEET, [DB])
    assert await touches(store, freeing, NO_FENCE, 3) == 0
    store.keyspace.full = False
    assert await touches(store, freeing, NO_FENCE, 3) >= 1
