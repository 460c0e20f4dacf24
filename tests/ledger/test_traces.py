"""Ways to break a ledger of sessions, each once found by exploring a design: none may work here.

The numbers are those of the findings; each test is the shortest story that frees a live session, breaks the
budget or loses a slot for ever where the safeguard named in its title is missing.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from coordinator.ledger.ledger import Applied, Granted
from coordinator.ledger.proofs import Awaiting, Look, Proven, Row, proof_of_absence
from coordinator.ledger.record import Kind, LedgerHead, LedgerState, Permit, Receipt
from coordinator.ledger.rules import (
    Closing,
    Code,
    Connecting,
    MarkOwnerGone,
    Open,
    Reassert,
    Refused,
    Release,
    Terminating,
    Unknown,
    Write,
    decide,
    session_of,
)
from coordinator.ledger.states import MOVES, Actor, Proof, SessionState
from coordinator.store.api import Lost, Put, Txn, Won
from coordinator.store.faulty import Faults, FaultyStore
from tests.ledger.ground import (
    BACKEND,
    KEYS,
    NOW_US,
    TAG,
    World,
    ask,
    ledger_on,
    record_exit,
    register,
    session,
    session_keys,
    standing,
    world,
    write,
)

UNKNOWN = session(SessionState.UNKNOWN)
UNBORN = session(SessionState.UNKNOWN, pid=0, backend_start_us=0)


def look(*rows: Row, **changes: object) -> Look:
    base = Look(BACKEND, may_see_all=True, is_node=True, rows=rows, anonymous=frozenset(), at_us=0,
                connection=1, authentication_timeout_seconds=60, is_local=True)
    return replace(base, **changes)  # type: ignore[arg-type]


def row(pid: int, start: int | None, name: str = "app") -> Row:
    return Row(pid, start, "app", "app", name, "idle", "client backend")


async def opened(w: World, request: str = "r1", pid: int = 42) -> Permit:
    permit = (await w.granted(request)).permit
    assert isinstance(await w.ledger.apply(Open(permit, pid, 5_000, BACKEND)), Applied)
    return permit


def refused(answer: object) -> Code:
    assert isinstance(answer, Refused), answer
    return answer.code


def state_of(w: World, permit: Permit) -> SessionState | None:
    stored = standing(w.keyspace, permit)
    return stored.state if stored else None


# 1

def test_1_a_hidden_backend_start_is_not_absence() -> None:
    assert isinstance(proof_of_absence(UNKNOWN, look(row(42, None)), ledger_tag=TAG), Awaiting)


def test_1_a_role_that_may_not_see_proves_nothing() -> None:
    assert isinstance(proof_of_absence(UNKNOWN, look(may_see_all=False), ledger_tag=TAG), Awaiting)


def test_1_a_pid_used_again_by_another_session_is_absence() -> None:
    answer = proof_of_absence(UNKNOWN, look(row(42, 6_000)), ledger_tag=TAG)
    assert isinstance(answer, Proven)
    assert answer.proof is Proof.ABSENT


# 2

def test_2_a_starter_without_a_name_keeps_the_permit_of_a_dead_owner() -> None:
    first = look(anonymous=frozenset({77}))
    later = look(anonymous=frozenset({77}), at_us=121_000_000, connection=2)
    waiting = proof_of_absence(UNBORN, later, ledger_tag=TAG, owner_known_dead=True, first=first)
    named = proof_of_absence(
        UNBORN, look(at_us=121_000_000, connection=2), ledger_tag=TAG, owner_known_dead=True, first=first)
    assert isinstance(waiting, Awaiting)
    assert isinstance(named, Proven)


# 3

def test_3_a_restart_frees_no_permit_without_a_pid() -> None:
    restarted = look(backend=replace(BACKEND, postmaster_start_us=9_000))
    answer = proof_of_absence(UNBORN, restarted, ledger_tag=TAG, owner_known_dead=True)
    assert isinstance(answer, Awaiting)


async def test_3_nor_does_the_ledger_take_restarted_for_one() -> None:
    w = world()
    permit = (await w.granted()).permit
    w.end_lease("A")
    await w.ledger.apply(MarkOwnerGone(permit))
    release = Release(permit, Proof.RESTARTED, Actor.BACKEND_REAPER)
    assert refused(await w.ledger.apply(release)) is Code.UNPROVEN


# 4

async def test_4_nobody_grows_on_a_restored_etcd() -> None:
    w = world()
    empty = w.keyspace.clone()
    for number in range(4):
        await w.granted(f"r{number}")
    w.store.keyspace = empty
    assert refused(await w.ledger.reserve(ask("r9"))) is Code.LEDGER_LOST


async def test_4_nobody_closes_for_a_permit_a_wiped_ledger_has_lost() -> None:
    w = world()
    permit = await opened(w)
    write(w.keyspace, Put(KEYS.ledger(), LedgerHead("other", LedgerState.RECOVERING, TAG).encode()),
          deletes=tuple(session_keys(w.keyspace)))
    assert refused(await w.ledger.apply(Reassert(permit))) is Code.LEDGER_LOST


# 5

async def test_5_a_reset_connection_keeps_its_slot_until_the_server_shows_it_gone() -> None:
    w = world(slots=1)
    permit = await opened(w)
    await w.ledger.apply(Unknown(permit))
    assert refused(await w.ledger.reserve(ask("r2"))) is Code.FULL
    assert isinstance(await w.ledger.apply(Release(permit, Proof.ABSENT, Actor.BACKEND_REAPER)), Applied)
    assert isinstance(await w.ledger.reserve(ask("r3")), Granted)


def test_5_no_owner_frees_a_session_by_anything_but_an_orderly_end() -> None:
    proofs = {proof for move in MOVES for proof in move.proofs if move.actor is Actor.OWNER}
    assert proofs == {Proof.EOF, Proof.UNUSED}


# 6

async def test_6_a_slot_handed_over_in_place_is_another_permit() -> None:
    w = world()
    old = await opened(w)
    slot = w.keyspace.entries[KEYS.session(old.kind, old.slot)]
    heir = session(SessionState.RESERVED, generation=0, slot=old.slot, owner="B", request_id="r2")
    revision = write(w.keyspace, Put(slot.key, heir.encode()),
                     Put(KEYS.receipt("r2"), Receipt(Kind.MAIN, old.slot).encode(), w.leases["B"]))
    now = w.keyspace.entries[slot.key]
    assert now.create_revision == slot.create_revision
    assert session_of(now).permit == Permit(Kind.MAIN, old.slot, revision) != old
    assert refused(await w.ledger.apply(Release(old, Proof.EOF, Actor.OWNER))) is Code.GONE
    assert isinstance(await w.ledger.reserve(ask("r2", "B")), Granted)


def test_6_birth_tags_of_one_revision_differ_by_kind_and_fit() -> None:
    most = 2**63 - 1
    tags = {Permit(kind, 999_999, most).birth_tag(TAG) for kind in (Kind.MAIN, Kind.RESERVE)}
    assert len(tags) == 2
    assert max(map(len, tags)) <= 45


# 7

async def test_7_a_late_closing_never_lands_on_a_permit_that_moved_on() -> None:
    w = world()
    permit = await opened(w)
    store = FaultyStore(w.store, Random(1), Faults(unknown_late=1.0, lands=0.0))
    answer = await ledger_on(store).apply(Closing(permit))
    assert isinstance(answer, Refused)
    assert not answer.settled
    await w.ledger.apply(Unknown(permit))
    await store.land_late()
    assert state_of(w, permit) is SessionState.UNKNOWN


async def test_7_a_late_release_never_frees_the_slots_next_tenant() -> None:
    w = world(slots=1)
    permit = await opened(w)
    await w.ledger.apply(Closing(permit))
    store = FaultyStore(w.store, Random(1), Faults(unknown_late=1.0, lands=0.0))
    await ledger_on(store).apply(Release(permit, Proof.EOF, Actor.OWNER))
    await w.ledger.apply(Release(permit, Proof.EOF, Actor.OWNER))
    tenant = await w.granted("r2")
    await store.land_late()
    assert standing(w.keyspace, tenant.permit) is not None
    assert len(session_keys(w.keyspace)) == 2


# 8

@pytest.mark.parametrize("returns", [False, True])
async def test_8_a_reservation_stuck_in_a_pipe_dies_with_its_owners_registration(returns: bool) -> None:
    w = world()
    store = FaultyStore(w.store, Random(1), Faults(unknown_late=1.0, lands=0.0))
    await ledger_on(store).reserve(ask("r1"))
    w.end_lease("A")
    if returns:
        register(w.keyspace, "A")
    await store.land_late()
    assert session_keys(w.keyspace) == []


# 14

async def test_14_a_session_that_came_back_is_not_marked_for_termination() -> None:
    w = world()
    permit = await opened(w)
    await w.ledger.apply(Unknown(permit))
    seen = w.keyspace.entries[KEYS.session(permit.kind, permit.slot)].mod_revision
    await w.ledger.apply(Reassert(permit))
    await w.ledger.apply(Unknown(permit))
    assert refused(await w.another().apply(Terminating(permit, seen))) is Code.CHANGED


async def test_14_a_session_marked_for_termination_does_not_come_back() -> None:
    w = world()
    permit = await opened(w)
    await w.ledger.apply(Unknown(permit))
    await w.another().apply(Terminating(permit))
    assert refused(await w.ledger.apply(Reassert(permit))) is Code.TERMINATING
    assert isinstance(await w.ledger.apply(Release(permit, Proof.EOF, Actor.OWNER)), Applied)


# 18

async def test_18_an_attempt_its_living_owner_gave_up_can_be_freed() -> None:
    w = world()
    permit = (await w.granted()).permit
    await w.ledger.apply(Connecting(permit))
    release = Release(permit, Proof.NEVER_BORN, Actor.BACKEND_REAPER)
    await w.ledger.apply(Unknown(permit))
    assert refused(await w.another().apply(release)) is Code.UNPROVEN
    await w.ledger.apply(Unknown(permit, abandoned=True))
    assert isinstance(await w.another().apply(release), Applied)


async def test_18_without_a_known_death_never_born_frees_nothing_even_after_a_lost_lease() -> None:
    w = world()
    permit = (await w.granted()).permit
    w.end_lease("A")
    await w.ledger.apply(MarkOwnerGone(permit))
    release = Release(permit, Proof.NEVER_BORN, Actor.BACKEND_REAPER)
    assert refused(await w.ledger.apply(release)) is Code.UNPROVEN
    assert refused(await w.ledger.apply(replace(release, exit_revision=999))) is Code.UNPROVEN
    died = record_exit(w.keyspace, "A")
    assert isinstance(await w.ledger.apply(replace(release, exit_revision=died)), Applied)


# 19

async def test_19_an_unused_reservation_is_given_back() -> None:
    w = world(slots=1)
    permit = (await w.granted("r1")).permit
    assert isinstance(await w.ledger.apply(Release(permit, Proof.UNUSED, Actor.OWNER)), Applied)
    assert isinstance(await w.ledger.reserve(ask("r2")), Granted)


# 20

async def test_20_seats_need_no_counter_and_two_releases_free_two() -> None:
    w = world()
    first, second = await opened(w, "r1"), await opened(w, "r2", pid=43)
    for permit in (first, second):
        await w.ledger.apply(Closing(permit))
    await w.ledger.apply(Release(first, Proof.EOF, Actor.OWNER))
    await w.another().apply(Release(second, Proof.EOF, Actor.OWNER))
    assert session_keys(w.keyspace) == []


# 21

async def test_21_a_mark_issued_before_the_owner_came_back_loses() -> None:
    w = world()
    permit = await opened(w)
    w.end_lease("A")
    entry = w.keyspace.entries[KEYS.session(permit.kind, permit.slot)]
    mark = decide(entry, MarkOwnerGone(permit), KEYS, NOW_US)
    assert isinstance(mark, Write)
    register(w.keyspace, "A")
    assert isinstance(w.keyspace.txn(mark.txn), Lost)


async def test_21_a_permit_written_after_the_sweep_is_marked_by_the_next() -> None:
    w = world()
    late = (await w.granted()).permit
    w.end_lease("A")
    owners = (await w.ledger.snapshot()).workers
    gone = [h.permit for h in (await w.ledger.snapshot()).sessions if h.session.owner not in owners]
    assert gone == [late]
    assert isinstance(await w.ledger.apply(MarkOwnerGone(late)), Applied)


# the owner and both reapers at once

async def test_of_all_who_release_one_permit_exactly_one_wins() -> None:
    w = world()
    permit = await opened(w)
    await w.ledger.apply(Unknown(permit))
    entry = w.keyspace.entries[KEYS.session(permit.kind, permit.slot)]
    writes: list[Txn] = []
    for proof, actor in ((Proof.EOF, Actor.OWNER), (Proof.ABSENT, Actor.BACKEND_REAPER),
                         (Proof.FENCED, Actor.FENCER), (Proof.ATTESTED, Actor.OPERATOR)):
        decision = decide(entry, Release(permit, proof, actor), KEYS, NOW_US)
        assert isinstance(decision, Write)
        writes.append(decision.txn)
    assert sum(isinstance(w.keyspace.txn(txn), Won) for txn in writes) == 1
