"""What a look proves, and what it does not: each condition of each proof on its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.ledger.proofs import Awaiting, Look, Proven, Row, proof_of_absence
from coordinator.ledger.record import Backend, Kind, Session
from coordinator.ledger.states import Proof, SessionState

TAG = "abcd1234"
SERVER = Backend("10.0.0.1:5432", "7001", 3, 1_000)
SECOND = 1_000_000
INTERVAL_US = (2 * 60 + 120) * SECOND


def session(**changes: Any) -> Session:
    base = Session(
        kind=Kind.MAIN, slot=3, generation=17, state=SessionState.UNKNOWN, owner="w", host="h", dbname="d",
        user="u", seat=0, request_id="r", epoch=1, policy_generation=1, backend=SERVER, pid=400,
        backend_start_us=5_000)
    return replace(base, **changes)


def row(pid: int = 400, start_us: int | None = 5_000, name: str = "", state: str | None = "idle") -> Row:
    return Row(pid, start_us, "u", "d", name, state, "client backend")


def look(*rows: Row, **changes: Any) -> Look:
    base = Look(
        backend=SERVER, may_see_all=True, is_node=True, rows=rows, anonymous=frozenset(), at_us=0,
        connection=1, authentication_timeout_seconds=60.0, is_local=False)
    return replace(base, **changes)


def judge(held: Session, seen: Look, **given: Any) -> Proof | str:
    verdict = proof_of_absence(held, seen, ledger_tag=TAG, **given)
    return verdict.proof if isinstance(verdict, Proven) else verdict.reason


# ---- absent


def test_no_row_with_its_pid_is_absent() -> None:
    assert judge(session(), look(row(pid=401))) is Proof.ABSENT


def test_another_session_with_its_pid_is_absent() -> None:
    assert judge(session(), look(row(start_us=6_000))) is Proof.ABSENT


@pytest.mark.parametrize("start_us", [5_000, None])
def test_its_own_row_or_one_whose_start_is_hidden_is_no_proof(start_us: int | None) -> None:
    assert "pid 400 to end" in str(judge(session(), look(row(start_us=start_us))))


def test_a_look_without_the_right_to_see_others_proves_nothing() -> None:
    assert "GRANT" in str(judge(session(), look(may_see_all=False)))


def test_a_look_at_what_is_not_one_node_proves_nothing() -> None:
    assert "not one node" in str(judge(session(), look(is_node=False)))


@pytest.mark.parametrize(
    "other", [replace(SERVER, address="10.0.0.2:5432"), replace(SERVER, system_identifier="7002")])
def test_a_look_at_another_server_proves_nothing(other: Backend) -> None:
    assert "a look at 10.0.0.1:5432" in str(judge(session(), look(backend=other)))


def test_a_pid_that_holds_a_virtual_transaction_without_a_row_is_not_gone() -> None:
    assert "virtual transaction" in str(judge(session(), look(anonymous=frozenset({400}))))


def test_a_permit_whose_backend_start_is_not_known_waits_for_the_pid_to_end() -> None:
    assert "to end" in str(judge(session(backend_start_us=0), look(row(start_us=9_000))))


# ---- restarted


def test_a_later_postmaster_of_the_same_node_frees_the_session() -> None:
    assert judge(session(), look(backend=replace(SERVER, postmaster_start_us=6_000))) is Proof.RESTARTED


def test_a_postmaster_that_started_before_the_session_did_is_no_proof() -> None:
    assert judge(session(), look(backend=replace(SERVER, postmaster_start_us=4_000))) is not Proof.RESTARTED


def test_an_older_postmaster_is_no_proof() -> None:
    assert judge(session(), look(backend=replace(SERVER, postmaster_start_us=500))) is not Proof.RESTARTED


def test_another_timeline_counts_only_in_recovery() -> None:
    promoted = replace(SERVER, postmaster_start_us=6_000, timeline=4)
    assert judge(session(), look(backend=promoted)) is not Proof.RESTARTED
    assert judge(session(), look(backend=replace(promoted, in_recovery=True))) is Proof.RESTARTED


def test_a_permit_without_pid_is_never_freed_by_a_restart() -> None:
    seen = look(backend=replace(SERVER, postmaster_start_us=6_000))
    assert "known dead" in str(judge(session(pid=0, backend_start_us=0), seen))


# ---- never born

UNBORN = session(pid=0, backend_start_us=0)
FIRST = look()
SECOND_LOOK = look(at_us=INTERVAL_US, connection=2)


def test_two_looks_far_enough_apart_after_a_known_death_show_that_it_was_never_born() -> None:
    assert judge(UNBORN, SECOND_LOOK, first=FIRST, owner_known_dead=True) is Proof.NEVER_BORN


def test_the_owners_word_that_it_gave_up_stands_for_its_death() -> None:
    assert judge(replace(UNBORN, abandoned=True), SECOND_LOOK, first=FIRST) is Proof.NEVER_BORN


@pytest.mark.parametrize(
    ("second", "given", "reason"),
    [
        (SECOND_LOOK, {"first": FIRST}, "known dead"),
        (SECOND_LOOK, {"owner_known_dead": True}, "a second look"),
        (replace(SECOND_LOOK, at_us=INTERVAL_US - 1),
         {"owner_known_dead": True, "first": FIRST}, "time limit"),
        (replace(SECOND_LOOK, connection=1), {"owner_known_dead": True, "first": FIRST}, "of its own"),
        (SECOND_LOOK, {"owner_known_dead": True, "first": replace(FIRST, may_see_all=False)}, "second look"),
        (replace(SECOND_LOOK, rows=(row(900, name="pooler:abcd1234:m3.17"),)),
         {"owner_known_dead": True, "first": FIRST}, "birth tag"),
        (SECOND_LOOK, {"owner_known_dead": True, "first": look(row(900, name="pooler:abcd1234:m3.17"))},
         "birth tag"),
        (replace(SECOND_LOOK, anonymous=frozenset({77})),
         {"owner_known_dead": True, "first": replace(FIRST, anonymous=frozenset({77, 78}))}, "pid 77"),
        (replace(SECOND_LOOK, backend=replace(SERVER, postmaster_start_us=9_000)),
         {"owner_known_dead": True, "first": FIRST}, "a second look"),
        (replace(SECOND_LOOK, backend=replace(SERVER, postmaster_start_us=10)),
         {"owner_known_dead": True, "first": FIRST}, "a look at"),
    ],
    ids=["owner may live", "one look", "too soon", "same connection", "first was void", "tag in second",
         "tag in first", "starter still nameless", "restarted between", "older postmaster"],
)
def test_never_born_needs_every_condition(second: Look, given: dict[str, Any], reason: str) -> None:
    assert reason in str(judge(UNBORN, second, **given))


def test_a_starter_of_the_first_look_that_got_another_name_or_ended_does_not_hold_it_up() -> None:
    first = replace(FIRST, anonymous=frozenset({77}))
    named = replace(SECOND_LOOK, rows=(row(77, name="pooler:abcd1234:m9.9"),))
    assert judge(UNBORN, named, first=first, owner_known_dead=True) is Proof.NEVER_BORN
    late = replace(SECOND_LOOK, anonymous=frozenset({99}))  # began after the first look: it may be ours
    assert judge(UNBORN, late, first=first, owner_known_dead=True) is not Proof.NEVER_BORN


def test_over_loopback_no_grace_is_needed_and_the_timeout_is_the_servers() -> None:
    near = replace(SECOND_LOOK, is_local=True, authentication_timeout_seconds=2.0, at_us=4 * SECOND)
    assert judge(UNBORN, near, first=FIRST, owner_known_dead=True) is Proof.NEVER_BORN
    soon = replace(near, at_us=4 * SECOND - 1)
    assert judge(UNBORN, soon, first=FIRST, owner_known_dead=True) is not Proof.NEVER_BORN


def test_a_permit_without_a_backend_is_looked_up_at_its_epochs() -> None:
    bare = replace(UNBORN, backend=None)
    given = {"first": FIRST, "owner_known_dead": True}
    assert "attestation" in str(judge(bare, SECOND_LOOK, **given))
    assert judge(bare, SECOND_LOOK, epoch_backend=SERVER, **given) is Proof.NEVER_BORN


def test_what_is_awaited_says_when_another_look_can_help() -> None:
    verdict = proof_of_absence(UNBORN, FIRST, ledger_tag=TAG, owner_known_dead=True)
    assert isinstance(verdict, Awaiting)
    assert verdict.look_again_at_us == INTERVAL_US
