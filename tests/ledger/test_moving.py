"""Moves of several permits that come at the same time share transactions, and end as they would alone."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import trio

from coordinator.ledger.answers import Applied
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.record import Permit
from coordinator.ledger.rules import Closing, Code, Command, Open, Refused, Release, Unknown
from coordinator.ledger.states import Actor, Proof
from coordinator.store.api import Lost, Txn, Won
from coordinator.store.faulty import Faults, FaultyStore
from coordinator.store.memory import MemoryStore
from tests.ledger.ground import BACKEND, World, ask, ledger_on, session_keys, world


class Writes(MemoryStore):
    """Notes how many keys each transaction writes."""

    def __init__(self, w: World) -> None:
        super().__init__(w.keyspace)
        self.puts: list[int] = []
        self.deletes: list[int] = []

    async def txn(self, txn: Txn) -> Won | Lost:
        self.puts += [len(txn.puts)] if txn.puts else []
        self.deletes += [len(txn.deletes)] if txn.deletes else []
        return await super().txn(txn)


async def apply_together(ledger: Ledger, commands: Sequence[Command]) -> list[Applied | Refused]:
    answers: dict[int, Applied | Refused] = {}

    async def one(number: int) -> None:
        answers[number] = await ledger.apply(commands[number])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ledger.run)
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as all_of_them:
            for number in range(len(commands)):
                all_of_them.start_soon(one, number)
        nursery.cancel_scope.cancel()
    return [answers[number] for number in range(len(commands))]


async def reserved(ledger: Ledger, count: int) -> list[Permit]:
    answers = [await ledger.reserve(ask(f"r{number}")) for number in range(count)]
    return [answer.permit for answer in answers if not isinstance(answer, Refused)]


def opening(permits: Sequence[Permit]) -> list[Command]:
    return [Open(permit, 40 + number, 5_000, BACKEND) for number, permit in enumerate(permits)]


def releases(permits: Sequence[Permit]) -> list[Command]:
    return [Release(permit, Proof.EOF, Actor.OWNER) for permit in permits]


async def test_moves_of_different_permits_share_a_transaction_and_those_of_one_do_not() -> None:
    w = world(slots=10)
    store = Writes(w)
    ledger = ledger_on(store)
    permits = await reserved(ledger, 3)
    store.puts.clear()
    assert all(isinstance(each, Applied) for each in await apply_together(ledger, opening(permits)))
    assert store.puts == [3]
    store.puts.clear()
    again: list[Command] = [Unknown(permits[0]), Closing(permits[0]), Closing(permits[1])]
    await apply_together(ledger, again)
    assert max(store.puts) <= 2
    assert sum(store.puts) >= 2


async def test_releases_are_deletes_only_and_go_through_on_a_full_etcd_beside_moves_that_do_not() -> None:
    w = world(slots=10)
    store = Writes(w)
    ledger = ledger_on(store)
    permits = await reserved(ledger, 4)
    await apply_together(ledger, opening(permits))
    w.keyspace.full = True
    answers = await apply_together(ledger, [*releases(permits[:3]), Closing(permits[3])])
    assert [type(answer) for answer in answers] == [Applied] * 3 + [Refused]
    assert store.deletes == [6]
    assert len(session_keys(w.keyspace)) == 2


async def test_one_that_somebody_else_moved_is_decided_anew_and_the_others_with_it() -> None:
    w = world(slots=10)
    permits = await reserved(w.ledger, 3)
    await w.another().apply(Unknown(permits[1], abandoned=True))
    answers = await apply_together(w.ledger, opening(permits))
    assert [type(answer) for answer in answers] == [Applied, Refused, Applied]
    assert [answer.code for answer in answers if isinstance(answer, Refused)] == [Code.ABANDONED]


async def test_a_permit_that_is_released_twice_at_once_is_released_once() -> None:
    w = world()
    permits = await reserved(w.ledger, 2)
    answers = await apply_together(w.ledger, releases([permits[0], permits[0], permits[1]]))
    assert sorted(type(answer).__name__ for answer in answers) == ["Applied", "Applied", "Refused"]


@pytest.mark.parametrize("faults", [
    Faults(unknown_applied=1.0), Faults(unknown_not_applied=1.0), Faults(unknown_late=1.0, lands=0.0)])
async def test_moves_without_an_answer_are_unsettled_and_a_repetition_settles_each(faults: Faults) -> None:
    w = world(slots=10)
    store = FaultyStore(w.store, Random(1))
    ledger = ledger_on(store)
    permits = await reserved(ledger, 3)
    store.faults = faults
    answers = await apply_together(ledger, opening(permits))
    assert all(isinstance(each, Refused) and not each.settled for each in answers) or (
        faults.unknown_applied and all(isinstance(each, Applied) for each in answers))
    store.faults = Faults(lands=0.0)
    answers = await apply_together(ledger, opening(permits))
    assert all(isinstance(each, Applied) for each in answers)
    await apply_together(ledger, releases(permits))
    await store.land_late()
    assert session_keys(w.keyspace) == []
