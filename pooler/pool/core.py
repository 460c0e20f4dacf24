"""Who gets which session of one pool, and when another is to be opened or one closed.

Pure: no tasks, sockets or clock; every call is one decision and returns what is to be done. A session is
IDLE in `idle`, ACTIVE in `active`, or not in the core at all (being opened, closed). A ticket waits for a
session and for room in its class at once, and gets both or neither; whose turn it is, the line says. A ticket
that ended leaves the line at once: its holder may start it anew.

An idle session may be promised to a client that was told of it and has not asked for anything. Nothing is
held for it: who else asks gets that session if there is no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pooler.admission.group import Group
from pooler.admission.line import Line
from pooler.admission.ticket import Ticket, TicketState


class Session(Protocol):
    """What the core needs to know of a session."""

    epoch: int
    expires_at: float
    idle_since: float
    generation: int
    promised: bool


S = TypeVar("S", bound=Session)


@dataclass(frozen=True, slots=True)
class PoolCount:
    """One snapshot of a pool, for tests, metrics and the console."""

    active: int
    idle: int
    opening: int
    closing: int
    waiting: int
    oldest_queued_at: float | None


class PoolCore(Generic[S]):
    """The sessions and the queue of one (database, user)."""

    __slots__ = (
        "active",
        "ages",
        "check_after",
        "checking",
        "closing",
        "epoch",
        "generation",
        "grants_until",
        "idle",
        "logins",
        "on_room",
        "opening",
        "opening_max",
        "paused",
        "serves_once",
        "serving",
        "shed",
        "size_max",
        "waiting",
    )

    def __init__(self, size_max: int, opening_max: int) -> None:
        self.size_max = size_max
        self.opening_max = opening_max
        self.idle: list[S] = []
        self.active: set[S] = set()
        self.waiting = Line(self._serve)
        self.on_room: Callable[[], None] = _nothing  # somebody may execute, and has no session to do it on
        self.logins = 0  # clients at their login that want to be told of a session, and there is none
        self.opening = 0
        self.closing = 0
        self.epoch = 0
        self.generation = 0
        self.shed = 0
        self.paused = False
        self.grants_until = float("inf")  # from then on nobody gets one: see cut_off.py
        self.serving = True
        self.check_after = float("inf")  # seconds idle, from which on a session is checked before it is given
        self.checking: set[S] = set()  # of `active`: nobody's until it has answered
        self.ages = True  # lifetimes count; not while no successor could be had
        self.serves_once = False  # a lifetime of 0: it ends as the session is given to somebody

    @property
    def total(self) -> int:
        """Sessions that hold a permit or ask for one."""
        return len(self.idle) + len(self.active) + self.opening + self.closing

    @property
    def blocked(self) -> bool:
        """No session may be granted now: paused by an operator, or the epoch drains."""
        return self.paused or not self.serving

    def request(self, ticket: Ticket) -> S | None:
        """Bind an idle session to a started ticket, or queue it; one that does not wait then was refused, for
        its class's queue is full. Latest returned first."""
        if ticket.promised is not None:
            self._bring_forward(ticket)
        idle, account = self.idle, ticket.account
        klass = account.klass
        if (idle and self.serving and not self.paused
                and klass.executing < klass.allotted and account.executing < account.inflight_max
                and ticket.queued_at - idle[-1].idle_since < self.check_after
                and ticket.queued_at < self.grants_until
                and (not self.waiting.size or self.waiting.lets_pass(account))):
            session = idle.pop()
            ticket.bind(session)
            self.active.add(session)
            if self.serves_once:
                session.expires_at = 0.0
            return session
        if klass.waiting >= klass.queue_max:
            ticket.end(TicketState.REJECTED)
            account.refused += 1
            klass.refused += 1
            return None
        latest = ticket.queued_at + klass.wait_seconds_max
        if latest < ticket.deadline:  # noqa: PLR1730 - a call less
            ticket.deadline = latest
        self.waiting.add(ticket)
        return None

    def _serve(self, group: Group, now: float) -> bool:
        """There is room for these waiters again: one of them gets an idle session, if one can be had."""
        if self.idle and self._may_grant(now) and now - self.idle[-1].idle_since < self.check_after:
            ticket = self.waiting.take(group, now)
            if ticket is not None:
                self._grant(ticket, self.idle.pop())
                return True
        self.on_room()
        return False

    def _may_grant(self, now: float) -> bool:
        return self.serving and not self.paused and now < self.grants_until

    def _grant(self, ticket: Ticket, session: S) -> None:
        ticket.bind(session)
        self.active.add(session)
        if self.serves_once:
            session.expires_at = 0.0
        ticket.granted(session)

    def promise(self) -> S | None:
        """An idle session that is promised to nobody, for the client that is told of it: the caller sets its
        ticket's `promised`, or `break_promise`s. It is the last to be given to others."""
        if self.waiting.size or self.blocked:
            return None
        session = next((each for each in reversed(self.idle) if not each.promised), None)
        if session is not None:
            session.promised = True
            self.idle.remove(session)
            self.idle.insert(0, session)
        return session

    def break_promise(self, session: S) -> None:
        """Nobody relies on having been told of it."""
        session.promised = False

    def _bring_forward(self, ticket: Ticket) -> None:
        """What it was promised is the next to be given, or, where it is not idle, forgotten."""
        session, ticket.promised = ticket.promised, None
        self.break_promise(session)
        if session in self.idle:
            self.idle.remove(session)
            self.idle.append(session)

    def withdraw(self, ticket: Ticket, state: TicketState) -> bool:
        """End a waiting ticket. False if it was granted (or ended) already: then its session is in use."""
        self.waiting.remove(ticket)
        return ticket.end(state)

    def usable(self, session: S, now: float) -> bool:
        """May this session serve anyone again?"""
        return (session.epoch == self.epoch and session.generation == self.generation
                and (now < session.expires_at or not self.ages) and self.serving)

    def give(self, session: S, now: float) -> bool:
        """A clean session (returned, or new) goes to the waiter whose turn it is, or becomes idle.

        False: it is not to be used any more and the caller closes it (it has left the core).
        """
        self.active.discard(session)
        if self.checking:
            self.checking.discard(session)
        if self.shed or not self.usable(session, now):
            self.shed = max(0, self.shed - 1)
            return False
        if self.waiting.size and not self.paused and now < self.grants_until:
            ticket = self.waiting.next(now)
            if ticket is not None:
                ticket.bind(session)
                self.active.add(session)
                if self.serves_once:
                    session.expires_at = 0.0
                ticket.granted(session)
                return True
        session.idle_since = now
        self.idle.append(session)
        return True

    def opened(self, session: S, now: float) -> bool:
        """A session that was being opened is ready. As `give`."""
        self.opening -= 1
        return self.give(session, now)

    def open_failed(self) -> None:
        """An opening ended without a session."""
        self.opening -= 1

    def remove(self, session: S) -> bool:
        """Take a session out, whatever it was doing. False if it was not here."""
        if session in self.active:
            self.active.discard(session)
            self.checking.discard(session)
            self.shed = min(self.shed, len(self.active))  # what is gone need not be given up
            return True
        if session in self.idle:
            self.idle.remove(session)
            return True
        return False

    def openings_wanted(self) -> int:
        """How many more sessions to start opening now; the caller counts them in `opening`. None for those
        who could not execute if they had one."""
        room = self.size_max - self.total
        if room <= 0 or self.blocked:
            return 0
        wanted = min(self.waiting.servable() - len(self.checking) + self.logins, self.opening_max)
        return max(0, min(wanted - self.opening, room))

    def take_to_check(self) -> list[S]:
        """Idle sessions that are to be checked now, one for each that waits: in use until they are given."""
        taken: list[S] = []
        while self.idle and not self.blocked and self.waiting.servable() > len(self.checking):
            session = self.idle.pop()
            self.active.add(session)
            self.checking.add(session)
            taken.append(session)
        return taken

    def oldest_wait(self) -> float:
        """Since when somebody waits; infinity where nobody does."""
        return self.waiting.oldest_queued_at()

    def count_waiting(self) -> int:
        """Who waits now."""
        return self.waiting.size

    def count_servable(self) -> int:
        """Who waits for nothing but a session."""
        return self.waiting.servable()

    def wake(self, now: float) -> list[S]:
        """Serve waiters from idle sessions after a block was lifted; returns those to close instead."""
        retired: list[S] = []
        while (self.idle and self.waiting.size and self._may_grant(now)
               and now - self.idle[-1].idle_since < self.check_after):
            if self.shed or not self.usable(self.idle[-1], now):
                self.shed = max(0, self.shed - 1)
                retired.append(self.idle.pop())
                continue
            ticket = self.waiting.next(now)
            if ticket is None:
                break
            self._grant(ticket, self.idle.pop())
        return retired

    def expired(self, now: float) -> list[Ticket]:
        """Tickets whose deadline has passed: ended here; the caller tells their holders."""
        late = [ticket for ticket in self.waiting if ticket.deadline <= now]
        for ticket in late:
            self.withdraw(ticket, TicketState.QUEUE_EXPIRED)
        return late

    def reject_all(self) -> list[Ticket]:
        """Everybody who waits: ended here; the caller tells their holders."""
        rejected = list(self.waiting)
        for ticket in rejected:
            self.withdraw(ticket, TicketState.REJECTED)
        return rejected

    def take_idle(self, wanted: int) -> list[S]:
        """Up to `wanted` idle sessions leave the core to be closed: longest idle first, promised last."""
        taken = sorted(self.idle, key=lambda session: session.promised)[:wanted]
        self.idle = [session for session in self.idle if session not in taken]
        return taken

    def retire_idle(self, now: float, idle_before: float, keep: int) -> list[S]:
        """Idle sessions to close: unusable ones, and those idle since before `idle_before` above `keep`."""
        retired: list[S] = []
        kept: list[S] = []
        spare = len(self.idle) + len(self.active) - keep
        for session in self.idle:
            if not self.usable(session, now) or (session.idle_since < idle_before and spare > 0):
                retired.append(session)
                spare -= 1
            else:
                kept.append(session)
        self.idle = kept
        return retired

    def count(self) -> PoolCount:
        """The snapshot."""
        waiting = self.waiting.size
        return PoolCount(
            len(self.active), len(self.idle), self.opening, self.closing, waiting,
            self.waiting.oldest_queued_at() if waiting else None)

    def check(self) -> None:
        """Assert what must always hold."""
        assert self.opening >= 0
        assert self.closing >= 0
        assert not any(s in self.active for s in self.idle)
        self.waiting.check()
        assert self.checking <= self.active
        grants = not self.blocked and self.grants_until == float("inf")
        assert not (grants and self.idle and self.waiting.servable() > len(self.checking))


def _nothing() -> None: ...
