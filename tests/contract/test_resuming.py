"""Whatever watches goes on when the store's history is compacted under it: it reads anew and watches on.

On every store under contract, a real etcd that is compacted among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import trio

from coordinator.election import Election, Leader
from coordinator.granting import Granting
from coordinator.ledger.answers import Granted
from coordinator.ledger.keys import DbKeys, FleetKeys
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.record import Alias, EpochState, LedgerHead, LedgerState
from coordinator.ledger.rules import Release
from coordinator.ledger.states import Actor, Proof
from coordinator.policy import encode_policy, load_policy
from coordinator.reconcile import Reconciler
from coordinator.registry import Introduction, Local, Registry
from coordinator.remembered import Remembered
from coordinator.store.api import Change, Compacted, Compare, Field, Put, Store, Txn
from coordinator.view import View, Views
from tests.contract.conftest import Ground, OpenGround
from tests.coordinator.parts import policy_text
from tests.coordinator.stage import FakeEyes, make_spec
from tests.ledger.ground import NOW_US, TAG, ask, epoch

DB = "orders/write"
TTL_SECONDS = 1.5
WAIT_SECONDS = 20.0


@dataclass
class Compacting:
    """The ground's store. The first watch of each prefix in `wanted` finds that its past was compacted."""

    ground: Ground
    wanted: set[str]
    refused: Counter[str] = field(default_factory=Counter)
    resumed: dict[str, trio.Event] = field(default_factory=dict)
    one_at_a_time: trio.Lock = field(default_factory=trio.Lock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ground.store, name)

    @asynccontextmanager
    async def watch(self, prefix: str, *, after: int) -> AsyncIterator[Any]:
        if prefix in self.wanted and not self.refused[prefix]:
            async with self.one_at_a_time:
                for _ in range(3):
                    await put(self.ground.store, self.ground.prefix + "filler", b"")
                await self.ground.compact((await self.ground.store.read(prefix)).revision)
        try:
            async with self.ground.store.watch(prefix, after=after) as changes:
                if not self.refused[prefix]:
                    yield changes
                    return
                self.event(prefix).set()
                yield changes
        except Compacted:
            self.refused[prefix] += 1
            raise

    def event(self, prefix: str) -> trio.Event:
        """Set when a watch of this prefix goes on after it was refused."""
        return self.resumed.setdefault(prefix, trio.Event())

    async def until_resumed(self) -> None:
        for prefix in self.wanted:
            await self.event(prefix).wait()
            assert self.refused[prefix] >= 1


async def put(store: Store, key: str, value: bytes) -> None:
    await store.txn(Txn(puts=(Put(key, value),)))


@dataclass
class Place:
    """A founded ledger of one permit, and what the parts are made of."""

    store: Compacting
    fleet: FleetKeys
    keys: DbKeys
    ledgers: dict[str, Ledger]
    views: Views
    registry: Registry


async def make_place(ground: Ground, run_dir: Path, *watched: str) -> Place:
    fleet = FleetKeys(ground.prefix.strip("/"), "f")
    keys = fleet.db(DB)
    policy = encode_policy(load_policy(policy_text(1, db=DB))[1])
    store = Compacting(ground, {fleet.root + each for each in watched})
    used = cast(Store, store)
    await used.txn(Txn(puts=(
        Put(keys.ledger(), LedgerHead("first", LedgerState.ACTIVE, TAG).encode()), Put(keys.epoch(), epoch()),
        Put(keys.policy(1), policy), Put(keys.alias(), Alias(1).encode()))))
    ledgers = {DB: Ledger(used, keys, fleet, lambda: NOW_US)}
    views = Views(used, fleet, ledgers, Remembered(run_dir), ttl_seconds=TTL_SECONDS)
    registry = Registry(used, fleet, ledgers, host="host", machine_id="m", kernel_boot_id="k",
                        ttl_seconds=TTL_SECONDS, now_us=lambda: NOW_US)
    return Place(store, fleet, keys, ledgers, views, registry)


