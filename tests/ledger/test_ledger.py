"""The ledger's shell: answers of docs/link.md, repeated requests, unknown outcomes, a lost ledger."""

from __future__ import annotations

from random import Random

import pytest
import trio

from coordinator.ledger.access import Memory, Seen
from coordinator.ledger.homes import Home
from coordinator.ledger.ledger import Applied, Granted, Ledger
from coordinator.ledger.record import Alias, EpochState, Kind, LedgerHead, LedgerState, Permit
from coordinator.ledger.reservation import WINDOW
from coordinator.ledger.rules import (
    Closing,
    Code,
    Connecting,
    MarkOwnerGone,
    Open,
    Refused,
    Release,
    Unknown,
)
from coordinator.ledger.states import Actor, Proof, SessionState
from coordinator.store.api import Lost, Put, StoreUnavailable, Txn, Won
from coordinator.store.faulty import FaultyStore
from coordinator.store.memory import Keyspace, MemoryStore
from tests.ledger.ground import (
    BACKEND,
    KEYS,
    TAG,
    World,
    ask,
    epoch,
    found,
    ledger_on,
    policy,
    register,
    session_keys,
    standing,
    world,
    write,
)


def refused(answer: object) -> Code:
    assert isinstance(answer, Refused), answer
    return answer.code


async def test_a_grant_names_what_a_worker_needs_to_connect() -> None:
    w = world()
    granted = await w.granted()
    receipt = w.keyspace.entries[KEYS.receipt("r1")]
    assert granted.permit == Permit(Kind.MAIN, 0, receipt.create_revision)
    assert (granted.epoch, granted.address, granted.tag) == (1, BACKEND.address, TAG)
    stored = standing(w.keyspace, granted.permit)
    assert stored is not None
    assert stored.permit == granted.permit
    assert stored.backend == BACKEND


async def test_a_repeated_request_gets_the_same_answer_and_takes_nothing() -> None:
    w = world()
    first = await w.granted()
    before = session_keys(w.keyspace)
    assert await w.granted() == first
    assert await w.another().reserve(ask("r1")) == first
    assert session_keys(w.keyspace) == before


async def test_a_repeated_request_of_a_permit_that_is_over_takes_nothing() -> None:
    w = world()
    granted = await w.granted()
    await w.ledger.apply(Release(granted.permit, Proof.UNUSED, Actor.OWNER))
    assert refused(await w.ledger.reserve(ask("r1"))) is Code.VOIDED
    assert session_keys(w.keyspace) == []


async def test_full_seats_full_and_draining_are_told_apart() -> None:
    w = world(slots=2)
    await w.granted("r1", seats=1)
    assert refused(await w.ledger.reserve(ask("r2", seats=1))) is Code.SEATS_FULL
    await w.granted("r3", user="other")
    assert refused(await w.ledger.reserve(ask("r4", user="third"))) is Code.FULL
    write(w.keyspace, Put(KEYS.epoch(), epoch(1, EpochState.DRAINING)))
    assert refused(await w.ledger.reserve(ask("r5"))) is Code.DRAINING


async def test_a_slot_freed_by_somebody_else_is_found() -> None:
    w = world(slots=1)
    granted = await w.granted("r1")
    assert refused(await w.ledger.reserve(ask("r2"))) is Code.FULL
    await w.another().apply(Release(granted.permit, Proof.UNUSED, Actor.OWNER))
    assert (await w.granted("r2")).permit.slot == 0


async def test_a_slot_beyond_the_first_window_is_found() -> None:
    w = world(slots=3 * WINDOW)
    taken = [Put(KEYS.session(Kind.MAIN, slot), b"") for slot in range(2 * WINDOW)]
    for i in range(0, len(taken), 100):
        write(w.keyspace, *taken[i : i + 100])
    assert (await w.granted("r1")).permit.slot == 2 * WINDOW


