"""A policy that has fewer slots: sessions go on in low slots, what finds none is given up, nothing leaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.ledger.record import Epoch, Permit
from coordinator.ledger.snapshot import LedgerSnapshot
from coordinator.link import Args, LinkRefused
from coordinator.link_values import parse_permit, permit_list
from tests.coordinator.moving import follows, has_slots, moving, slots_of, take
from tests.coordinator.stage import DB
from tests.coordinator.test_workers import BACKEND_MAP, reserve
from tests.ledger.ground import KEYS, record_exit

Names = dict[tuple[str, Permit], str]


async def test_high_sessions_go_on_in_low_slots_and_their_worker_takes_the_new_permits(
    tmp_path: Path, clock: MockClock
) -> None:
    async with moving(tmp_path) as m, m.on.worker("A") as worker:
        permits = await has_slots(m, worker, 1, 4, 5)
        assert not await m.go()
        await m.publish(2, 3)
        assert not await m.go()
        assert await m.held() == {0: 104, 1: 101, 2: 105}
        assert slots_of(worker.permits) == [0, 1, 2]
        assert {each.generation for _, each in worker.permits} == {each.generation for each in permits}
        assert m.on.registry.workers["A"].permits.keys() == worker.permits.keys()
        assert worker.told_of("retire") == worker.told_of("permit_gone") == []
        for _, permit in list(worker.permits):
            assert await worker.release(permit_list(permit), "eof", db=DB)
        assert await m.held() == {}


async def test_what_finds_no_low_slot_is_given_up_the_highest_ones_until_they_have_gone(
    tmp_path: Path, clock: MockClock
) -> None:
    async with moving(tmp_path) as m, m.on.worker("A") as worker:
        await has_slots(m, worker, 0, 1, 3, 4, 5)
        await m.publish(2, 3)
        assert await m.go()
        await wait_all_tasks_blocked()
        assert await m.held() == {0: 100, 1: 101, 2: 103, 4: 104, 5: 105}
        told = worker.told_of("retire")
        assert [slot for _, slot, _ in told[0]["permits"]] == [4, 5]
        for raw in told[0]["permits"]:
            await worker.release(raw, "eof", db=DB)
        assert not await m.go()


async def test_a_session_that_finds_no_slot_at_first_gets_the_one_that_comes_free(
    tmp_path: Path, clock: MockClock
) -> None:
    async with moving(tmp_path) as m, m.on.worker("A") as worker:
        low, _ = await has_slots(m, worker, 0, 3)
        await m.publish(2, 1)
        assert await m.go()
        await worker.release(permit_list(low), "eof", db=DB)
        assert not await m.go()
        assert await m.held() == {0: 103}


async def test_nothing_is_granted_until_every_high_slot_is_left_and_who_waits_gets_the_next(
    tmp_path: Path, clock: MockClock
) -> None:
    async with moving(tmp_path) as m, m.on.worker("A") as worker:
        await has_slots(m, worker, 0, 4)
        await m.publish(2, 3)
        got: list[Any] = []

        async def wait() -> None:
            got.append(await reserve(worker, 60.0))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            assert got == []
            await m.go()
        assert got[0][1] == 2
        assert await m.held() == {0: 100, 1: 104, 2: 0}


async def test_until_the_worker_has_heard_its_old_permit_stands_for_the_session(
    tmp_path: Path, clock: MockClock
) -> None:
    async with moving(tmp_path) as m, m.on.worker("A") as worker:
        old, = await has_slots(m, worker, 4)
        worker.answers["moved"] = lambda args: {"lost": [new for _, new in args["moves"]]}
        await m.publish(2, 3)
        assert await m.go(), "it is told again"
        session = (await m.on.ledger.snapshot()).sessions[0].session
        m.on.workers.became_unknown(DB, session)
        await wait_all_tasks_blocked()
        assert worker.told_of("permit_unknown")[0]["permit"] == permit_list(old)
        await worker.call("reassert", db=DB, permit=permit_list(old), closing=False)
        await worker.call("closing", db=DB, permit=permit_list(old))
        assert (await m.on.states()) == {0: "CLOSING"}
        assert await worker.release(permit_list(old), "eof", db=DB)
        assert await m.held() == {}
        assert m.on.registry.workers["A"].permits == {}
        assert not await worker.release(permit_list(old), "eof", db=DB)
        assert not await m.go()


async def test_a_worker_that_was_not_told_is_told_by_the_next_pass(
    tmp_path: Path, clock: MockClock
) -> None:
    def refuse(args: Args) -> Args:
        raise LinkRefused("failed", "not now")

    async with moving(tmp_path) as m, m.on.worker("A") as worker:
        await has_slots(m, worker, 4)
        worker.answers["moved"] = refuse
        await m.publish(2, 3)
        assert await m.go()
        follows(worker)
        assert not await m.go()
        assert slots_of(worker.permits) == [0]


async def test_what_is_to_be_given_up_is_named_as_its_worker_knows_it(
    tmp_path: Path, clock: MockClock
) -> None:
    async with moving(tmp_path) as m, m.on.worker("A") as worker:
        low, old = await has_slots(m, worker, 0, 5)
        worker.answers["moved"] = lambda args: {"nonsense": 1}
        await m.publish(2, 4)
        assert await m.go()
        assert await m.held() == {0: 100, 1: 105}
        await m.publish(3, 1)
        assert await m.go()
        await wait_all_tasks_blocked()
        assert worker.told_of("retire")[-1]["permits"] == [permit_list(old)]
        assert await worker.release(permit_list(low), "eof", db=DB)
        follows(worker)
        assert not await m.go()
        assert slots_of(worker.permits) == [0]


async def test_a_move_it_knows_already_is_answered_and_done_with(tmp_path: Path, clock: MockClock) -> None:
    async with moving(tmp_path) as m, m.on.worker("A") as worker:
        await has_slots(m, worker, 4)

        def moved(args: Args) -> Args:
            for old, new in args["moves"]:
                take(worker, old, new)
            raise LinkRefused("failed", "its answer is lost")

        worker.answers["moved"] = moved
        await m.publish(2, 3)
        assert await m.go()
        follows(worker)
        assert not await m.go()


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_hello_with_the_old_permit_is_answered_moved_and_never_gone(
    tmp_path: Path, clock: MockClock, restarts: bool
) -> None:
    async with moving(tmp_path) as m:
        async with m.on.worker("A") as worker:
            old, _ = await has_slots(m, worker, 4, 5)
            worker.answers["moved"] = lambda args: {"lost": [new for _, new in args["moves"]]}
            await m.publish(2, 5)
            await m.publish(3, 3)
            await m.go()
            names = dict(worker.permits)
        if restarts:
            await m.on.restart()
            m.restart()
        async with m.on.worker("A", permits=names) as worker:
            answer = await worker.hello()
            assert answer["gone"] == answer["unknown"] == []
            moved = {parse_permit(new).slot: parse_permit(was) for _, was, new in answer["moved"]}
            assert {slot: permit.slot for slot, permit in moved.items()} == {0: 4, 1: 5}
            assert moved[0] == old
            assert await m.held() == {0: 104, 1: 105}
            assert slots_of(dict.fromkeys(m.on.registry.workers["A"].permits, "")) == [0, 1]


async def test_a_worker_that_said_hello_by_an_old_name_it_goes_on_using_is_told_again(
    tmp_path: Path, clock: MockClock
) -> None:
    async with moving(tmp_path) as m, m.on.worker("A") as worker:
        old, = await has_slots(m, worker, 4)
        worker.answers["moved"] = lambda args: {"lost": [new for _, new in args["moves"]]}
        await m.publish(2, 3)
        await m.go()
        await worker.hello()  # and takes nothing of the answer: it has not recorded the session as open yet
        await worker.call("open", db=DB, permit=permit_list(old), pid=104, backend_start_us=5_000,
                          backend=BACKEND_MAP)
        follows(worker)
        assert not await m.go()
        assert slots_of(worker.permits) == [0]


async def test_a_worker_that_dies_untold_leaves_a_session_that_is_proven_gone_like_any_other(
    tmp_path: Path, clock: MockClock
) -> None:
    async with moving(tmp_path) as m:
        async with m.on.worker("A") as worker:
            await has_slots(m, worker, 4)
            worker.answers["moved"] = lambda args: {"lost": [new for _, new in args["moves"]]}
            await m.publish(2, 3)
            await m.go()
        m.on.expire("A")
        record_exit(m.on.keyspace, "A")
        await m.on.reconcile()
        assert await m.held() == {}
        assert [key for key in m.on.keyspace.entries if key.startswith(KEYS.all_seats())] == []


async def test_nothing_is_asked_of_etcd_while_every_session_is_where_it_may_be(
    tmp_path: Path, clock: MockClock
) -> None:
    async with moving(tmp_path) as m, m.on.worker("A") as worker:
        await has_slots(m, worker, 0, 3)
        await m.go()
        asked = m.on.store.asked
        for _ in range(5):
            assert not await m.go()
        assert m.on.store.asked == asked


async def test_nothing_moves_while_etcd_is_away_or_the_ledger_lost(tmp_path: Path, clock: MockClock) -> None:
    async with moving(tmp_path) as m, m.on.worker("A") as worker:
        await has_slots(m, worker, 4)
        await m.publish(2, 3)
        view = m.on.views.views[DB]
        asked = m.on.store.asked
        assert not await m.relocating.relocate(replace(view, reachable=False))
        assert not await m.relocating.relocate(replace(view, lost="wiped"))
        assert m.on.store.asked == asked
        m.on.store.silent = True
        assert await m.go()
        m.on.store.silent = False
        await m.go()
        assert await m.held() == {0: 104}


async def test_a_worker_whose_link_is_down_keeps_its_sessions_where_they_are(
    tmp_path: Path, clock: MockClock
) -> None:
    async with moving(tmp_path) as m:
        async with m.on.worker("A") as worker:
            await has_slots(m, worker, 4)
            await m.publish(2, 3)
        await wait_all_tasks_blocked()
        assert await m.go()
        assert await m.held() == {4: 104}


async def test_failover_slots_are_left_once_the_failover_is_over(tmp_path: Path, clock: MockClock) -> None:
    async with moving(tmp_path) as m, m.on.worker("A") as worker:
        await has_slots(m, worker, 0, 5)
        entry = m.on.keyspace.entries[KEYS.epoch()]
        epoch = replace(Epoch.decode(entry.value), failover=True)
        await m.on.put(KEYS.epoch(), epoch.encode())
        await m.publish(2, 6, failoverPermits=2)
        assert not await m.go()
        assert await m.held() == {0: 100, 5: 105}
        await m.on.put(KEYS.epoch(), replace(epoch, failover=False).encode())
        await m.on.views.refresh()
        assert not await m.go()
        assert await m.held() == {0: 100, 1: 105}


async def test_a_pass_follows_every_change_of_the_policy_by_itself(tmp_path: Path, clock: MockClock) -> None:
    async with moving(tmp_path) as m, m.on.worker("A") as worker:
        await has_slots(m, worker, 4)
        m.on.nursery.start_soon(m.relocating.run)
        await wait_all_tasks_blocked()
        await m.publish(2, 3)
        await worker.until(lambda w: bool(w.told_of("moved")))
        await wait_all_tasks_blocked()
        assert await m.held() == {0: 104}


async def test_while_a_session_is_busy_where_it_is_not_to_be_the_ledger_is_read_ever_more_seldom(
    tmp_path: Path, clock: MockClock
) -> None:
    async with moving(tmp_path, slots=4) as m, m.on.worker("A") as worker:
        await has_slots(m, worker, 0, 1, 2, 3)
        await m.publish(2, 3)
        m.on.nursery.start_soon(m.relocating.run)
        await trio.sleep(10.0)  # noqa: TID251 - the clock jumps
        reads = 0
        asked = m.on.ledger.snapshot

        async def counted() -> LedgerSnapshot:
            nonlocal reads
            reads += 1
            return await asked()

        m.on.ledger.snapshot = counted  # type: ignore[method-assign]
        await trio.sleep(50.0)  # noqa: TID251 - the clock jumps
        assert 20 <= reads <= 32, "once in a third of a lease cycle"
