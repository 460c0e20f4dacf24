"""decide: every row of the state table is reached by it, and nothing outside the table ever is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ledger.record import Permit, Session
from coordinator.ledger.rules import (
    Already,
    Closing,
    Code,
    Command,
    Connecting,
    Decision,
    MarkOwnerGone,
    Open,
    Reassert,
    Refused,
    Release,
    Relocate,
    Terminating,
    Unknown,
    Write,
    decide,
    session_of,
)
from coordinator.ledger.states import HELD, MOVES, Actor, Move, Proof, SessionState, find_move
from coordinator.store.api import Entry, absent, unchanged
from tests.ledger.ground import BACKEND, KEYS, NOW_US, entry_of, session

S = SessionState
PERMIT = session().permit


def commands(permit: Permit = PERMIT) -> Iterator[Command]:
    """Every command, with every flag, actor and proof."""
    yield Connecting(permit)
    yield from (Open(permit, pid, 5_000, BACKEND) for pid in (42, 43))
    yield Closing(permit)
    yield from (Unknown(permit, abandoned) for abandoned in (False, True))
    yield MarkOwnerGone(permit, "t1")
    yield from (Reassert(permit, closing) for closing in (False, True))
    yield from (Terminating(permit, seen) for seen in (0, 9, 8))
    yield from (Release(permit, proof, actor, "look", seen, died) for proof, actor, seen, died in
                product(Proof, Actor, (0, 9, 8), (0, 5)))


def sessions(slot: int = 0) -> Iterator[Session]:
    """Every held state, born or not, with every flag."""
    for state, pid, abandoned, terminating in product(sorted(HELD), (0, 42), (False, True), (False, True)):
        yield session(state, slot=slot, pid=pid, backend_start_us=5_000 if pid else 0,
                      abandoned=abandoned, terminating=terminating)


def on(stored: Session, command: Command) -> Decision:
    return decide(entry_of(stored), command, KEYS, NOW_US)


def actor_of(command: Command) -> Actor:
    match command:
        case Release():
            return command.actor
        case MarkOwnerGone():
            return Actor.OWNER_REAPER
        case Terminating():
            return Actor.BACKEND_REAPER
        case _:
            return Actor.OWNER


def move_of(stored: Session, command: Command, write: Write) -> tuple[Move, Proof | None]:
    target = write.session.state if write.session else S.RELEASED
    proof = command.proof if isinstance(command, Release) else None
    return find_move(stored.state, target, actor_of(command), proof), proof


def test_every_row_and_every_proof_of_the_table_is_reached_and_nothing_else() -> None:
    reached: set[tuple[Move, Proof | None]] = set()
    lower = Relocate(session(slot=3).permit, session().kind, 1, 5)
    for stored, command in (*product(sessions(), commands()), *product(sessions(slot=3), (lower,))):
        decision = on(stored, command)
        if isinstance(decision, Write):
            reached.add(move_of(stored, command, decision))
    expected = {(move, proof) for move in MOVES for proof in (move.proofs or {None})}
    assert reached == expected


@given(st.sampled_from(list(sessions())), st.sampled_from(list(commands())))
def test_every_write_compares_the_slot_as_it_was_read(stored: Session, command: Command) -> None:
    decision = on(stored, command)
    if isinstance(decision, Write):
        entry = entry_of(stored)
        assert unchanged(entry.key, entry.mod_revision) in decision.txn.compares
        assert all(not put.lease for put in decision.txn.puts)


@given(st.lists(st.sampled_from(list(commands())), max_size=12), st.sampled_from(list(sessions())))
def test_chains_of_commands_keep_identity_and_end_at_the_first_release(
    chain: list[Command], stored: Session
) -> None:
    entry: Entry | None = entry_of(stored)
    for command in chain:
        decision = decide(entry, command, KEYS, NOW_US)
        if entry is None:
            assert decision == Refused(Code.GONE)
        elif isinstance(decision, Write):
            assert decision.session is None or decision.session.permit == stored.permit
            revision = entry.mod_revision + 1
            entry = entry_of(decision.session, revision) if decision.session else None


@given(st.sampled_from(list(sessions())), st.sampled_from(list(commands(Permit(PERMIT.kind, 0, 8)))))
def test_a_permit_of_another_generation_is_gone(stored: Session, command: Command) -> None:
    decision = on(stored, command)
    assert isinstance(decision, Refused)
    assert decision.code is Code.GONE


@given(st.sampled_from(list(commands())))
def test_a_permit_that_is_not_there_is_gone(command: Command) -> None:
    assert decide(None, command, KEYS, NOW_US) == Refused(Code.GONE)


def test_a_release_is_two_deletes_and_no_put() -> None:
    decision = on(session(S.CLOSING), Release(PERMIT, Proof.EOF, Actor.OWNER))
    assert isinstance(decision, Write)
    assert decision.txn.puts == ()
    assert decision.txn.deletes == (KEYS.session(PERMIT.kind, 0), KEYS.seat("app", "app", 0))


def test_a_session_without_a_seat_is_released_alone() -> None:
    decision = on(session(S.CLOSING, seat=-1), Release(PERMIT, Proof.EOF, Actor.OWNER))
    assert isinstance(decision, Write)
    assert decision.txn.deletes == (KEYS.session(PERMIT.kind, 0),)


def test_a_stored_generation_of_zero_is_the_mod_revision_and_the_next_write_stores_it() -> None:
    entry = entry_of(session(S.RESERVED, generation=0), mod_revision=31)
    permit = session_of(entry).permit
    assert permit.generation == 31
    decision = decide(entry, Connecting(permit), KEYS, NOW_US)
    assert isinstance(decision, Write)
    assert Session.decode(decision.txn.puts[0].value).generation == 31


def test_the_owner_reaper_compares_that_the_worker_key_is_absent() -> None:
    decision = on(session(), MarkOwnerGone(PERMIT, "t1"))
    assert isinstance(decision, Write)
    assert absent(KEYS.worker("A")) in decision.txn.compares
    assert decision.session is not None
    assert decision.session.ticket == "t1"


@pytest.mark.parametrize(("proof", "actor"), [
    (Proof.NEVER_BORN, Actor.BACKEND_REAPER), (Proof.FENCED, Actor.FENCER)])
def test_what_frees_a_permit_without_a_process_compares_the_record_of_its_owners_death(
    proof: Proof, actor: Actor
) -> None:
    unborn = session(S.UNKNOWN, pid=0, backend_start_us=0)
    decision = on(unborn, Release(PERMIT, proof, actor, exit_revision=5))
    assert isinstance(decision, Write)
    assert unchanged(KEYS.worker_exit("A"), 5) in decision.txn.compares


@pytest.mark.parametrize(("stored", "command", "code"), [
    (session(S.UNKNOWN, terminating=True), Reassert(PERMIT), Code.TERMINATING),
    (session(S.UNKNOWN, terminating=True), Reassert(PERMIT, closing=True), Code.TERMINATING),
    (session(S.UNKNOWN, terminating=True), Open(PERMIT, 42, 5_000, BACKEND), Code.TERMINATING),
    (session(S.UNKNOWN, abandoned=True, pid=0), Open(PERMIT, 42, 5_000, BACKEND), Code.ABANDONED),
    (session(S.UNKNOWN, pid=0), Reassert(PERMIT), Code.ILLEGAL),
    (session(S.OPEN), Open(PERMIT, 43, 6_000, BACKEND), Code.CONFLICT),
    (session(S.UNKNOWN), Open(PERMIT, 42, 5_001, BACKEND), Code.CONFLICT),
    (session(S.OPEN), Release(PERMIT, Proof.UNUSED, Actor.OWNER), Code.ILLEGAL),
    (session(S.OPEN), Release(PERMIT, Proof.ABSENT, Actor.BACKEND_REAPER), Code.ILLEGAL),
    (session(S.UNKNOWN), Release(PERMIT, Proof.EOF, Actor.BACKEND_REAPER), Code.ILLEGAL),
    (session(S.UNKNOWN), Release(PERMIT, Proof.NEVER_BORN, Actor.BACKEND_REAPER), Code.UNPROVEN),
    (session(S.UNKNOWN, pid=0), Release(PERMIT, Proof.NEVER_BORN, Actor.BACKEND_REAPER), Code.UNPROVEN),
    (session(S.UNKNOWN, pid=0), Release(PERMIT, Proof.ABSENT, Actor.BACKEND_REAPER), Code.UNPROVEN),
    (session(S.UNKNOWN, pid=0), Release(PERMIT, Proof.RESTARTED, Actor.BACKEND_REAPER), Code.UNPROVEN),
    (session(S.UNKNOWN, pid=0), Release(PERMIT, Proof.FENCED, Actor.FENCER), Code.UNPROVEN),
    (session(S.UNKNOWN), Release(PERMIT, Proof.ABSENT, Actor.BACKEND_REAPER, seen_revision=8), Code.CHANGED),
    (session(S.UNKNOWN), Terminating(PERMIT, seen_revision=8), Code.CHANGED),
    (session(S.UNKNOWN, pid=0), Terminating(PERMIT), Code.UNPROVEN),
    (session(S.UNKNOWN), Connecting(PERMIT), Code.ILLEGAL),
    (session(S.RESERVED), Closing(PERMIT), Code.ILLEGAL),
])
def test_what_is_refused_and_by_which_word(stored: Session, command: Command, code: Code) -> None:
    decision = on(stored, command)
    assert isinstance(decision, Refused)
    assert decision.code is code


@pytest.mark.parametrize(("stored", "command"), [
    (session(S.CONNECTING), Connecting(PERMIT)),
    (session(S.OPEN), Connecting(PERMIT)),
    (session(S.OPEN), Open(PERMIT, 42, 5_000, BACKEND)),
    (session(S.CLOSING), Closing(PERMIT)),
    (session(S.UNKNOWN), Unknown(PERMIT)),
    (session(S.UNKNOWN, abandoned=True), Unknown(PERMIT, abandoned=True)),
    (session(S.UNKNOWN), MarkOwnerGone(PERMIT)),
    (session(S.OPEN), Reassert(PERMIT)),
    (session(S.UNKNOWN, terminating=True), Terminating(PERMIT)),
])
def test_a_command_that_is_already_done_writes_nothing(stored: Session, command: Command) -> None:
    assert on(stored, command) == Already(stored)


def test_marks_survive_other_marks_and_keep_the_age() -> None:
    unknown = session(S.UNKNOWN, pid=0, backend_start_us=0, state_since_us=5)
    decision = on(unknown, Unknown(PERMIT, abandoned=True))
    assert isinstance(decision, Write)
    assert decision.session is not None
    assert decision.session.abandoned
    assert decision.session.state_since_us == 5


def test_fields_of_a_newer_version_are_kept_when_a_session_is_written_back() -> None:
    decision = on(session(S.OPEN, extra={"colour": "red"}), Closing(PERMIT))
    assert isinstance(decision, Write)
    assert Session.decode(decision.txn.puts[0].value).extra == {"colour": "red"}
