"""Two hosts on one ledger: who waits on one gets a session that the other has too many of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.freeing import Freeing
from coordinator.granting import Granting
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.notes import Want
from coordinator.ledger.record import Kind
from coordinator.ledger.snapshot import Wanted
from coordinator.link import Args, LinkLost, LinkRefused
from coordinator.link_values import permit_list
from coordinator.registry import Registry
from coordinator.remembered import Remembered
from coordinator.serve_workers import WorkerServer
from coordinator.sharing import Sharing
from coordinator.store.api import Compare, Field, Put, Txn, Won
from coordinator.view import Views
from coordinator.wanting import STAND_BACK_SECONDS
from tests.coordinator.parts import Worker
from tests.coordinator.stage import DB, NO_FENCE, TTL_SECONDS, Stage, no_rows, stage
from tests.ledger.ground import FLEET, KEYS, NOW_US, register, write

WAIT_SECONDS = 60.0


async def another_host(on: Stage, run_dir: Path) -> Stage:
    """A coordinator of another host over the same store."""
    store, ledgers = on.store, {DB: Ledger(on.store, KEYS, FLEET, lambda: NOW_US)}
    views = Views(store, FLEET, ledgers, Remembered(run_dir), ttl_seconds=TTL_SECONDS)
    registry = Registry(store, FLEET, ledgers, host="host-b", machine_id="m2", kernel_boot_id="k",
                        ttl_seconds=TTL_SECONDS, now_us=lambda: NOW_US)
    granting = Granting(store, views, ledgers, registry, host="host-b")
    workers = WorkerServer(store, views, ledgers, registry, granting, host="host-b", ttl_seconds=TTL_SECONDS,
                           rows=no_rows)
    await views.refresh()
    on.nursery.start_soon(views.run)
    on.nursery.start_soon(granting.run)
    return replace(on, ledger=ledgers[DB], views=views, registry=registry, granting=granting, workers=workers,
                   life=trio.CancelScope())


@dataclass
class Two:
    """Both hosts; the first one's coordinator leads."""

    a: Stage
    b: Stage
    sharing: Sharing
    nursery: trio.Nursery = field(init=False)

    def wants(self) -> list[Wanted]:
        return [Wanted.read(entry) for key, entry in sorted(self.a.keyspace.entries.items())
                if key.startswith(KEYS.wants())]

    @property
    def revision(self) -> int:
        return self.a.keyspace.revision


@asynccontextmanager
async def two_hosts(tmp_path: Path, *, slots: int = 4, leads: bool = True) -> AsyncIterator[Two]:
    (tmp_path / "b").mkdir()
    async with stage(tmp_path, slots=slots) as a:
        b = await another_host(a, tmp_path / "b")
        sharing = Sharing(a.store, FLEET, {DB: a.ledger}, a.views, a.granting.wants)
        freeing = Freeing(a.store, FLEET, [DB])
        a.reconciler.on_event += [sharing.heard, freeing.heard]
        if leads:
            a.nursery.start_soon(a.reconciler.lead, NO_FENCE)
            a.nursery.start_soon(freeing.lead, NO_FENCE)
            a.nursery.start_soon(sharing.lead, NO_FENCE)
        await wait_all_tasks_blocked()
        two = Two(a, b, sharing)
        async with trio.open_nursery() as two.nursery:
            yield two
            two.nursery.cancel_scope.cancel()


def gives(two: Two, worker: Worker, ops: Sequence[str] = ("shed",)) -> Worker:
    """It gives up what it is asked for, at once."""
    async def give() -> None:
        _, permit = next(iter(worker.permits))
        await worker.release(permit_list(permit), db=DB)

    def asked(args: Args) -> Any:
        two.nursery.start_soon(give)
        return {}

    worker.answers |= dict.fromkeys(ops, asked)
    return worker


async def wants_for_ever(worker: Worker, times: int = 1_000_000) -> None:
    """As a pool does whose clients wait."""
    for _ in range(times):
        with suppress(LinkRefused):
            try:
                await worker.reserve(5.0, db=DB)
            except LinkLost:
                return
        await trio.sleep(0.25)  # noqa: TID251 - the pool's own back-off, on a clock that jumps


async def after(seconds: float) -> None:
    await trio.sleep(seconds)  # noqa: TID251 - on a clock that jumps


