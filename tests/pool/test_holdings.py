"""What a worker knows of its permits: every state against every word of the ledger."""

from __future__ import annotations

import pytest

from coordinator.ledger.record import Kind, Permit
from coordinator.ledger.states import SessionState
from pooler.pool.holdings import Holdings, Verdict

P = Permit(Kind.MAIN, 3, 17)
S, V = SessionState, Verdict


def _holding(state: SessionState, ending: bool = False) -> Holdings:
    holdings = Holdings()
    holdings.granted("db", P)
    holdings.moved("db", P, state)
    if ending:
        holdings.ended("db", P, state)
    return holdings


@pytest.mark.parametrize(("state", "ending", "in_hand", "verdict"), [
    (S.RESERVED, False, False, V.NOTHING),
    (S.CONNECTING, False, False, V.NOTHING),
    (S.OPEN, False, True, V.REASSERT),
    (S.OPEN, False, False, V.NOTHING),
    (S.CLOSING, False, False, V.REASSERT_CLOSING),
    (S.UNKNOWN, True, False, V.NOTHING),
    (S.UNKNOWN, False, False, V.NOTHING),
    (S.RELEASED, True, True, V.NOTHING),
])
def test_what_a_permit_marked_unknown_calls_for(
    state: SessionState, ending: bool, in_hand: bool, verdict: Verdict
) -> None:
    assert _holding(state, ending).on_unknown("db", P, in_hand) is verdict


@pytest.mark.parametrize(("state", "ending", "in_hand", "verdict"), [
    (S.RESERVED, False, False, V.VIOLATED),
    (S.CONNECTING, False, False, V.VIOLATED),
    (S.OPEN, False, True, V.VIOLATED),
    (S.OPEN, False, False, V.NOTHING),
    (S.CLOSING, False, False, V.NOTHING),
    (S.UNKNOWN, False, False, V.NOTHING),
    (S.RELEASED, True, True, V.NOTHING),
])
def test_what_a_permit_that_is_gone_calls_for(
    state: SessionState, ending: bool, in_hand: bool, verdict: Verdict
) -> None:
    holdings = _holding(state, ending)
    assert holdings.on_gone("db", P, in_hand, whole=True) is verdict
    assert ("db", P) not in holdings


@pytest.mark.parametrize("state", [S.RESERVED, S.CONNECTING, S.OPEN, S.CLOSING, S.UNKNOWN])
def test_a_lost_ledger_takes_nothing_away(state: SessionState) -> None:
    holdings = _holding(state)
    assert holdings.on_gone("db", P, in_hand=True, whole=False) is V.NOTHING
    assert ("db", P) in holdings


def test_the_word_about_another_generation_or_database_is_nobody_s() -> None:
    holdings = _holding(S.OPEN)
    other = Permit(Kind.MAIN, 3, 18)
    assert holdings.on_unknown("db", other, in_hand=True) is V.NOTHING
    assert holdings.on_gone("db", other, in_hand=True, whole=True) is V.NOTHING
    assert holdings.on_gone("other", P, in_hand=True, whole=True) is V.NOTHING
    assert ("db", P) in holdings


def test_an_end_is_reported_once_and_nothing_moves_after_it() -> None:
    holdings = _holding(S.OPEN)
    assert holdings.ended("db", P, S.RELEASED)
    assert not holdings.ended("db", P, S.UNKNOWN)
    assert not holdings.moved("db", P, S.OPEN)
    assert holdings.count() == {"SESSION_RELEASED": 1}
    assert len(holdings.report()) == 1
    holdings.forget("db", P)
    assert holdings.report() == []


def test_what_was_given_up_stays_reported_until_forgotten() -> None:
    holdings = _holding(S.OPEN)
    holdings.ended("db", P, S.UNKNOWN)
    holdings.given_up("db", P)
    assert holdings.report() == [{"db": "db", "permit": ["main", 3, 17], "state": "SESSION_UNKNOWN"}]
    assert holdings.on_gone("db", P, in_hand=False, whole=True) is V.NOTHING
    assert holdings.report() == []


def test_a_request_is_listed_from_asking_to_answer() -> None:
    holdings = Holdings()
    holdings.asked("b")
    holdings.asked("a")
    assert holdings.requests() == ["a", "b"]
    holdings.answered("a")
    holdings.answered("a")
    assert holdings.requests() == ["b"]