async def test_views_go_on(open_ground: OpenGround, tmp_path: Path) -> None:
    with trio.fail_after(WAIT_SECONDS):
        async with open_ground() as ground, trio.open_nursery() as nursery:
            place = await make_place(ground, tmp_path, "epoch/", "ledger/", "policy/")
            changed = trio.Event()

            def on_change(view: View) -> None:
                if view.epoch is not None and view.epoch.state is EpochState.DRAINING:
                    changed.set()

            place.views.on_change.append(on_change)
            nursery.start_soon(place.views.run)
            await place.store.until_resumed()
            await put(ground.store, place.keys.epoch(), epoch(1, EpochState.DRAINING))
            await changed.wait()
            nursery.cancel_scope.cancel()


async def test_the_reconciler_goes_on(open_ground: OpenGround, tmp_path: Path) -> None:
    with trio.fail_after(WAIT_SECONDS):
        async with open_ground() as ground, trio.open_nursery() as nursery:
            place = await make_place(ground, tmp_path, "")
            await place.views.refresh()
            nursery.start_soon(place.views.run)
            reconciler = Reconciler(
                cast(Store, place.store), place.fleet, place.ledgers, place.views, FakeEyes(),
                spec=make_spec(tmp_path, lease_ttl_seconds=TTL_SECONDS), now_us=lambda: NOW_US)
            heard = trio.Event()

            def on_event(change: Change) -> None:
                if change.key == place.fleet.worker_exit("w"):
                    heard.set()

            reconciler.on_event.append(on_event)
            nursery.start_soon(reconciler.lead, Compare(place.fleet.leader(), Field.CREATE, 0))
            await place.store.until_resumed()
            await put(ground.store, place.fleet.worker_exit("w"), b"")
            await heard.wait()
            nursery.cancel_scope.cancel()


async def test_who_waits_for_a_session_gets_one(open_ground: OpenGround, tmp_path: Path) -> None:
    with trio.fail_after(WAIT_SECONDS):
        async with open_ground() as ground, trio.open_nursery() as nursery:
            place = await make_place(ground, tmp_path, "freed/" + FleetKeys("", "").db(DB).db)
            await place.views.refresh()
            nursery.start_soon(place.views.run)
            local = Local(Introduction("w", 0, 1, 1, "", (1,)))
            await place.registry.register(local)
            granting = Granting(
                cast(Store, place.store), place.views, place.ledgers, place.registry, host="host")
            nursery.start_soon(granting.run)
            held = await granting.reserve(local, DB, ask("r1", "w"), 1.0)
            assert isinstance(held, Granted)
            granted: list[Granted] = []

            async def wait() -> None:
                answer = await granting.reserve(local, DB, ask("r2", "w"), WAIT_SECONDS)
                assert isinstance(answer, Granted)
                granted.append(answer)

            async with trio.open_nursery() as waiting:
                waiting.start_soon(wait)
                await place.store.until_resumed()
                elsewhere = Ledger(ground.store, place.keys, place.fleet, lambda: NOW_US)
                await elsewhere.apply(Release(held.permit, Proof.UNUSED, Actor.OWNER))
                await put(ground.store, place.keys.freed(), b"")
            assert len(granted) == 1
            nursery.cancel_scope.cancel()


async def test_a_candidate_still_follows_a_leader_that_goes(open_ground: OpenGround, tmp_path: Path) -> None:
    with trio.fail_after(WAIT_SECONDS):
        async with open_ground() as ground, trio.open_nursery() as nursery:
            place = await make_place(ground, tmp_path, "leader")
            leads, led = trio.Event(), trio.Event()
            first = Election(ground.store, place.fleet, Leader("a", 1, 0), ttl_seconds=TTL_SECONDS)
            second = Election(
                cast(Store, place.store), place.fleet, Leader("b", 1, 0), ttl_seconds=TTL_SECONDS)
            scope = trio.CancelScope()

            async def lead(fence: Compare) -> None:
                leads.set()
                await trio.sleep_forever()

            async def follow(fence: Compare) -> None:
                led.set()
                await trio.sleep_forever()

            async def run_first() -> None:
                with scope:
                    await first.run(lead)

            nursery.start_soon(run_first)
            await leads.wait()
            nursery.start_soon(second.run, follow)
            await place.store.until_resumed()
            scope.cancel()
            await led.wait()
            assert second.leading
            nursery.cancel_scope.cancel()