async def test_who_waits_on_one_host_gets_its_share_from_another_whose_clients_wait_too(
    tmp_path: Path, clock: MockClock
) -> None:
    async with two_hosts(tmp_path) as two, two.a.worker("A") as a, two.b.worker("B") as b:
        for each in (a, b):
            two.nursery.start_soon(wants_for_ever, gives(two, each))
            await after(3)
        assert (len(a.permits), len(b.permits)) == (2, 2)
        assert (len(a.told_of("shed")), len(b.told_of("shed"))) == (2, 0)


async def test_the_workers_of_both_hosts_come_to_like_shares(tmp_path: Path, clock: MockClock) -> None:
    async with (two_hosts(tmp_path, slots=8) as two, two.a.worker("A0") as a0, two.a.worker("A1") as a1,
                two.b.worker("B0") as b0, two.b.worker("B1") as b1):
        workers = (a0, a1, b0, b1)
        for each in workers[:2]:
            two.nursery.start_soon(wants_for_ever, gives(two, each))
        await after(5)
        assert len(a0.permits) + len(a1.permits) == 8
        for each in workers[2:]:
            two.nursery.start_soon(wants_for_ever, gives(two, each))
        await after(10)
        assert [len(each.permits) for each in workers] == [2, 2, 2, 2]


async def test_where_shares_are_even_wants_stand_and_nothing_more_is_written_but_at_times(
    tmp_path: Path, clock: MockClock
) -> None:
    async with two_hosts(tmp_path) as two, two.a.worker("A") as a, two.b.worker("B") as b:
        for each in (a, b):
            two.nursery.start_soon(wants_for_ever, gives(two, each))
            await after(10)
        before = two.revision
        await after(60)
        assert two.revision - before <= 2 * 60 / 30
        assert sorted(each.want.boot_id for each in two.wants()) == ["A", "B"]
        assert {len(a.permits), len(b.permits)} == {2}


async def test_a_want_is_gone_when_nobody_waits_any_more(tmp_path: Path, clock: MockClock) -> None:
    async with two_hosts(tmp_path, slots=1) as two, two.a.worker("A") as a, two.b.worker("B") as b:
        await a.reserve(db=DB)
        with pytest.raises(LinkRefused):
            await b.reserve(1.0, db=DB)
        assert [(each.want.boot_id, each.want.holder) for each in two.wants()] == [("B", "A")]
        await after(2)
        assert two.wants() == []


async def test_a_want_goes_with_the_lease_of_its_worker(tmp_path: Path, clock: MockClock) -> None:
    async with two_hosts(tmp_path, slots=1) as two, two.a.worker("A") as a, two.b.worker("B") as b:
        await a.reserve(db=DB)
        two.nursery.start_soon(wants_for_ever, b, 1)
        await after(0.5)
        (want,) = two.wants()
        lease = two.b.registry.workers["B"].lease
        assert lease is not None
        assert want.lease == lease.id
        two.b.expire("B")
        assert two.wants() == []


async def test_what_an_earlier_coordinator_of_its_host_wanted_is_taken_away(
    tmp_path: Path, clock: MockClock
) -> None:
    async with two_hosts(tmp_path) as two, two.b.worker("B"):
        lease = two.b.registry.workers["B"].lease
        assert lease is not None
        left = Want("app", "app", Kind.MAIN, "full", "B", "host-b", 0)
        await two.a.store.txn(Txn(puts=(Put(KEYS.want("old"), left.encode(), lease.id),)))
        await after(10)
        assert two.wants() == []


async def test_its_coordinators_end_takes_a_want_away(tmp_path: Path, clock: MockClock) -> None:
    async with two_hosts(tmp_path, slots=1) as two, two.a.worker("A") as a:
        await a.reserve(db=DB)
        two.nursery.start_soon(wants_for_ever, a)
        await after(1)
        assert len(two.wants()) == 1
        two.a.nursery.cancel_scope.cancel()
        keyspace = two.a.keyspace
    assert [key for key in keyspace.entries if key.startswith(KEYS.wants())] == []


async def stand_for(two: Two, holder: str = "A", op: str = "shed") -> str:
    """A want of a worker elsewhere, of which the test is the coordinator; it never takes anything."""
    lease = register(two.a.keyspace, "far")
    key = KEYS.want("far")
    want = Want("app", "app", Kind.MAIN, "full", "far", "host-c", 0, 0, op, holder, "app", "app")
    await two.a.store.txn(Txn(puts=(Put(key, want.encode(), lease),)))
    await wait_all_tasks_blocked()
    return key


