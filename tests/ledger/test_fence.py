"""What a node that was confirmed off proves: what was known of it before, and nothing that came later."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ledger.fence import Fenced, proof_of_fence, what_goes_off
from coordinator.ledger.proofs import Proven
from coordinator.ledger.record import Backend, Session
from coordinator.ledger.states import SessionState
from tests.ledger.ground import BACKEND, session

S = SessionState
OTHER = replace(BACKEND, address="127.0.0.2:5432")
LATER = replace(BACKEND, postmaster_start_us=BACKEND.postmaster_start_us + 1)


def unknown(**changes: object) -> Session:
    return session(S.UNKNOWN, **changes)


def unborn(**changes: object) -> Session:
    return unknown(**{"pid": 0, "backend_start_us": 0, **changes})


def proves(held: Session, fenced: Fenced) -> bool:
    return isinstance(proof_of_fence(held, fenced), Proven)


def test_a_session_of_the_server_that_went_off_is_gone_whenever_it_was_recorded() -> None:
    fenced = what_goes_off(BACKEND, [], [])
    assert proves(unknown(), fenced)


def test_a_server_that_was_started_anew_under_the_epoch_went_off_with_the_node() -> None:
    assert proves(unknown(backend=LATER), what_goes_off(BACKEND, [unknown(backend=LATER)], []))


@pytest.mark.parametrize("elsewhere", [OTHER, LATER, replace(BACKEND, system_identifier="8"), None])
def test_a_session_of_another_server_or_of_one_that_came_later_is_not_gone(elsewhere: Backend | None) -> None:
    assert not proves(unknown(backend=elsewhere), what_goes_off(BACKEND, [], []))


@pytest.mark.parametrize("ended", [{"abandoned": True}, {"owner": "dead"}])
def test_a_permit_without_a_process_is_gone_if_its_owner_had_ended_or_given_it_up(
    ended: dict[str, object]
) -> None:
    held = unborn(**ended)
    assert proves(held, what_goes_off(BACKEND, [held], ["dead"]))


def test_one_whose_owner_may_only_be_paused_is_not_and_no_death_or_word_after_it_changes_that() -> None:
    fenced = what_goes_off(BACKEND, [unborn()], [])
    assert not proves(unborn(), fenced)
    assert not proves(unborn(abandoned=True), fenced)


def test_a_permit_that_says_no_server_is_for_that_of_its_epoch() -> None:
    held = unborn(backend=None, owner="dead", epoch=3)
    assert proves(held, what_goes_off(BACKEND, [held], ["dead"], 3))
    assert not proves(held, what_goes_off(BACKEND, [held], ["dead"], 4))


@given(st.lists(st.builds(
    unborn, slot=st.integers(0, 9), abandoned=st.booleans(), pid=st.integers(0, 2),
    backend=st.sampled_from([BACKEND, OTHER, LATER, None]))))
def test_it_is_stored_and_read_back_as_it_was(held: list[Session]) -> None:
    fenced = what_goes_off(BACKEND, held, ["A"], 1)
    assert Fenced.parse(fenced.plain()) == fenced
