"""Tickets of one pool under any sequence of requests, cancels, grants and deaths: each ends exactly once.

Cancel and grant at the same instant are two rules: the cancel comes right before or right after the session
is given, and whichever call came first must be the one that counts.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pooler.admission.ticket import ENDS, Ticket, TicketState
from pooler.pool.core import PoolCore
from tests.pool.fake_session import FakeSession

WAIT_SECONDS = 30.0


class Tickets(RuleBasedStateMachine):
    """The production pool core and its tickets beside what each client was told."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.core: PoolCore[FakeSession] = PoolCore(4, 4)
        self.now = 0.0
        self.told: dict[Ticket, list[str]] = {}  # what each client heard since it asked last
        self.using: dict[Ticket, FakeSession] = {}
        self.order: list[Ticket] = []  # who waits, as they came

    @rule(target=tickets)
    def comes(self) -> Ticket:
        ticket = Ticket(lambda session: self._granted(ticket, session), self._never)
        self.told[ticket] = []
        self._ask(ticket)
        return ticket

    @rule(ticket=tickets)
    def asks_again(self, ticket: Ticket) -> None:
        """The same object, for its client's next transaction."""
        if ticket.state in ENDS:
            self.told[ticket] = []
            self._ask(ticket)

    @rule(ticket=tickets)
    def cancels(self, ticket: Ticket) -> None:
        waited = ticket.state is TicketState.QUEUED
        assert self.core.withdraw(ticket, TicketState.CANCELLED) is waited
        if waited:
            self._left(ticket, "cancelled")

    @rule(ticket=tickets, cancel_first=st.booleans())
    def is_cancelled_as_a_session_is_given(self, ticket: Ticket, cancel_first: bool) -> None:
        """At the same instant: exactly one of the two happens to it, the session is lost to nobody."""
        if ticket.state is not TicketState.QUEUED:
            return
        session = FakeSession(self.core.epoch)
        is_next = self.order[0] is ticket and not self.core.blocked
        self.core.opening += 1
        if cancel_first:
            assert self.core.withdraw(ticket, TicketState.CANCELLED)
            self._left(ticket, "cancelled")
        kept = self.core.opened(session, self.now)
        if not cancel_first:
            took = self.core.withdraw(ticket, TicketState.CANCELLED)
            assert took is not (is_next and kept)
            if took:
                self._left(ticket, "cancelled")
        assert len(self.told[ticket]) == 1
        assert (self.told[ticket] == ["granted"]) is (is_next and kept and not cancel_first)

    @precondition(lambda self: self.core.openings_wanted() > 0)
    @rule(comes_to_be=st.booleans())
    def a_session_is_opened(self, comes_to_be: bool) -> None:
        self.core.opening += 1
        if comes_to_be:
            self.core.opened(FakeSession(self.core.epoch), self.now)
        else:
            self.core.open_failed()

    @rule(ticket=tickets, session_lives=st.booleans())
    def a_transaction_ends(self, ticket: Ticket, session_lives: bool) -> None:
        session = self.using.pop(ticket, None)
        if session is None:
            return
        ticket.release()
        self.told[ticket].append("released")
        if session_lives:
            self.core.give(session, self.now)
        else:
            assert self.core.remove(session)

    @rule(seconds=st.sampled_from((1.0, WAIT_SECONDS / 2, WAIT_SECONDS)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for ticket in self.core.expired(self.now):
            self._left(ticket, "expired")
        assert all(ticket.deadline > self.now for ticket in self.order)

    @rule()
    def the_epoch_advances(self) -> None:
        self.core.epoch += 1
        self.core.take_idle(len(self.core.idle))

    @rule(serving=st.booleans())
    def the_epoch_drains_or_serves(self, serving: bool) -> None:
        self.core.serving = serving
        self.core.wake(self.now)

    @rule()
    def everybody_is_rejected(self) -> None:
        for ticket in self.core.reject_all():
            self._left(ticket, "rejected")

    @rule(ticket=consumes(tickets))
    def goes_for_good(self, ticket: Ticket) -> None:
        if self.core.withdraw(ticket, TicketState.CANCELLED):
            self._left(ticket, "cancelled")
        self.a_transaction_ends(ticket, session_lives=False)

    @invariant()
    def every_ticket_is_in_one_place(self) -> None:
        assert list(self.core.waiting) == self.order
        assert set(self.using.values()) == self.core.active
        assert not self.core.active & set(self.core.idle)
        for ticket, told in self.told.items():
            assert told.count("granted") <= 1
            assert (ticket.state is TicketState.QUEUED) is (ticket in self.core.waiting)
            assert (ticket.state is TicketState.IN_TRANSACTION) is (ticket in self.using)
            if ticket.state in ENDS:
                assert len([each for each in told if each != "granted"]) == 1, told

    @invariant()
    def nobody_waits_beside_an_idle_session(self) -> None:
        assert self.core.blocked or not (self.core.waiting and self.core.idle)

    def _ask(self, ticket: Ticket) -> None:
        ticket.start(self.now, self.now + WAIT_SECONDS)
        session = self.core.request(ticket)
        if session is None:
            self.order.append(ticket)
        else:
            self._granted(ticket, session)

    def _granted(self, ticket: Ticket, session: FakeSession) -> None:
        assert session.epoch == self.core.epoch
        if ticket in self.order:
            assert self.order[0] is ticket  # first come, first served
            self.order.remove(ticket)
        self.told[ticket].append("granted")
        self.using[ticket] = session

    def _left(self, ticket: Ticket, how: str) -> None:
        self.order.remove(ticket)
        self.told[ticket].append(how)

    def _never(self, error: Any) -> None:
        raise AssertionError(error)


TestTickets = Tickets.TestCase
TestTickets.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def forgets_to_leave(core: PoolCore[Any], ticket: Ticket, state: TicketState) -> bool:
    """A cancel that leaves the ticket in the queue."""
    return ticket.end(state)


def ends_what_was_granted(ticket: Ticket, state: TicketState) -> bool:
    """A cancel that does not look whether it came too late."""
    ticket.state = state
    return True


@pytest.mark.parametrize(("owner", "name", "broken"), [
    (PoolCore, "withdraw", forgets_to_leave), (Ticket, "end", ends_what_was_granted)])
def test_a_cancel_that_is_half_done_is_found_out(
    owner: type, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    unshrunk = settings(max_examples=500, stateful_step_count=40, deadline=None, phases=[Phase.generate],
                        derandomize=True, database=None)
    with pytest.raises((AssertionError, ValueError)):
        run_state_machine_as_test(Tickets, settings=unshrunk)
