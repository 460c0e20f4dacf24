"""What workers are answered: registration, permits that differ, waiting and making room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.ledger.record import EpochState
from coordinator.ledger.record import Worker as WorkerRecord
from coordinator.ledger.rules import MarkOwnerGone
from coordinator.link import LinkRefused
from coordinator.link_values import parse_permit
from coordinator.registry import Ordinal
from coordinator.serve_workers import FORGET_AT_RECEIPTS
from coordinator.store.api import Put, Txn
from tests.coordinator.parts import Worker
from tests.coordinator.stage import DB, row, stage
from tests.ledger.ground import BACKEND, FLEET, KEYS, epoch

BACKEND_MAP = {
    "address": BACKEND.address, "system_identifier": BACKEND.system_identifier, "timeline": BACKEND.timeline,
    "postmaster_start_us": BACKEND.postmaster_start_us, "in_recovery": False,
}


async def reserve(worker: Worker, wait_seconds: float = 0.0, **ask: Any) -> list[Any]:
    permit: list[Any] = (await worker.reserve(wait_seconds, db=DB, **ask))["permit"]
    return permit


async def opened(worker: Worker, pid: int = 42) -> list[Any]:
    permit = await reserve(worker)
    await worker.call("open", db=DB, permit=permit, pid=pid, backend_start_us=5_000, backend=BACKEND_MAP)
    return permit


async def refusal(call: Any) -> str:
    with pytest.raises(LinkRefused) as refused:
        await call
    return refused.value.code


async def test_registering_puts_worker_and_ordinal_on_one_lease_and_acknowledges_the_epoch(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("A"), on.worker("B"):
        entries = on.keyspace.entries
        a, b = entries[FLEET.worker("A")], entries[FLEET.worker("B")]
        assert WorkerRecord.decode(a.value).epochs == {DB: 1}
        assert (WorkerRecord.decode(a.value).ordinal, WorkerRecord.decode(b.value).ordinal) == (0, 1)
        assert entries[FLEET.ordinal(0)].lease == a.lease != 0
        on.expire("A")
        assert FLEET.ordinal(0) not in entries


async def test_hello_frees_what_is_not_listed_but_not_what_ever_connected(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        async with on.worker("A") as worker:
            await reserve(worker)
            was_open = await opened(worker)
        async with on.worker("A"):
            assert await on.states() == {was_open[1]: "SESSION_UNKNOWN"}


async def test_hello_keeps_the_permit_of_an_outstanding_request(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        permit = await reserve(worker, request_id="r")
        await worker.call("hello", boot_id="A", index=0, pid=1, pid_start=1, permits=[], requests=["r"])
        assert await on.states() == {permit[1]: "SESSION_RESERVED"}
        assert await reserve(worker, request_id="r") == permit


async def test_hello_says_which_permits_are_unknown_and_which_are_gone(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        kept, gone = await opened(worker), await opened(worker, 43)
        await worker.call("unknown", db=DB, permit=kept, abandoned=False)
        await worker.call("release", db=DB, permit=gone, proof="eof")
        answer = await worker.hello()
        assert (answer["unknown"], answer["gone"]) == ([[DB, kept]], [[DB, gone]])
        await worker.call("reassert", db=DB, permit=kept, closing=False)
        assert await on.states() == {kept[1]: "OPEN"}


async def test_a_lost_link_changes_nothing_and_a_lost_lease_makes_the_worker_reassert(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        on.eyes.server.rows = [row(42, 5_000)]
        async with on.worker("A") as before:
            permit = await opened(before)
        assert await on.states() == {permit[1]: "OPEN"}
        async with on.worker("A", permits=before.permits) as worker:
            on.expire("A")
            await on.reconcile()
            assert await on.states() == {permit[1]: "SESSION_UNKNOWN"}
            assert not (await worker.call("heartbeat"))["alive"]
            assert (await worker.hello())["unknown"] == [[DB, permit]]
            await worker.call("reassert", db=DB, permit=permit, closing=False)
            assert await on.states() == {permit[1]: "OPEN"}
            assert FLEET.worker("A") in on.keyspace.entries


async def test_a_worker_whose_permit_was_freed_meanwhile_is_told_that_it_is_gone(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        permit = await opened(worker)
        on.expire("A")
        await on.reconcile()  # no row: absent
        await worker.until(lambda w: w.told_of("permit_gone") == [{"db": DB, "permit": permit}])
        assert not (await worker.call("heartbeat"))["alive"]
        assert (await worker.hello())["gone"] == [[DB, permit]]


async def test_a_late_mark_cannot_hit_a_worker_that_is_registered(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        permit = await opened(worker)
        await on.ledger.apply(MarkOwnerGone(parse_permit(permit)))
        assert await on.states() == {permit[1]: "OPEN"}


async def test_a_worker_that_was_seen_to_end_is_not_registered_again(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        await on.registry.bury("A", "signal 9", 1)
        assert FLEET.worker("A") not in on.keyspace.entries
        assert FLEET.worker_exit("A") in on.keyspace.entries
        assert not (await worker.call("heartbeat"))["alive"]
        assert await refusal(worker.hello()) == "unregistered"


async def test_leases_are_not_kept_alive_without_a_good_read(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        on.views.good_read_at = trio.current_time() - 6
        assert not (await worker.call("heartbeat"))["alive"]


async def test_a_waiter_gets_the_slot_that_is_freed_in_the_order_of_coming(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path, slots=1) as on, on.worker("A") as first, on.worker("B") as second:
        held = await reserve(first)
        order: list[str] = []

        async def wait_and_give_back(worker: Worker) -> None:
            permit = await reserve(worker, 60)
            order.append(worker.boot_id)
            await worker.release(permit, db=DB)

        async with trio.open_nursery() as nursery:
            for worker in (second, first):
                nursery.start_soon(wait_and_give_back, worker)
                await wait_all_tasks_blocked()
            await first.release(held, db=DB)
        assert order == ["B", "A"]
        assert trio.current_time() < 1  # by being woken, not by the tick


async def test_a_wait_ends_with_the_reason_and_leaves_nothing_behind(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path, slots=1) as on, on.worker("A") as worker:
        held = await reserve(worker)
        began = trio.current_time()
        assert await refusal(reserve(worker, 3.0)) == "full"
        assert trio.current_time() - began == pytest.approx(3.0, abs=0.1)
        await worker.release(held, db=DB)
        assert on.granting.waiting() == {DB: 0}
        assert await on.states() == {}


async def test_a_full_pool_does_not_hold_up_another(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path, slots=4) as on, on.worker("A") as worker:
        await reserve(worker, seats=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refusal, reserve(worker, 30.0, seats=1))
            await wait_all_tasks_blocked()
            assert on.granting.waiting() == {DB: 1}
            await reserve(worker, user="other")
            assert trio.current_time() < 1


async def test_the_worker_with_the_most_sessions_is_asked_once_to_shed_one(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path, slots=4) as on, on.worker("A") as rich, on.worker("B") as poor:
        held = [await opened(rich, pid) for pid in (1, 2, 3, 4)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: reserve(poor, 60))
            await rich.until(lambda w: w.told_of("shed") != [])
            with trio.move_on_after(20):
                await trio.sleep_forever()  # many ticks: nothing more is asked for one waiter
            assert rich.told_of("shed") == [{"db": DB, "pool": "app", "user": "app", "count": 1}]
            await rich.call("closing", db=DB, permit=held[0])
            await rich.release(held[0], "eof", db=DB)
        assert len(poor.permits) == 1


async def test_where_nobody_has_more_the_others_are_asked_at_once_and_each_second_for_an_idle_session(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path, slots=4) as on, on.worker("A") as one, on.worker("B") as other:
        for worker in (one, other):
            held = [await opened(worker, pid) for pid in (1, 2)]
        before = on.store.asked
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: reserve(one, 60))
            await other.until(lambda w: w.told_of("spare") != [])
            assert trio.current_time() < 1
            with trio.move_on_after(5.5):
                await trio.sleep_forever()
            asked = other.told_of("spare")
            assert asked == [{"db": DB, "pool": "app", "user": "app", "count": 1}] * len(asked)
            assert 6 <= len(asked) <= 9  # at once, at each tick, and whenever it may try
            assert (one.told_of("spare"), other.told_of("shed")) == ([], [])
            await other.call("closing", db=DB, permit=held[0])
            await other.release(held[0], "eof", db=DB)
        assert len(one.permits) == 3
        assert on.store.asked > before


async def test_while_the_epoch_drains_askers_wait_and_the_next_epoch_serves_them(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        await on.put(KEYS.epoch(), epoch(1, EpochState.DRAINING))
        await worker.until(lambda w: w.ledgers[DB]["epoch"]["state"] == "DRAINING" if w.told else False)
        assert await refusal(reserve(worker)) == "draining"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: reserve(worker, 60))
            await wait_all_tasks_blocked()
            await on.put(KEYS.epoch(), epoch(2))
        assert len(worker.permits) == 1
        await worker.call("epoch_ack", db=DB, epoch=2)
        assert WorkerRecord.decode(on.keyspace.entries[FLEET.worker("A")].value).epochs == {DB: 2}


async def test_a_worker_that_leaves_while_it_waits_holds_up_nobody(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path, slots=1) as on, on.worker("A") as holder:
        held = await reserve(holder)
        async with on.worker("B") as leaver, trio.open_nursery() as nursery:
            nursery.start_soon(lambda: reserve(leaver, 60))
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        async with on.worker("C") as stayer, trio.open_nursery() as nursery:
            nursery.start_soon(lambda: reserve(stayer, 60))
            await wait_all_tasks_blocked()
            await holder.release(held, db=DB)
        assert on.granting.waiting() == {DB: 0}
        assert len(await on.states()) == 1


async def test_a_lost_ledger_lets_nobody_grow_and_calls_no_permit_gone(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        await opened(worker)
        for key in [key for key in on.keyspace.entries if "/session/" in key or "/ledger/" in key]:
            del on.keyspace.entries[key]
        await on.views.refresh()
        assert await refusal(reserve(worker, 10.0)) == "ledger_lost"
        assert (await worker.hello())["gone"] == []
        await worker.until(lambda w: w.ledgers[DB]["state"] == "LOST")


async def test_what_makes_no_sense_is_refused_and_the_link_lives_on(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        for op, args in (
            ("release", {"db": DB, "permit": ["main", 0], "proof": "eof"}),
            ("release", {"db": "other", "permit": ["main", 0, 1], "proof": "eof"}),
            ("open", {"db": DB}),
        ):
            assert await refusal(worker.call(op, **args)) == "bad_request"
        assert (await worker.call("heartbeat"))["alive"]
        assert on.registry.linked() == {"A"}


async def test_a_cancel_key_is_handed_to_the_worker_with_its_ordinal(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("A") as a, on.worker("B") as b:
        await a.call("cancel", ordinal=1, key=b"secret")
        assert b.told_of("cancel") == [{"key": b"secret"}]
        assert await refusal(a.call("cancel", ordinal=7, key=b"")) == "unknown_ordinal"
        answers = (await a.call("fleet", op="show", args={"what": "pools"}))["answers"]
        assert [answer["value"] for answer in answers] == [{}, {}]
        assert len(on.registry.workers) == 2


async def test_a_cancel_key_that_says_nothing_is_offered_to_every_other_worker_and_host(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("A") as a, on.worker("B") as b, on.worker("C") as c:
        elsewhere = WorkerRecord(
            boot_id="far", index=0, ordinal=9, host="b", machine_id="", kernel_boot_id="", pid=1, pid_start=1,
            cancel_address="10.0.0.2:6432")
        await on.store.txn(Txn(puts=(Put(FLEET.worker("far"), elsewhere.encode()),
                                     Put(FLEET.ordinal(9), Ordinal("far").encode()))))
        for to_hosts, told in ((True, ["10.0.0.2:6432"]), (False, [])):
            assert await a.call("cancel_any", key=b"secret", to_hosts=to_hosts) == {"addresses": told}
        assert b.told_of("cancel") == c.told_of("cancel") == [{"key": b"secret"}] * 2
        assert a.told_of("cancel") == []


async def test_a_reservation_whose_outcome_is_unknown_is_voided_until_its_slot_is_free(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        on.store.lifted = trio.Event()
        began = trio.current_time()
        assert await refusal(reserve(worker)) == "ledger_unavailable"
        assert trio.current_time() - began <= 2
        await on.store.lift()  # only now the reservation lands
        with trio.move_on_after(5.0):
            await trio.sleep_forever()
        assert await on.states() == {}
        await reserve(worker)


async def test_a_permit_that_was_given_up_is_told_gone_when_it_is_proven_and_counts_no_more(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        permit = await opened(worker)
        await worker.call("unknown", db=DB, permit=permit, abandoned=False)
        assert sum(on.registry.holdings().values()) == 1
        await on.reconcile()
        await worker.until(lambda w: w.told_of("permit_gone") == [{"db": DB, "permit": permit}])
        assert on.registry.holdings() == {}


async def test_receipts_of_answers_that_were_used_go_while_nothing_is_outstanding(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        for _ in range(FORGET_AT_RECEIPTS):
            await worker.release(await reserve(worker), db=DB)
        kept = await reserve(worker, request_id="unheard")
        assert (await worker.call("heartbeat"))["alive"]
        receipts = [key for key in on.keyspace.entries if key.startswith(KEYS.receipts())]
        assert receipts == [KEYS.receipt("unheard")]
        assert await reserve(worker, request_id="unheard") == kept
        await reserve(worker)  # its key was put again: what was remembered of it only loses once


async def test_a_change_that_the_answer_to_hello_overtook_is_told_again(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        worker.ledgers[DB]["epoch"]["number"] = 0  # as an older answer would leave it
        await worker.until(lambda w: w.ledgers[DB]["epoch"]["number"] == 1)
