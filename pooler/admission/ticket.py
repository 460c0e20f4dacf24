"""The request ticket: who may wait for a session, who may use one now, and how that ends.

One object per waiting party; its state changes in one place. Cancel and grant may meet at the same instant:
whichever call comes first wins, the other is told so by its answer. That it executes is counted here, where
its state says so, in its account and its class. Pure: `now` is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

from pooler.admission.classes import NOBODY

if TYPE_CHECKING:
    from pooler.admission.classes import Account


class TicketState(Enum):
    """Where a ticket is. A ticket that a client reuses for its next transaction starts anew at QUEUED."""

    QUEUED = "QUEUED"
    EXECUTION_GRANTED = "EXECUTION_GRANTED"
    CHECKING_OUT = "CHECKING_OUT"
    IN_TRANSACTION = "IN_TRANSACTION"
    REQUEST_RELEASED = "REQUEST_RELEASED"
    CANCELLED = "CANCELLED"
    QUEUE_EXPIRED = "QUEUE_EXPIRED"
    REJECTED = "REJECTED"
    REQUEST_UNKNOWN = "REQUEST_UNKNOWN"


_T = TicketState
MOVES: dict[tuple[TicketState, TicketState], str] = {
    (_T.QUEUED, _T.EXECUTION_GRANTED): "its turn came",
    (_T.EXECUTION_GRANTED, _T.CHECKING_OUT): "a session is being bound",
    (_T.CHECKING_OUT, _T.IN_TRANSACTION): "the session is bound",
    (_T.IN_TRANSACTION, _T.REQUEST_RELEASED): "the transaction ended, or its session did with proof",
    (_T.QUEUED, _T.CANCELLED): "its client cancelled or left",
    (_T.QUEUED, _T.QUEUE_EXPIRED): "its deadline passed",
    (_T.QUEUED, _T.REJECTED): "it could not be served at all",
    (_T.EXECUTION_GRANTED, _T.REQUEST_RELEASED): "nothing started",
    (_T.CHECKING_OUT, _T.REQUEST_RELEASED): "nothing started",
    (_T.EXECUTION_GRANTED, _T.REQUEST_UNKNOWN): "its owner died",
    (_T.CHECKING_OUT, _T.REQUEST_UNKNOWN): "its owner died",
    (_T.IN_TRANSACTION, _T.REQUEST_UNKNOWN): "its owner died",
    (_T.REQUEST_UNKNOWN, _T.REQUEST_RELEASED): "its session was proven gone",
}
ENDS = (_T.REQUEST_RELEASED, _T.CANCELLED, _T.QUEUE_EXPIRED, _T.REJECTED)
_QUEUED, _IN_TRANSACTION, _RELEASED = _T.QUEUED, _T.IN_TRANSACTION, _T.REQUEST_RELEASED  # hot path


class IllegalTicketMove(Exception):
    """A move that the table does not have: always our bug."""


class Ticket:
    """One wait for a session and the use of it.

    `granted(session)` is called at most once per start, with the session bound; `refused(error)` at most once
    instead. Both are called synchronously by whoever decides.
    """

    __slots__ = (
        "account", "deadline", "granted", "has_entered", "holder", "is_prepaid", "next_account", "promised",
        "queued_at", "refused", "session", "state", "toll",
    )

    def __init__(
        self, granted: Callable[[Any], None], refused: Callable[[Exception], None], holder: Any = None,
        account: Account = NOBODY,
    ) -> None:
        self.account = account
        self.next_account: Account | None = None  # of its next use
        self.granted = granted
        self.refused = refused
        self.holder = holder
        self.session: Any = None
        self.promised: Any = None  # the session that its holder was told of: it gets that if it can be had
        self.toll: Any = None  # whose tokens it waits for, before it is queued
        self.is_prepaid = False  # its next use goes on with what was paid for
        self.has_entered = False  # some use of it was paid for: its connection is not charged again
        self.queued_at = 0.0
        self.deadline = float("inf")
        self.state = TicketState.REQUEST_RELEASED

    def start(self, now: float, deadline: float) -> None:
        """Queue anew. Raises IllegalTicketMove if the last use has not ended."""
        if self.state not in ENDS:
            raise IllegalTicketMove(f"{self.state} is not an end")
        self.queued_at = now
        self.deadline = deadline
        self.state = _QUEUED

    @property
    def waiting(self) -> bool:
        """Still in the queue."""
        return self.state is _QUEUED

    def bind(self, session: Any) -> bool:
        """Give it this session. False if the ticket ended meanwhile: the session stays the caller's."""
        if self.state is not _QUEUED:
            return False
        # EXECUTION_GRANTED and CHECKING_OUT are passed through: nothing can come between without an await
        self.state = _IN_TRANSACTION
        self.session = session
        account = self.account
        account.executing += 1
        account.served += 1
        klass = account.klass
        klass.executing += 1
        if klass.executing > klass.high:
            klass.moved()
        return True

    def release(self) -> None:
        """The transaction is over and the session is no longer this ticket's."""
        if self.state is not _IN_TRANSACTION:
            self._move(TicketState.REQUEST_RELEASED)
        self.state = _RELEASED
        self.session = None
        account = self.account
        klass = account.klass
        account.executing -= 1
        if klass.starved or account.parked:
            klass.freed(account)
        else:
            klass.executing -= 1
            if klass.executing < klass.low:
                klass.moved()
        if self.next_account is not None:
            self.account, self.next_account = self.next_account, None

    def charge(self, account: Account) -> None:
        """Its uses are this account's from the next one on; one that is under way stays where it is."""
        if self.state in ENDS:
            self.account, self.next_account = account, None
        else:
            self.next_account = account

    def end(self, state: TicketState) -> bool:
        """Leave the queue as CANCELLED, QUEUE_EXPIRED or REJECTED. False if it is no longer waiting."""
        if self.state is not _QUEUED:
            return False
        self._move(state)
        return True

    def _move(self, target: TicketState) -> None:
        if (self.state, target) not in MOVES:
            raise IllegalTicketMove(f"{self.state} to {target}")
        self.state = target
