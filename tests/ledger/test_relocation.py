"""A session goes on in another slot: one transaction, never a second permit of its name, never two slots."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ledger.invariants import check_ledger
from coordinator.ledger.ledger import Applied, Granted
from coordinator.ledger.limits import Limits
from coordinator.ledger.record import (
    Alias,
    Epoch,
    EpochState,
    Kind,
    LedgerHead,
    LedgerState,
    Permit,
    Session,
    Worker,
)
from coordinator.ledger.relocation import Excess, find_excess
from coordinator.ledger.rules import (
    Closing,
    Code,
    Open,
    Refused,
    Release,
    Relocate,
    Unknown,
    Write,
    decide,
)
from coordinator.ledger.snapshot import Held, LedgerSnapshot, Registered
from coordinator.ledger.states import Actor, Proof, SessionState
from coordinator.store.api import Put, absent, unchanged
from coordinator.store.faulty import FaultyStore
from tests.ledger.ground import (
    BACKEND,
    KEYS,
    NOW_US,
    TAG,
    World,
    ask,
    entry_of,
    ledger_on,
    session,
    session_keys,
    world,
    write,
)

S = SessionState
MAIN, RESERVE, REPLICATION, ADMIN = Kind.MAIN, Kind.RESERVE, Kind.REPLICATION, Kind.ADMIN


def relocated(stored: Session, kind: Kind, slot: int) -> Write | Refused:
    decision = decide(entry_of(stored), Relocate(stored.permit, kind, slot, 3), KEYS, NOW_US)
    assert isinstance(decision, Write | Refused)
    return decision


# ---- the transaction


def test_a_move_puts_the_low_slot_and_its_seat_and_deletes_the_high_one_at_once() -> None:
    stored = session(slot=7, generation=5, seat=2)
    decision = relocated(stored, MAIN, 3)
    assert isinstance(decision, Write)
    low, seat = KEYS.session(MAIN, 3), KEYS.seat("app", "app", 2)
    assert decision.txn.compares == (
        unchanged(KEYS.session(MAIN, 7), 9), absent(low), unchanged(KEYS.ledger(), 3))
    assert [put.key for put in decision.txn.puts] == [low, seat]
    assert decision.txn.deletes == (KEYS.session(MAIN, 7),)


def test_it_keeps_its_generation_and_says_where_it_came_from() -> None:
    stored = session(slot=7, generation=5)
    decision = relocated(stored, MAIN, 3)
    assert isinstance(decision, Write)
    moved = Session.decode(decision.txn.puts[0].value)
    assert moved == replace(stored, slot=3, left_slots=("main/7",))
    assert moved.permit == Permit(MAIN, 3, 5)
    assert moved.former_permits == (Permit(MAIN, 7, 5),)
    again = relocated(moved, MAIN, 1)
    assert isinstance(again, Write)
    assert Session.decode(again.txn.puts[0].value).former_permits == (Permit(MAIN, 7, 5), Permit(MAIN, 3, 5))
    assert stored.former_permits == ()


def test_a_reserve_session_goes_to_any_main_slot() -> None:
    stored = session(kind=RESERVE, slot=0, seat=-1)
    decision = relocated(stored, MAIN, 6)
    assert isinstance(decision, Write)
    assert decision.session is not None
    assert decision.session.permit == Permit(MAIN, 6, 7)
    assert decision.session.former_permits == (Permit(RESERVE, 0, 7),)


@pytest.mark.parametrize(("kind", "slot", "target"), [
    (MAIN, 3, (MAIN, 3)), (MAIN, 3, (MAIN, 4)), (MAIN, 3, (RESERVE, 0)), (RESERVE, 3, (RESERVE, 3)),
    (MAIN, 3, (ADMIN, 0)), (ADMIN, 0, (MAIN, 3))])
def test_it_never_goes_up_or_to_another_kind(kind: Kind, slot: int, target: tuple[Kind, int]) -> None:
    decision = relocated(session(kind=kind, slot=slot), *target)
    assert isinstance(decision, Refused)
    assert decision.code is Code.ILLEGAL


@pytest.mark.parametrize("kind", [MAIN, RESERVE])
def test_it_never_goes_into_a_slot_that_was_granted_with_it(kind: Kind) -> None:
    stored = session(kind=kind, slot=7, siblings=(3, 5))
    for slot in (3, 5):
        decision = relocated(stored, MAIN, slot)
        assert isinstance(decision, Refused)
        assert decision.code is Code.ILLEGAL
    assert isinstance(relocated(stored, MAIN, 2), Write)


@pytest.mark.parametrize("state", [S.RESERVED, S.CONNECTING, S.CLOSING, S.UNKNOWN])
def test_only_an_open_session_goes(state: SessionState) -> None:
    decision = relocated(session(state, slot=7), MAIN, 3)
    assert isinstance(decision, Refused)
    assert decision.code is Code.ILLEGAL


# ---- the ledger


async def opened(w: World, slot: int, request: str = "", owner: str = "A") -> Granted:
    """An open session in that slot, all lower ones being held meanwhile."""
    below = [KEYS.session(MAIN, each) for each in range(slot)]
    missing = [key for key in below if key not in w.keyspace.entries]
    write(w.keyspace, *(Put(key, session().encode()) for key in missing))
    ledger = w.another()
    granted = await ledger.reserve(ask(request or f"r{slot}", owner))
    assert isinstance(granted, Granted), granted
    assert granted.permit.slot == slot
    assert isinstance(await ledger.apply(Open(granted.permit, 100 + slot, 5_000, BACKEND)), Applied)
    write(w.keyspace, deletes=tuple(missing))
    return granted


async def move(w: World, permit: Permit, slot: int) -> Applied | Refused:
    return await w.ledger.apply(Relocate(permit, MAIN, slot, head_revision(w)))


def head_revision(w: World) -> int:
    return w.keyspace.entries[KEYS.ledger()].mod_revision


async def slots(w: World) -> list[int]:
    return [held.session.slot for held in (await w.ledger.snapshot()).sessions]


async def test_a_session_moves_with_its_seat_and_the_ledger_stays_balanced() -> None:
    w = world()
    granted = await opened(w, 3)
    applied = await move(w, granted.permit, 1)
    assert isinstance(applied, Applied)
    assert applied.session is not None
    assert applied.session.permit == Permit(MAIN, 1, granted.permit.generation)
    assert await slots(w) == [1]
    assert check_ledger(await w.ledger.snapshot(), KEYS) == []
    gone = await w.ledger.apply(Release(applied.session.permit, Proof.EOF, Actor.OWNER))
    assert isinstance(gone, Applied)
    assert session_keys(w.keyspace) == []


async def test_a_slot_that_somebody_took_is_not_written_over() -> None:
    w = world()
    high = await opened(w, 3)
    low = await opened(w, 1)
    refused = await move(w, high.permit, 1)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.settled) == (Code.CHANGED, True)
    snapshot = await w.ledger.snapshot()
    assert {held.permit for held in snapshot.sessions} == {high.permit, low.permit}


async def test_a_session_that_began_to_close_stays_where_it_is() -> None:
    w = world()
    granted = await opened(w, 3)
    await w.another().apply(Closing(granted.permit))
    refused = await move(w, granted.permit, 1)
    assert isinstance(refused, Refused)
    assert refused.code is Code.ILLEGAL
    assert await slots(w) == [3]


async def test_nothing_moves_in_a_ledger_that_is_another_by_then() -> None:
    w = world()
    granted = await opened(w, 3)
    before = head_revision(w)
    write(w.keyspace, Put(KEYS.ledger(), LedgerHead("first", LedgerState.RECOVERING, TAG).encode()))
    refused = await w.ledger.apply(Relocate(granted.permit, MAIN, 1, before))
    assert isinstance(refused, Refused)
    assert refused.code is Code.CHANGED
    assert await slots(w) == [3]


@pytest.mark.parametrize("command", [
    lambda permit: Release(permit, Proof.EOF, Actor.OWNER), Closing, Unknown,
    lambda permit: Open(permit, 103, 5_000, BACKEND)])
@pytest.mark.parametrize("to", [(1,), (2, 1), (2, 1, 0)])
async def test_what_a_worker_says_of_a_session_by_its_old_permit_is_done_to_the_session(
    command: Any, to: tuple[int, ...]
) -> None:
    w = world()
    granted = await opened(w, 3)
    permit = granted.permit
    for slot in to:
        assert isinstance(await move(w, permit, slot), Applied)
        permit = replace(permit, slot=slot)
    said, moved = await w.another().apply_for("A", command(granted.permit))
    assert isinstance(said, Applied)
    assert moved is not None
    assert moved.permit == permit
    assert said.session is None or said.session.slot == to[-1]
    assert await slots(w) == ([] if said.session is None else [to[-1]])


async def test_only_its_own_worker_reaches_a_session_by_its_old_permit() -> None:
    w = world()
    granted = await opened(w, 3)
    await move(w, granted.permit, 1)
    by_another, moved = await w.ledger.apply_for("B", Closing(granted.permit))
    assert moved is None
    for refused in (by_another, await w.ledger.apply(Closing(granted.permit))):
        assert isinstance(refused, Refused)
        assert refused.code is Code.GONE


async def test_the_slot_a_session_left_is_granted_to_another_which_nobody_takes_for_it() -> None:
    w = world()
    granted = await opened(w, 3)
    await move(w, granted.permit, 0)
    for slot in (1, 2):
        await opened(w, slot)
    another = await opened(w, 3, "again")
    released, _ = await w.ledger.apply_for("A", Release(granted.permit, Proof.EOF, Actor.OWNER))
    assert isinstance(released, Applied)
    assert {held.permit for held in (await w.ledger.snapshot()).sessions} >= {another.permit}
    assert await slots(w) == [1, 2, 3]


@pytest.mark.parametrize("seed", range(60))
async def test_a_move_whose_outcome_is_unknown_leaves_one_session_and_is_settled_by_a_look(seed: int) -> None:
    w = world()
    granted = await opened(w, 3)
    broken = FaultyStore(w.store, Random(seed))
    broken.faults = replace(broken.faults, unknown_applied=0.3, unknown_not_applied=0.3, unknown_late=0.3)
    ledger = ledger_on(broken)
    for slot in (2, 1, 0):  # each time by what a look shows
        snapshot = await w.another().snapshot()
        here = snapshot.sessions[0].session
        if here.slot > slot:
            await ledger.apply(Relocate(here.permit, MAIN, slot, snapshot.head_revision))
        assert len(await slots(w)) == 1
    await broken.land_late()
    held, = (await w.another().snapshot()).sessions
    assert held.permit.generation == granted.permit.generation
    assert check_ledger(await w.another().snapshot(), KEYS) == []
    released, _ = await w.another().apply_for("A", Release(held.permit, Proof.EOF, Actor.OWNER))
    assert isinstance(released, Applied)
    assert session_keys(w.keyspace) == []

async def test_a_worker_that_lists_the_old_permit_keeps_the_session() -> None:
    w = world()
    granted = await opened(w, 3)
    await move(w, granted.permit, 1)
    await w.ledger.apply(Unknown(Permit(MAIN, 1, granted.permit.generation)))
    assert await w.another().free_unlisted("A", [granted.permit]) == []
    assert await slots(w) == [1]


# ---- which go where


def snapshot_of(
    *sessions: Session, limits: Limits | None, failover: bool = False, **changes: Any
) -> LedgerSnapshot:
    worker = Worker("A", 0, 1, "host", "machine", "kernel", 100, 200)
    values: dict[str, Any] = {
        "head": LedgerHead("first", LedgerState.ACTIVE, TAG), "head_revision": 3, "alias": Alias(1),
        "epoch": Epoch(1, EpochState.ACTIVE, BACKEND, 0, "test", failover=failover),
        "sessions": tuple(Held(each, 9) for each in sessions), "limits": {1: limits} if limits else {},
        "workers": {"A": Registered(worker, 4, 5)}}
    return LedgerSnapshot(revision=10, **(values | changes))


def main(*slots: int, **changes: Any) -> list[Session]:
    return [session(slot=slot, generation=20 + slot, seat=slot, **changes) for slot in slots]


def as_slots(excess: Excess) -> tuple[dict[int, int], list[int]]:
    assert all(each.permit == moved.permit for each, moved in excess.moves)
    return ({each.slot: moved.slot for each, moved in excess.moves},
            [each.slot for each in excess.given_up])


def test_high_sessions_go_to_the_lowest_free_slots_and_what_finds_none_is_given_up() -> None:
    found = find_excess(snapshot_of(*main(0, 2, 4, 5, 8, 9), limits=Limits(4)))
    assert as_slots(found) == ({4: 1, 5: 3}, [8, 9])


def test_nothing_is_high_while_a_larger_policy_grants_too() -> None:
    sessions = main(0, 5)
    both = snapshot_of(*sessions, limits=Limits(4), alias=Alias(1, shadow=2, takeover_fraction=0.1))
    assert as_slots(find_excess(replace(both, limits={1: Limits(4), 2: Limits(6)}))) == ({}, [])
    assert as_slots(find_excess(replace(both, limits={1: Limits(4), 2: Limits(5)}))) == ({5: 1}, [])


def test_slots_of_a_failover_are_left_once_it_is_over() -> None:
    sessions, limits = main(0, 1, 3), Limits(4, failover=1)
    assert as_slots(find_excess(snapshot_of(*sessions, limits=limits, failover=True))) == ({}, [])
    assert as_slots(find_excess(snapshot_of(*sessions, limits=limits))) == ({3: 2}, [])


def test_what_is_being_opened_or_on_its_way_out_is_left_alone_and_keeps_its_slot() -> None:
    others = [session(state, slot=slot, generation=30 + slot, seat=slot) for slot, state in enumerate(
        (S.RESERVED, S.CLOSING, S.UNKNOWN, S.CONNECTING), start=1)]
    high = [replace(each, slot=each.slot + 10) for each in others]
    assert as_slots(find_excess(snapshot_of(*others, *main(9), *high, limits=Limits(6)))) == ({9: 0}, [])


def test_who_is_not_registered_takes_no_slot_from_those_who_are() -> None:
    found = find_excess(snapshot_of(*main(5, owner="dead"), *main(6), limits=Limits(1)))
    assert as_slots(found) == ({6: 0}, [])


def test_a_sibling_of_the_free_slot_takes_the_next() -> None:
    found = find_excess(snapshot_of(*main(6, siblings=(0,)), *main(7), limits=Limits(2)))
    assert as_slots(found) == ({6: 1, 7: 0}, [])


def test_who_may_go_to_few_slots_chooses_before_those_who_may_go_to_all() -> None:
    found = find_excess(snapshot_of(*main(6), *main(7, siblings=(9,)), limits=Limits(2)))
    assert as_slots(found) == ({7: 0, 6: 1}, [])


def test_replication_connections_move_and_are_never_given_up_and_those_of_commands_stay() -> None:
    replication = [replace(each, kind=REPLICATION) for each in main(3, 4)]
    admin = [replace(each, kind=ADMIN) for each in main(3)]
    found = find_excess(snapshot_of(*replication, *admin, limits=Limits(4, admin=1, replication=1)))
    assert as_slots(found) == ({3: 0}, [])


@pytest.mark.parametrize("missing", [
    {"head": None}, {"head": LedgerHead("first", LedgerState.RECOVERING, TAG)}, {"epoch": None},
    {"alias": None}, {"limits": None}])
def test_nothing_moves_while_the_ledger_is_not_whole(missing: dict[str, Any]) -> None:
    assert find_excess(snapshot_of(*main(9), **({"limits": Limits(4)} | missing))) == Excess()


@given(st.sets(st.integers(0, 15)), st.integers(0, 16), st.integers(0, 4))
def test_every_high_session_is_moved_or_given_up_and_what_is_left_fits(
    held: set[int], n: int, failover: int
) -> None:
    kept = min(failover, n)
    moves, given_up = as_slots(find_excess(snapshot_of(*main(*held), limits=Limits(n, failover=kept))))
    low = {slot for slot in held if slot < n - kept}
    assert moves.keys() | set(given_up) == held - low
    assert len(set(moves.values())) == len(moves)
    assert low.isdisjoint(moves.values())
    assert all(slot < n - kept for slot in moves.values())
    assert not given_up or len(low) + len(moves) == n - kept
