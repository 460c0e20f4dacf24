"""The judge itself: each invariant passes a sound ledger and names what was broken in a forged one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.ledger.invariants import (
    Released,
    check_ledger,
    check_releases,
    check_server,
    reaper_name,
)
from coordinator.ledger.limits import Limits
from coordinator.ledger.proofs import Row
from coordinator.ledger.record import Alias, Kind, LedgerHead, LedgerState, Permit, Receipt, Seat, Session
from coordinator.ledger.snapshot import Given, Held, LedgerSnapshot, TakenSeat
from coordinator.ledger.states import Actor, Proof, SessionState
from tests.ledger.ground import KEYS, TAG, session

S = SessionState


def snapshot(*sessions: Session, **changes: object) -> LedgerSnapshot:
    """A sound ledger of these sessions: each sits in its own seat."""
    base = LedgerSnapshot(
        revision=100, head=LedgerHead("first", LedgerState.ACTIVE, TAG), alias=Alias(1),
        limits={1: Limits(2, admin=1), 2: Limits(1, admin=1)},
        sessions=tuple(Held(each, 50) for each in sessions),
        seats=tuple(TakenSeat(KEYS.seat("app", "app", s.seat), Seat(s.kind, s.slot, s.request_id))
                    for s in sessions if s.seat >= 0))
    return replace(base, **changes)  # type: ignore[arg-type]


FIRST = session(S.OPEN)
SECOND = session(S.RESERVED, slot=1, seat=1, generation=8, request_id="r2")
ADMIN = session(S.OPEN, kind=Kind.ADMIN, seat=-1, pid=50, request_id="r3")


def row(pid: int, start: int | None = 5_000, name: str = "app") -> Row:
    return Row(pid, start, "app", "app", name, "idle", "client backend")


def whats(violations: object) -> list[str]:
    assert isinstance(violations, list)
    return [f"{each.invariant} {each.what}" for each in violations]


def test_a_sound_ledger_beside_its_server_breaks_nothing() -> None:
    sound = snapshot(FIRST, SECOND, ADMIN)
    rows = [row(42), row(77, 9_000, SECOND.permit.birth_tag(TAG)), row(50), row(9, 1, reaper_name(TAG))]
    assert check_ledger(sound, KEYS) == []
    assert check_server(sound, rows) == []


def test_sessions_granted_under_the_larger_policy_may_outlast_it() -> None:
    shrunk = snapshot(FIRST, SECOND, alias=Alias(2))
    assert check_ledger(shrunk, KEYS) == []


@pytest.mark.parametrize(("forged", "what"), [
    (snapshot(FIRST, SECOND, session(slot=2, seat=2, request_id="r4", generation=9)), "I1 over_budget"),
    (snapshot(session(slot=5)), "I1 slot_beyond_policy"),
    (snapshot(FIRST, replace(SECOND, policy_generation=2)), "I1 slot_beyond_policy"),
    (snapshot(ADMIN, replace(ADMIN, slot=1, request_id="r5")), "I1 over_budget"),
    (snapshot(FIRST, replace(SECOND, request_id="r1")), "I4 request_holds_two"),
    (snapshot(FIRST, seats=()), "I4 session_without_seat"),
    (snapshot(seats=snapshot(FIRST).seats), "I4 seat_without_session"),
    (snapshot(FIRST, seats=snapshot(replace(FIRST, request_id="rX")).seats), "I4 seat_of_another"),
    (snapshot(FIRST, replace(SECOND, seat=0)), "I4 seat_shared"),
    (snapshot(FIRST, receipts=(Given("r1", Receipt(Kind.MAIN, -1, voided=True), 7, 1),)),
     "I4 voided_request_holds"),
])
def test_a_forged_ledger_is_named(forged: LedgerSnapshot, what: str) -> None:
    assert what in whats(check_ledger(forged, KEYS))


@pytest.mark.parametrize(("rows", "what"), [
    ([row(42), row(43)], "I2 session_without_permit"),
    ([row(42, 6_000)], "I2 session_without_permit"),
    ([row(42, 6_000)], "I2 permit_without_session"),
    ([], "I2 permit_without_session"),
    ([row(42), row(42)], "I2 permit_with_two_sessions"),
    ([row(42), row(1, 1, reaper_name(TAG)), row(2, 1, reaper_name(TAG))], "I2 second_reaper"),
    ([row(42, name=SECOND.permit.birth_tag(TAG))], "I2 session_with_two_permits"),
    ([row(42), row(7, 1, "pooler:zzzzzzzz:m1.8")], "I2 session_without_permit"),
])
def test_a_server_that_does_not_match_is_named(rows: list[Row], what: str) -> None:
    assert what in whats(check_server(snapshot(FIRST, SECOND), rows))


@pytest.mark.parametrize("state", [S.CLOSING, S.UNKNOWN])
def test_a_session_that_may_be_over_is_not_missed(state: SessionState) -> None:
    assert check_server(snapshot(session(state)), []) == []


def test_a_hidden_start_contradicts_no_permit() -> None:
    assert check_server(snapshot(FIRST), [row(42, None)]) == []


PERMIT = Permit(Kind.MAIN, 0, 7)
GOOD = Released(PERMIT, S.CLOSING, Actor.OWNER, Proof.EOF)


@pytest.mark.parametrize(("releases", "expected"), [
    ([GOOD], []),
    ([GOOD, replace(GOOD, permit=Permit(Kind.MAIN, 0, 8))], []),
    ([GOOD, GOOD], ["I4 released_twice"]),
    ([replace(GOOD, proof=None)], ["I5 released_without_proof"]),
    ([replace(GOOD, proof=Proof.ABSENT)], ["I5 released_without_proof"]),
    ([replace(GOOD, source=S.OPEN, proof=Proof.UNUSED)], ["I5 released_without_proof"]),
])
def test_releases_are_judged_one_by_one_and_together(releases: list[Released], expected: list[str]) -> None:
    assert whats(check_releases(releases)) == expected
