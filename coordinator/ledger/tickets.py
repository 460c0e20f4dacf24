"""Client-named tickets: what one name stands for, and what is decided when it is registered, begun or ended.

A name is a promise that what it names runs at most once. Its record moves by compare-and-set only: whoever
registered it last may wait for a session, and only whoever wrote IN_TRANSACTION may send the first byte. So a
name that stands as QUEUED has run nothing, wherever its worker is. Pure: `now_us` is an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar

from coordinator.ledger.record import Permit, Record

ID_BYTES_MAX = 128


class TicketState(StrEnum):
    """Where a name is; the words are those of the worker's own ticket."""

    QUEUED = "QUEUED"
    IN_TRANSACTION = "IN_TRANSACTION"
    UNKNOWN = "REQUEST_UNKNOWN"
    RELEASED = "REQUEST_RELEASED"
    CANCELLED = "CANCELLED"
    EXPIRED = "QUEUE_EXPIRED"
    REJECTED = "REJECTED"


class Outcome(StrEnum):
    """What came of the transaction. NONE: it is not over, or nothing was sent to a server."""

    NONE = ""
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    UNKNOWN = "unknown"


_S = TicketState
STARTED = frozenset({_S.IN_TRANSACTION, _S.UNKNOWN})
NOTHING_RAN = frozenset({_S.CANCELLED, _S.EXPIRED, _S.REJECTED})
ENDS = NOTHING_RAN | {_S.RELEASED}


@dataclass(frozen=True, slots=True)
class NamedTicket(Record):
    """`ticket/<db>/<id>`. `attempt` counts registrations; only the last one may begin or end it."""

    name: ClassVar[str] = "ticket"

    id: str
    state: TicketState
    owner: str  # boot id of the worker that registered it last
    host: str
    client: str
    attempt: int
    queued_at_us: int  # of the first registration that has its place in the queue; shown only
    changed_at_us: int
    tenant: str = ""
    ticket_class: str = ""
    outcome: Outcome = Outcome.NONE
    permit: str = ""  # of the session it runs on, from IN_TRANSACTION on
    pid: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def check(self) -> None:
        """See Record.check."""
        fault = id_fault(self.id)
        if fault:
            raise ValueError(fault)
        if self.attempt < 1:
            raise ValueError(f"attempt {self.attempt}")
        if self.permit:
            Permit.parse(self.permit)
        elif self.state in STARTED:
            raise ValueError(f"{self.state} without a permit")
        if (self.outcome is Outcome.NONE) is (self.state is _S.RELEASED):
            raise ValueError(f"{self.state} with outcome {self.outcome!r}")


def id_fault(ticket_id: str) -> str:
    """Why a client may not use this name; empty if it may."""
    if not 1 <= len(ticket_id) <= ID_BYTES_MAX:
        return f"a ticket's name has 1 to {ID_BYTES_MAX} bytes"
    if not (ticket_id.isascii() and ticket_id.isprintable()) or "/" in ticket_id:
        return "a ticket's name is of printable ASCII characters other than /"
    return ""


@dataclass(frozen=True, slots=True)
class Register:
    """A client named its next transaction: it wants to wait for a session."""

    id: str
    owner: str
    host: str
    client: str
    tenant: str = ""
    ticket_class: str = ""


@dataclass(frozen=True, slots=True)
class Begin:
    """A session is bound and nothing was sent yet. With another permit than before: that session ended
    before anything was sent to it."""

    attempt: int
    owner: str
    permit: Permit
    pid: int


@dataclass(frozen=True, slots=True)
class End:
    """The owner knows how it ended. Its word counts over what stands of its attempt: its Begin may have been
    written without that it was told so."""

    attempt: int
    owner: str
    state: TicketState
    outcome: Outcome = Outcome.NONE


@dataclass(frozen=True, slots=True)
class OwnerGone:
    """Its owner has no worker key; `proven`: nor is any permit left that it may run on."""

    attempt: int
    owner: str
    proven: bool


Command = Register | Begin | End | OwnerGone