async def test_coordinators_start_from_their_own_homes() -> None:
    w = world(slots=200)
    other = w.another(home=Home(3, 4))
    await w.granted("r1")
    answer = await other.reserve(ask("r2"))
    assert isinstance(answer, Granted)
    assert answer.permit.slot == 150


async def test_reservations_at_the_same_time_share_no_slot_and_none_loses() -> None:
    w = world(slots=30)
    granted: list[Granted] = []

    async def one(number: int) -> None:
        granted.append(await w.granted(f"r{number}"))

    async with trio.open_nursery() as nursery:
        for number in range(30):
            nursery.start_soon(one, number)
    assert {each.permit.slot for each in granted} == set(range(30))


async def test_two_coordinators_never_share_a_slot() -> None:
    w = world(slots=10)
    answers: list[Granted | Refused] = []

    async def one(ledger: Ledger, number: int) -> None:
        answers.append(await ledger.reserve(ask(f"r{number}", "AB"[number % 2])))

    ledgers = [w.ledger, w.another()]
    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(one, ledgers[number % 2], number)
    granted = [each.permit.slot for each in answers if isinstance(each, Granted)]
    assert sorted(granted) == sorted(set(granted))
    assert len(session_keys(w.keyspace)) == 2 * len(granted)


async def opened(w: World, request: str = "r1") -> Permit:
    permit = (await w.granted(request)).permit
    assert isinstance(await w.ledger.apply(Connecting(permit)), Applied)
    assert isinstance(await w.ledger.apply(Open(permit, 42, 5_000, BACKEND)), Applied)
    return permit


async def test_a_session_goes_through_its_life_and_leaves_nothing() -> None:
    w = world()
    permit = await opened(w)
    assert isinstance(await w.ledger.apply(Closing(permit)), Applied)
    answer = await w.ledger.apply(Release(permit, Proof.EOF, Actor.OWNER))
    assert isinstance(answer, Applied)
    assert (answer.session, answer.changed) == (None, True)
    assert session_keys(w.keyspace) == []


async def test_an_owners_life_costs_one_request_a_step() -> None:
    w = world()
    await opened(w, "r0")
    counted = CountingStore(w.store)
    ledger = ledger_on(counted)
    first = await ledger.reserve(ask("r1"))
    assert isinstance(first, Granted)
    counted.requests = 0
    second = await ledger.reserve(ask("r2"))
    assert isinstance(second, Granted)
    await ledger.apply(Connecting(second.permit))
    await ledger.apply(Open(second.permit, 42, 5_000, BACKEND))
    await ledger.apply(Closing(second.permit))
    await ledger.apply(Release(second.permit, Proof.EOF, Actor.OWNER))
    assert counted.requests == 5


