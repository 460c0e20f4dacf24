"""A ticket ends once, in one way, whatever meets whatever."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pooler.admission.ticket import ENDS, MOVES, IllegalTicketMove, Ticket, TicketState

T = TicketState
WAIT_ENDS = [T.CANCELLED, T.QUEUE_EXPIRED, T.REJECTED]


def ticket(state: TicketState = T.REQUEST_RELEASED) -> Ticket:
    made = Ticket(lambda session: None, lambda error: None)
    made.state = state
    return made


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_every_row_of_the_table_is_allowed(source: TicketState, target: TicketState) -> None:
    moved = ticket(source)
    moved._move(target)
    assert moved.state is target


@pytest.mark.parametrize(
    ("source", "target"), [pair for pair in itertools.product(T, T) if pair not in MOVES])
def test_every_other_move_raises_and_changes_nothing(source: TicketState, target: TicketState) -> None:
    stuck = ticket(source)
    with pytest.raises(IllegalTicketMove):
        stuck._move(target)
    assert stuck.state is source


def test_every_state_is_reached_from_queued_and_every_end_is_an_end() -> None:
    reached = {T.QUEUED}
    while True:
        further = {target for source, target in MOVES if source in reached} - reached
        if not further:
            break
        reached |= further
    assert reached == set(T)
    assert {source for source, _ in MOVES}.isdisjoint(ENDS)
    assert set(ENDS) == set(T) - {source for source, _ in MOVES}


@pytest.mark.parametrize("state", [s for s in T if s not in ENDS])
def test_a_ticket_that_has_not_ended_cannot_start_anew(state: TicketState) -> None:
    with pytest.raises(IllegalTicketMove):
        ticket(state).start(0.0, 1.0)


@pytest.mark.parametrize("state", ENDS)
def test_an_ended_ticket_starts_anew_as_queued(state: TicketState) -> None:
    again = ticket(state)
    again.start(3.0, 7.0)
    assert (again.state, again.queued_at, again.deadline) == (T.QUEUED, 3.0, 7.0)


@pytest.mark.parametrize("state", [s for s in T if s is not T.QUEUED])
def test_only_a_waiting_ticket_is_bound_or_ended(state: TicketState) -> None:
    other = ticket(state)
    assert not other.waiting
    assert not other.bind("session")
    assert not any(other.end(end) for end in WAIT_ENDS)
    assert other.state is state
    assert other.session is None


@pytest.mark.parametrize("state", [T.QUEUED, T.CANCELLED, T.QUEUE_EXPIRED, T.REJECTED, T.REQUEST_RELEASED])
def test_only_a_bound_ticket_is_released(state: TicketState) -> None:
    unbound = ticket(state)
    with pytest.raises(IllegalTicketMove):
        unbound.release()


@pytest.mark.parametrize("state", [s for s in T if s not in WAIT_ENDS])
def test_a_wait_ends_only_as_an_end_of_a_wait(state: TicketState) -> None:
    waiting = ticket(T.QUEUED)
    if (T.QUEUED, state) not in MOVES:
        with pytest.raises(IllegalTicketMove):
            waiting.end(state)
        assert waiting.waiting


class TicketUse(RuleBasedStateMachine):
    """Every start has exactly one outcome, and the session is somebody's at every moment."""

    def __init__(self) -> None:
        super().__init__()
        self.ticket = Ticket(lambda session: None, lambda error: None)
        self.starts = 0
        self.outcomes: list[str] = []
        self.held: Any = None
        self.uses = 0

    @precondition(lambda self: self.ticket.state in ENDS)
    @rule()
    def start(self) -> None:
        self.ticket.start(float(self.starts), 1e9)
        self.starts += 1

    @rule()
    def bind(self) -> None:
        self.uses += 1
        if self.ticket.bind(self.uses):
            self.held = self.uses
            self.outcomes.append("granted")

    @rule(state=st.sampled_from(WAIT_ENDS))
    def end(self, state: TicketState) -> None:
        if self.ticket.end(state):
            self.outcomes.append(state.value)

    @precondition(lambda self: self.ticket.state is T.IN_TRANSACTION)
    @rule()
    def release(self) -> None:
        self.ticket.release()
        self.held = None

    @invariant()
    def one_outcome_for_each_start(self) -> None:
        assert len(self.outcomes) == self.starts - self.ticket.waiting

    @invariant()
    def it_has_the_session_it_was_given(self) -> None:
        assert self.ticket.session == self.held
        assert (self.ticket.state is T.IN_TRANSACTION) == (self.held is not None)


TestTicketUse = TicketUse.TestCase
