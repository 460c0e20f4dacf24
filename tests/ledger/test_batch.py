"""Requests of one host that come at the same time share transactions, and get what they would get alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.ledger.answers import Granted, Voided
from coordinator.ledger.batch import RESERVATIONS_MAX
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.record import Kind
from coordinator.ledger.reservation import WINDOW, Reserve
from coordinator.ledger.reserving import Pending
from coordinator.ledger.rules import Code, Refused, session_of
from coordinator.store.api import TXN_OPERATIONS_MAX, Lost, Put, Store, Txn, Won
from coordinator.store.faulty import Faults, FaultyStore
from coordinator.store.memory import MemoryStore
from tests.ledger.ground import KEYS, World, ask, ledger_on, register, session_keys, world, write


class Counting(MemoryStore):
    """Notes the transactions that reserve; the next `taken` of them find a slot of theirs taken."""

    def __init__(self, w: World) -> None:
        super().__init__(w.keyspace)
        self.sizes: list[int] = []
        self.operations: list[int] = []
        self.taken = 0

    async def txn(self, txn: Txn) -> Won | Lost:
        slots = [put.key for put in txn.puts if put.key.startswith(KEYS.sessions())]
        if slots:
            self.sizes.append(len(slots))
            self.operations.append(txn.operations)
        if slots and self.taken:
            self.taken -= 1
            write(self.keyspace, Put(slots[-1], b""))
        return await super().txn(txn)


async def reserve_together(ledger: Ledger, asks: Sequence[Reserve]) -> list[Granted | Refused]:
    """All at the same time."""
    answers: list[Granted | Refused | None] = [None] * len(asks)

    async def one(number: int) -> None:
        answers[number] = await ledger.reserve(asks[number])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ledger.run)
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as all_of_them:
            for number in range(len(asks)):
                all_of_them.start_soon(one, number)
                await trio.testing.wait_all_tasks_blocked(0.0)
        nursery.cancel_scope.cancel()
    return [answer for answer in answers if answer is not None]


async def rounds(ledger: Ledger, asks: Sequence[Reserve]) -> list[Pending]:
    """Rounds over these requests in their order, until all are answered."""
    pending = [Pending(each) for each in asks]
    while waiting := [each for each in pending if not each.answered]:
        await ledger._reserving.round(waiting)
    return pending


def said(answer: object) -> tuple[object, ...]:
    """What an answer says, revisions aside."""
    if isinstance(answer, Granted):
        return ("granted", answer.permit.kind, answer.permit.slot, answer.epoch)
    assert isinstance(answer, Refused), answer
    return (answer.code, answer.settled)


asks_of_many = st.lists(
    st.builds(
        lambda request, owner, user, kind: ask(
            f"r{request}", owner, user=user, kind=kind, seats=3 if user == "few" else 100),
        st.integers(0, 30), st.sampled_from(["A", "B", "nobody"]), st.sampled_from(["app", "few", "more"]),
        st.sampled_from([Kind.MAIN, Kind.MAIN, Kind.MAIN, Kind.RESERVE])),
    min_size=1, max_size=20, unique_by=lambda each: each.request_id)


@given(asks_of_many, st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_together_requests_get_what_they_get_one_by_one(asks: list[Reserve], slots: int) -> None:
    async def both() -> None:
        alone, together = world(slots, reserve=2), world(slots, reserve=2)
        one_by_one = [said(await alone.ledger.reserve(each)) for each in asks]
        pending = await rounds(together.ledger, asks)
        assert [said(each.answer) for each in pending] == one_by_one
        assert session_keys(together.keyspace) == session_keys(alone.keyspace)

    trio.run(both)


@given(st.integers(1, 130), st.integers(1, 9), st.integers(1, 50), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_no_transaction_is_larger_than_etcd_takes(
    count: int, owners: int, pools: int, random: Random
) -> None:
    async def all_of_them() -> None:
        w = world(slots=300)
        for number in range(owners):
            register(w.keyspace, f"w{number}")
        store = Counting(w)
        asks = [ask(f"r{number}", f"w{random.randrange(owners)}", seats=300,
                    user=f"u{random.randrange(pools)}")
                for number in range(count)]
        pending = await rounds(ledger_on(store), asks)
        assert all(isinstance(each.answer, Granted) for each in pending)
        assert max(store.operations) <= TXN_OPERATIONS_MAX
        assert max(store.sizes) <= RESERVATIONS_MAX
        assert len(session_keys(w.keyspace)) == 2 * count

    trio.run(all_of_them)


async def test_40_requests_of_one_pool_are_one_transaction() -> None:
    w = world(slots=100)
    store = Counting(w)
    await rounds(ledger_on(store), [ask(f"r{number}") for number in range(41)])
    assert store.sizes == [40, 1]


async def test_a_batch_takes_requests_in_the_order_in_which_they_came() -> None:
    w = world(slots=3)
    pending = await rounds(w.ledger, [ask(f"r{number}", "AB"[number % 2]) for number in range(6)])
    assert [said(each.answer)[0] for each in pending] == ["granted"] * 3 + [Code.FULL] * 3


async def test_on_what_may_be_old_nobody_overtakes_one_that_seems_to_have_no_seat() -> None:
    w = world(slots=4)
    pool: dict[str, Any] = {"user": "few", "seats": 1}
    held = await w.granted("r0", **pool)
    await w.another().void("r0", "A")  # this ledger does not hear of it: its seat seems taken
    assert held.permit.slot == 0
    await w.granted("r1")
    pending = await rounds(w.ledger, [ask("r2", **pool), ask("r3")])
    assert [said(each.answer)[0] for each in pending] == ["granted", "granted"]
    pending = await rounds(w.ledger, [ask("r4", **pool), ask("r5")])
    assert [said(each.answer)[0] for each in pending] == [Code.SEATS_FULL, "granted"]


async def test_a_lost_batch_is_planned_anew_one_window_on_and_one_by_one_when_it_loses_again() -> None:
    w = world(slots=3 * WINDOW)
    store = Counting(w)
    ledger = ledger_on(store)
    store.taken = 1
    pending = await rounds(ledger, [ask(f"r{number}") for number in range(3)])
    assert store.sizes == [3, 3]
    assert [said(each.answer)[2] for each in pending] == [WINDOW, WINDOW + 1, WINDOW + 2]
    store.sizes.clear()
    store.taken = 2
    pending = await rounds(ledger, [ask(f"s{number}") for number in range(3)])
    assert store.sizes == [3, 3, 1, 1, 1]
    assert all(isinstance(each.answer, Granted) for each in pending)


async def test_each_permit_of_a_batch_says_which_slots_its_siblings_have() -> None:
    w = world(slots=10)
    pending = await rounds(w.ledger, [ask(f"r{number}") for number in range(3)])
    granted = [each.answer for each in pending if isinstance(each.answer, Granted)]
    assert len({each.permit.generation for each in granted}) == 1
    stored = [session_of(w.keyspace.entries[KEYS.session(Kind.MAIN, slot)]) for slot in range(3)]
    assert [each.siblings for each in stored] == [(1, 2), (0, 2), (0, 1)]
    assert [each.permit for each in stored] == [each.permit for each in granted]
    alone = (await w.granted("r9")).permit
    assert session_of(w.keyspace.entries[KEYS.session(Kind.MAIN, alone.slot)]).siblings == ()


async def test_a_request_that_is_repeated_beside_itself_gets_one_permit() -> None:
    w = world()
    pending = await rounds(w.ledger, [ask("r1"), ask("r1"), ask("r2")])
    assert len({each.answer.permit for each in pending if isinstance(each.answer, Granted)}) == 2
    assert pending[0].answer == pending[1].answer
    assert len(session_keys(w.keyspace)) == 4


async def test_a_request_whose_owners_record_cannot_be_read_is_refused_alone() -> None:
    w = world()
    write(w.keyspace, Put(KEYS.worker("B"), b"\x01", w.leases["B"]))
    pending = await rounds(w.ledger, [ask("r1"), ask("r2", "B"), ask("r3")])
    assert [type(each.answer) for each in pending] == [Granted, ValueError, Granted]


async def test_nothing_is_planned_for_a_request_that_nobody_waits_for() -> None:
    w = world()
    pending = [Pending(ask("r1")), Pending(ask("r2"))]
    pending[0].left = True
    await w.ledger._reserving.round(pending)
    assert [each.answered for each in pending] == [False, True]
    assert len(session_keys(w.keyspace)) == 2


FAULTS = [Faults(unknown_applied=1.0), Faults(unknown_not_applied=1.0), Faults(unknown_late=1.0, lands=0.0)]


@pytest.mark.parametrize("faults", FAULTS)
async def test_each_request_of_a_batch_without_an_answer_is_unsettled_and_can_be_voided(
    faults: Faults,
) -> None:
    w = world(slots=10)
    store = FaultyStore(w.store, Random(1))
    ledger = ledger_on(store)
    await ledger.reserve(ask("r0"))
    store.faults = faults
    answers = await reserve_together(ledger, [ask(f"r{number}") for number in range(1, 5)])
    assert {said(answer) for answer in answers} == {(Code.LEDGER_UNAVAILABLE, False)}
    store.faults = Faults(lands=0.0)
    for number in range(1, 5):
        assert isinstance(await ledger.void(f"r{number}", "A"), Voided)
    await store.land_late()
    assert len(session_keys(w.keyspace)) == 2


@pytest.mark.parametrize("faults", FAULTS)
async def test_each_request_of_a_batch_without_an_answer_is_granted_once_when_it_is_repeated(
    faults: Faults,
) -> None:
    w = world(slots=10)
    store: Store = FaultyStore(w.store, Random(1))
    assert isinstance(store, FaultyStore)
    ledger = ledger_on(store)
    asks = [ask(f"r{number}") for number in range(5)]
    store.faults = faults
    await reserve_together(ledger, asks)
    store.faults = Faults(lands=0.0)
    answers = await reserve_together(ledger, asks)
    await store.land_late()
    assert Counter(type(answer) for answer in answers) == {Granted: 5}
    assert len(session_keys(w.keyspace)) == 10