class Why(StrEnum):
    """Why a command was refused."""

    EXECUTING = "executing"  # it runs, or it is not known that it does not
    FINISHED = "finished"
    MOVED = "moved"  # the name is another registration's by now, or ended


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing is written; `ticket` is what stands."""

    why: Why
    ticket: NamedTicket | None


@dataclass(frozen=True, slots=True)
class Write:
    """Stand as `ticket` from now on. `moved_from` is the registration that lost its place in the queue."""

    ticket: NamedTicket
    moved_from: NamedTicket | None = None


@dataclass(frozen=True, slots=True)
class Stands:
    """It stands as commanded already: a repetition of what was answered with silence."""

    ticket: NamedTicket


Decision = Write | Stands | Refused


def decide(standing: NamedTicket | None, command: Command, now_us: int) -> Decision:
    """What `command` comes to where `standing` is what etcd has under this name."""
    if isinstance(command, Register):
        return _register(standing, command, now_us)
    if standing is None or (standing.attempt, standing.owner) != (command.attempt, command.owner):
        return Refused(Why.MOVED, standing)
    if isinstance(command, Begin):
        return _begin(standing, command, now_us)
    if isinstance(command, End):
        return _end(standing, command, now_us)
    return _owner_gone(standing, command, now_us)


def _register(standing: NamedTicket | None, wanted: Register, now_us: int) -> Decision:
    new = NamedTicket(
        wanted.id, _S.QUEUED, wanted.owner, wanted.host, wanted.client, 1, now_us, now_us, wanted.tenant,
        wanted.ticket_class)
    if standing is None:
        return Write(new)
    if standing.state in STARTED:
        return Refused(Why.EXECUTING, standing)
    if standing.state is _S.RELEASED:
        return Refused(Why.FINISHED, standing)
    again = replace(new, attempt=standing.attempt + 1, extra=standing.extra)
    if standing.state is not _S.QUEUED:  # it left the queue and ran nothing
        return Write(again)
    return Write(replace(again, queued_at_us=standing.queued_at_us), moved_from=standing)


def _begin(standing: NamedTicket, command: Begin, now_us: int) -> Decision:
    if standing.state not in (_S.QUEUED, _S.IN_TRANSACTION):
        return Refused(Why.MOVED, standing)
    begun = replace(standing, state=_S.IN_TRANSACTION, permit=str(command.permit), pid=command.pid)
    if begun == standing:
        return Stands(standing)
    return Write(replace(begun, changed_at_us=now_us))


def _end(standing: NamedTicket, command: End, now_us: int) -> Decision:
    if (command.state is _S.RELEASED) is (command.outcome is Outcome.NONE) or command.state not in ENDS:
        raise ValueError(f"{command.state} is no end with outcome {command.outcome!r}")
    if (standing.state, standing.outcome) == (command.state, command.outcome):
        return Stands(standing)
    if standing.state in ENDS:
        return Refused(Why.MOVED, standing)
    return Write(replace(standing, state=command.state, outcome=command.outcome, changed_at_us=now_us))


def _owner_gone(standing: NamedTicket, command: OwnerGone, now_us: int) -> Decision:
    if standing.state in STARTED and command.proven:
        return Write(replace(standing, state=_S.RELEASED, outcome=Outcome.UNKNOWN, changed_at_us=now_us))
    if standing.state is _S.IN_TRANSACTION:
        return Write(replace(standing, state=_S.UNKNOWN, changed_at_us=now_us))
    return Stands(standing)


def due(ticket: NamedTicket, workers: Collection[str], held: Collection[str] | None) -> OwnerGone | None:
    """What the death of its owner comes to now. `held` has every permit that is held, under each name it had;
    None: not known, as of a ledger that cannot be read whole."""
    if ticket.owner in workers or ticket.state not in STARTED:
        return None
    proven = held is not None and ticket.permit not in held
    if ticket.state is _S.UNKNOWN and not proven:
        return None
    return OwnerGone(ticket.attempt, ticket.owner, proven)