class CountingStore(FaultyStore):
    """Counts transactions."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store, Random(1))
        self.requests = 0

    async def txn(self, txn: Txn) -> Won | Lost:
        self.requests += 1
        return await super().txn(txn)


async def test_a_second_release_changes_nothing_and_says_so() -> None:
    w = world()
    permit = await opened(w)
    await w.ledger.apply(Closing(permit))
    release = Release(permit, Proof.EOF, Actor.OWNER)
    await w.ledger.apply(release)
    tenant = await w.granted("r2")
    before = dict(w.keyspace.entries)
    assert tenant.permit.slot == permit.slot
    assert refused(await w.ledger.apply(release)) is Code.GONE
    assert w.keyspace.entries == before


async def test_what_is_remembered_never_decides_against_what_stands() -> None:
    w = world()
    permit = await opened(w)
    w.end_lease("A")
    await w.another().apply(MarkOwnerGone(permit))
    answer = await w.ledger.apply(Open(permit, 42, 5_000, BACKEND))
    assert isinstance(answer, Applied)
    assert answer.changed
    stored = standing(w.keyspace, permit)
    assert stored is not None
    assert stored.state is SessionState.OPEN


async def test_the_owner_reaper_loses_against_an_owner_with_a_key() -> None:
    w = world()
    permit = await opened(w)
    assert refused(await w.another().apply(MarkOwnerGone(permit))) is Code.OWNER_LIVES


async def test_another_incarnation_is_a_lost_ledger_and_a_missing_permit_proves_nothing() -> None:
    w = world()
    permit = await opened(w)
    write(w.keyspace, Put(KEYS.ledger(), LedgerHead("second", LedgerState.ACTIVE, TAG).encode()),
          deletes=tuple(session_keys(w.keyspace)))
    assert refused(await w.ledger.apply(Unknown(permit))) is Code.LEDGER_LOST
    assert w.ledger.lost
    assert refused(await w.ledger.reserve(ask("r2"))) is Code.LEDGER_LOST


async def test_a_revision_that_went_back_is_a_lost_ledger_even_in_the_next_life() -> None:
    w = world()
    old = w.keyspace.clone()
    for number in range(4):
        await w.granted(f"r{number}")
    restored = MemoryStore(old)
    ledger = ledger_on(restored, memory=Memory(w.ledger.seen))
    assert refused(await ledger.reserve(ask("r9"))) is Code.LEDGER_LOST
    assert ledger.lost


async def test_a_wiped_prefix_is_a_lost_ledger() -> None:
    w = world()
    await w.granted()
    emptied = Keyspace()
    emptied.revision = w.keyspace.revision + 10
    register(emptied, "A")
    ledger = ledger_on(MemoryStore(emptied), memory=Memory(w.ledger.seen))
    assert refused(await ledger.reserve(ask("r9"))) is Code.LEDGER_LOST


async def test_what_was_seen_is_told_for_the_next_life() -> None:
    w = world()
    granted = await w.granted()
    assert w.ledger.seen == Seen("first", granted.mod_revision)


async def test_a_full_etcd_still_lets_sessions_end() -> None:
    w = world()
    permit = await opened(w)
    await w.ledger.apply(Closing(permit))
    w.keyspace.full = True
    assert refused(await w.ledger.reserve(ask("r2"))) is Code.LEDGER_UNAVAILABLE
    assert isinstance(await w.ledger.apply(Release(permit, Proof.EOF, Actor.OWNER)), Applied)


async def test_who_finds_etcd_full_is_told_that_and_not_that_it_does_not_answer() -> None:
    w = world()
    permit = await opened(w)
    w.keyspace.full = True
    for answer in (await w.ledger.reserve(ask("r2")), await w.ledger.apply(Closing(permit))):
        assert isinstance(answer, Refused)
        assert "NOSPACE" in answer.detail


async def test_a_changed_policy_is_noticed_by_the_next_reservation() -> None:
    w = world(slots=1)
    await w.granted("r1")
    await w.granted("r2", kind=Kind.ADMIN, seats=0)
    write(w.keyspace, Put(KEYS.policy(2), policy(3)), Put(KEYS.alias(), Alias(2).encode()))
    assert (await w.granted("r3")).permit.slot == 1


async def test_the_snapshot_shows_everything_at_one_revision() -> None:
    w = world()
    permit = await opened(w)
    snapshot = await w.ledger.snapshot()
    assert snapshot.revision == w.keyspace.revision
    assert [held.permit for held in snapshot.sessions] == [permit]
    assert snapshot.find(permit) is not None
    assert set(snapshot.workers) == {"A", "B"}
    assert [given.request_id for given in snapshot.receipts] == ["r1"]
    assert snapshot.receipts[0].generation == permit.generation
    assert snapshot.active_limits is not None
    assert snapshot.active_limits.main == 4
    assert snapshot.head is not None
    assert snapshot.epoch is not None
    assert len(snapshot.of_owner("A")) == len(snapshot.seats) == 1


async def test_a_snapshot_of_a_store_that_is_away_is_an_error_not_an_empty_ledger() -> None:
    store = FaultyStore(MemoryStore(found()), Random(1))
    store.down = True
    with pytest.raises(StoreUnavailable):
        await ledger_on(store).snapshot()
