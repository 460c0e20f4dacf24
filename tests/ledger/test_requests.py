"""Requests whose answers were lost, given up, repeated after a hello: each is granted once, or voided."""

from __future__ import annotations

from random import Random

import pytest

from coordinator.ledger.ledger import Applied, Granted, Voided
from coordinator.ledger.record import Permit
from coordinator.ledger.rules import Code, Open, Refused, Release
from coordinator.ledger.states import Actor, Proof
from coordinator.store.api import Lost, StoreUnavailable, StoreUnknown, Txn, Won
from coordinator.store.faulty import Faults, FaultyStore
from coordinator.store.memory import MemoryStore
from tests.ledger.ground import BACKEND, KEYS, World, ask, ledger_on, session_keys, standing, world


def refused(answer: object) -> Code:
    assert isinstance(answer, Refused), answer
    return answer.code


async def opened(w: World, request: str) -> Permit:
    permit = (await w.granted(request)).permit
    assert isinstance(await w.ledger.apply(Open(permit, 42, 5_000, BACKEND)), Applied)
    return permit


@pytest.mark.parametrize("faults", [
    Faults(unknown_applied=1.0), Faults(unknown_not_applied=1.0), Faults(unknown_late=1.0, lands=0.0)])
async def test_a_request_never_answered_says_that_it_is_not_settled(faults: Faults) -> None:
    w = world()
    store = FaultyStore(w.store, Random(1), faults)
    answer = await ledger_on(store).reserve(ask("r1"))
    assert isinstance(answer, Refused)
    assert (answer.code, answer.settled) == (Code.LEDGER_UNAVAILABLE, False)
    store.faults = Faults(lands=0.0)
    granted = await ledger_on(store).reserve(ask("r1"))
    assert isinstance(granted, Granted)
    await store.land_late()
    assert len(session_keys(w.keyspace)) == 2


async def test_a_store_that_refuses_leaves_nothing_unsettled() -> None:
    w = world()
    store = FaultyStore(w.store, Random(1))
    store.down = True
    answer = await ledger_on(store).reserve(ask("r1"))
    assert answer == Refused(Code.LEDGER_UNAVAILABLE, "injected: the store refuses")


async def test_one_unknown_outcome_is_settled_by_the_same_compare() -> None:
    for how in ("unknown_applied", "unknown_not_applied"):
        w = world()
        store = OnceUnknown(w.store, how)
        answer = await ledger_on(store).reserve(ask("r1"))
        assert isinstance(answer, Granted)
        assert len(session_keys(w.keyspace)) == 2


class OnceUnknown(FaultyStore):
    """The first write has an unknown outcome, the others are answered."""

    def __init__(self, store: MemoryStore, how: str) -> None:
        super().__init__(store, Random(1), Faults(**{how: 1.0}))

    async def txn(self, txn: Txn) -> Won | Lost:
        try:
            return await super().txn(txn)
        except StoreUnknown:
            self.faults = Faults()
            raise


async def test_a_void_keeps_a_late_reservation_from_taking_anything() -> None:
    w = world()
    store = FaultyStore(w.store, Random(1), Faults(unknown_late=1.0, lands=0.0))
    ledger = ledger_on(store)
    await ledger.reserve(ask("r1"))
    store.faults = Faults(lands=0.0)
    assert await ledger.void("r1", "A") == Voided(None)
    await store.land_late()
    assert session_keys(w.keyspace) == []
    assert refused(await ledger.reserve(ask("r1"))) is Code.VOIDED


async def test_a_void_gives_back_what_the_request_had_taken() -> None:
    w = world()
    granted = await w.granted("r1")
    assert await w.another().void("r1", "A") == Voided(granted.permit)
    assert session_keys(w.keyspace) == []
    assert await w.another().void("r1", "A") == Voided(None)


async def test_a_void_of_an_owner_without_a_key_is_settled_as_it_is() -> None:
    w = world()
    w.end_lease("A")
    assert await w.ledger.void("r1", "A") == Voided(None)


async def test_a_void_that_gets_no_answer_is_not_settled() -> None:
    w = world()
    store = FaultyStore(w.store, Random(1), Faults(unknown_applied=1.0))
    answer = await ledger_on(store).void("r1", "A")
    assert isinstance(answer, Refused)
    assert not answer.settled


async def test_forgotten_receipts_are_gone_and_late_reservations_of_before_lose() -> None:
    w = world()
    granted = await w.granted("r1")
    store = FaultyStore(w.store, Random(1), Faults(unknown_late=1.0, lands=0.0))
    await ledger_on(store).reserve(ask("r2"))
    await w.ledger.apply(Release(granted.permit, Proof.UNUSED, Actor.OWNER))
    assert await w.ledger.forget("A", ["r1"])
    assert KEYS.receipt("r1") not in w.keyspace.entries
    await store.land_late()
    assert session_keys(w.keyspace) == []
    assert isinstance(await w.ledger.reserve(ask("r3")), Granted)


async def test_a_later_refusal_does_not_settle_an_earlier_unknown_attempt() -> None:
    w = world(slots=1)
    store = FaultyStore(w.store, Random(1), Faults(unknown_late=1.0, lands=0.0))
    ledger = ledger_on(store)
    await ledger.reserve(ask("r1"))
    store.faults = Faults(lands=0.0)
    other = await w.granted("r2", owner="B")
    answer = await ledger.reserve(ask("r1"))
    assert isinstance(answer, Refused)
    assert (answer.code, answer.settled) == (Code.FULL, False)
    await w.ledger.apply(Release(other.permit, Proof.UNUSED, Actor.OWNER))
    assert await ledger.void("r1", "A") == Voided(None)
    await store.land_late()
    assert session_keys(w.keyspace) == []


async def test_what_a_worker_does_not_list_at_hello_is_given_back_but_never_an_open_session() -> None:
    w = world()
    session, mine = await opened(w, "r1"), (await w.granted("r2")).permit
    unheard, others = (await w.granted("r3")).permit, (await w.granted("r4", owner="B")).permit
    assert await w.ledger.free_unlisted("A", [mine]) == [unheard]
    assert [standing(w.keyspace, permit) is None for permit in (session, mine, unheard, others)] == [
        False, False, True, False]


async def test_a_hello_that_could_not_give_everything_back_is_not_answered() -> None:
    w = world()
    await w.granted("r1")
    store = FaultyStore(w.store, Random(1), Faults(unknown_not_applied=1.0))
    with pytest.raises(StoreUnavailable):
        await ledger_on(store).free_unlisted("A", [])