@pytest.mark.parametrize("ends", ["never", "by its deletion"])
async def test_a_slot_that_was_given_for_another_host_is_not_retaken_until_that_had_its_time(
    tmp_path: Path, clock: MockClock, ends: str
) -> None:
    async with two_hosts(tmp_path, slots=1, leads=False) as two, two.a.worker("A") as a:
        await gives(two, a).reserve(db=DB)
        two.nursery.start_soon(wants_for_ever, a)
        await after(0.05)
        key, began = await stand_for(two), trio.current_time()
        assert a.told_of("shed") != []
        await after(1)
        assert two.a.keyspace.read(KEYS.sessions(), KEYS.sessions() + "~") == ()
        if ends != "never":
            write(two.a.keyspace, deletes=(key,))
            await two.a.store.txn(Txn(puts=(Put("/wake", b""),)))  # the store hears of it
        with trio.fail_after(STAND_BACK_SECONDS):
            while not a.permits:
                await after(0.05)
        assert trio.current_time() - began <= STAND_BACK_SECONDS + 0.2


async def test_a_third_host_does_not_take_what_one_gave_for_another(tmp_path: Path, clock: MockClock) -> None:
    async with two_hosts(tmp_path, slots=1, leads=False) as two, two.a.worker("A") as a, (
            two.b.worker("B")) as b:
        await gives(two, b).reserve(db=DB)
        two.nursery.start_soon(wants_for_ever, a)
        await after(0.05)
        await stand_for(two, holder="B")
        await two.a.store.txn(Txn(puts=(Put(KEYS.freed(), b""),)))  # as the leader tells
        began = trio.current_time()
        await after(STAND_BACK_SECONDS - 0.1)
        assert (len(a.permits), len(b.permits)) == (0, 0)
        while not a.permits:
            await after(0.05)
        assert trio.current_time() - began <= STAND_BACK_SECONDS + 0.2


async def test_what_a_worker_gave_for_another_of_its_host_is_not_left_to_a_host_that_wanted_an_idle_one(
    tmp_path: Path, clock: MockClock
) -> None:
    async with two_hosts(tmp_path, slots=2, leads=False) as two, two.a.worker("A0") as a0, (
            two.a.worker("A1")) as a1:
        for _ in range(2):
            await gives(two, a0).reserve(db=DB)
        await stand_for(two, holder="A0", op="spare")
        assert len(a0.told_of("spare")) == 1
        await a1.reserve(STAND_BACK_SECONDS / 4, db=DB)
        assert (len(a0.permits), len(a1.permits)) == (1, 1)


async def test_one_choice_is_passed_on_once(tmp_path: Path, clock: MockClock) -> None:
    async with two_hosts(tmp_path, leads=False) as two, two.a.worker("A") as a:
        await a.reserve(db=DB)
        await stand_for(two)
        two.a.store.break_watches()
        await after(5)
        assert len(a.told_of("shed")) == 1


async def test_one_that_leads_no_more_chooses_for_nobody(tmp_path: Path, clock: MockClock) -> None:
    async with two_hosts(tmp_path, slots=1, leads=False) as two, two.a.worker("A") as a, (
            two.b.worker("B")) as b:
        await a.reserve(db=DB)
        two.nursery.start_soon(wants_for_ever, b)
        two.nursery.start_soon(two.sharing.lead, Compare(FLEET.leader(), Field.CREATE, 7))
        await after(5)
        assert [each.want.holder for each in two.wants()] == [""]
        assert a.told_of("shed") == []


async def test_the_next_leader_chooses_for_the_wants_that_stand(tmp_path: Path, clock: MockClock) -> None:
    async with two_hosts(tmp_path, slots=2, leads=False) as two, two.a.worker("A") as a, (
            two.b.worker("B")) as b:
        for _ in range(2):
            await a.reserve(db=DB)
        two.nursery.start_soon(wants_for_ever, b)
        await after(5)
        assert [each.want.holder for each in two.wants()] == [""]
        two.nursery.start_soon(two.sharing.lead, NO_FENCE)
        await a.until(lambda worker: worker.told_of("shed") != [])
        assert isinstance(await two.a.store.txn(Txn()), Won)


async def test_what_lies_idle_on_another_host_is_asked_for_where_nobody_has_more(
    tmp_path: Path, clock: MockClock
) -> None:
    async with two_hosts(tmp_path, slots=2) as two, two.a.worker("A") as a, two.b.worker("B") as b:
        await gives(two, a, ["spare"]).reserve(db=DB)
        await b.reserve(db=DB)
        await b.reserve(5.0, db=DB)
        assert (len(a.told_of("spare")), len(a.told_of("shed"))) == (1, 0)
