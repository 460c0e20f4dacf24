"""Where requests pay before they are queued: refused at once, delayed until tokens are there, or let by.

Nothing here is on the path of a client whose tenant and class have no bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

import trio

from pooler.admission.ticket import Ticket, TicketState
from pooler.admission.tolls import Toll, lacking, owed, pay
from pooler.errors import CostAboveBucket, PoolerError, RateLimited
from pooler.pool.early import count_refused, queue_full
from pooler.relay.waiting import wait_ended

if TYPE_CHECKING:
    from pooler.pool.pool import Pool

PAUSE_SECONDS_MIN = 0.001


class TollGate:
    """Of all pools of one worker; the time passes in a task of `nursery`, while somebody waits."""

    def __init__(self, nursery: trio.Nursery, clock: Callable[[], float] = monotonic) -> None:
        self._nursery, self._clock = nursery, clock
        self._lines: dict[Toll, None] = {}  # those that have a line
        self._runs = False
        self._passing: Ticket | None = None  # whose tokens are there, ahead of those behind it
        self._late_at = inf  # nobody's budget is over before
        self._changed = trio.Event()

    def admit(self, pool: Pool, ticket: Ticket) -> PoolerError | None:
        """What to refuse a started ticket with. Else it waits for tokens (`ticket.toll`) and is called, or it
        may be queued, and is to `pay` once it is."""
        if ticket is self._passing:
            self._passing = None  # this once
            return None
        now, tolls = ticket.queued_at, owed(ticket)
        for each in tolls:
            if each.fits_never():
                return _refused(ticket, each, CostAboveBucket(_never(ticket, each)))
        short = lacking(tolls, now) or next((each for each in tolls if each.line), None)
        if short is None:
            return None
        wait = short.seconds_until(now, len(short.line))
        klass = ticket.account.klass
        latest = min(ticket.deadline, now + klass.wait_seconds_max)
        if (short.terms is not None and not short.terms.delays) or now + wait > latest:
            return _refused(ticket, short, RateLimited(short_of(ticket, short, now), wait))
        if klass.waiting + sum(len(each.line) for each in tolls) >= klass.queue_max:
            return _refused(ticket, short, queue_full(ticket))
        ticket.deadline = latest
        self._wait(short, ticket, pool)
        return None

    def pay(self, ticket: Ticket) -> None:
        """It was admitted, and is queued or has a session: what is refused takes nothing."""
        pay(ticket, owed(ticket), ticket.queued_at)

    def _wait(self, toll: Toll, ticket: Ticket, pool: Pool) -> None:
        toll.wait(ticket, pool)
        self._lines[toll] = None
        self._late_at = min(self._late_at, ticket.deadline)
        if not self._runs:
            self._runs = True
            self._nursery.start_soon(self._run)

    def waiting(self, pool: Pool) -> Iterator[tuple[Ticket, int]]:
        """Who waits for tokens, of this pool, and as the how manyth of his line."""
        for toll in self._lines:
            yield from ((ticket, position) for position, (ticket, asks) in enumerate(toll.line.items(), 1)
                        if asks is pool)

    def end_late(self, now: float) -> None:
        """Whose budget is over without tokens, of all pools. Looks at nobody before the first may be late."""
        if now < self._late_at:
            return
        late = [(toll, ticket, pool) for toll in self._lines for ticket, pool in toll.line.items()
                if ticket.deadline <= now]
        for toll, ticket, pool in late:
            if ticket.toll is not toll:
                continue  # what one was told made another leave
            toll.forget(ticket)
            error = wait_ended(pool, ticket, now - ticket.queued_at, short_of(ticket, toll, now))
            ticket.end(TicketState.QUEUE_EXPIRED)
            ticket.refused(_refused(ticket, toll, error))
        self._late_at = min((ticket.deadline for toll in self._lines for ticket in toll.line), default=inf)

    def reject_all(self, pool: Pool) -> list[Ticket]:
        """Everybody of this pool: ended here; the caller tells their holders."""
        rejected = [ticket for ticket, _ in self.waiting(pool)]
        for ticket in rejected:
            ticket.toll.forget(ticket)
            ticket.end(TicketState.REJECTED)
        return rejected

    def stir(self) -> None:
        """A policy changed what is there."""
        self._changed.set()
        self._changed = trio.Event()

    async def _run(self) -> None:
        """Until nobody waits."""
        try:
            while self._lines:
                now = self._clock()
                pause = min(toll.seconds_until(now) for toll in self._lines)
                with trio.move_on_after(max(PAUSE_SECONDS_MIN, pause)):
                    await self._changed.wait()
                self.release(self._clock())
        finally:
            self._runs = False

    def release(self, now: float) -> None:
        """Let everybody by whose tokens are there."""
        for toll in list(self._lines):
            while toll.line and (toll.fits_never() or not toll.is_short(now)):
                ticket, pool = next(iter(toll.line.items()))
                toll.forget(ticket)
                self._let_by(pool, ticket, now)
            if not toll.line:
                self._lines.pop(toll, None)

    def _let_by(self, pool: Pool, ticket: Ticket, now: float) -> None:
        tolls = owed(ticket)
        short = lacking(tolls, now)
        never = next((each for each in tolls if each.fits_never()), None)
        if never is not None:  # a policy made it so meanwhile
            ticket.end(TicketState.REJECTED)
            ticket.refused(_refused(ticket, never, CostAboveBucket(_never(ticket, never))))
        elif short is None:
            ticket.queued_at = now  # what the pool may grant is decided by it; its deadline stays
            self._passing = ticket
            pool.enter(ticket)
            self._passing = None
        elif short.terms is not None and short.terms.delays:
            self._wait(short, ticket, pool)
        else:
            error = RateLimited(short_of(ticket, short, now), short.seconds_until(now))
            ticket.end(TicketState.REJECTED)
            ticket.refused(_refused(ticket, short, error))


def _refused(ticket: Ticket, toll: Toll, error: PoolerError) -> PoolerError:
    toll.refuse()
    count_refused(ticket)
    return error


def _whose(ticket: Ticket, toll: Toll) -> str:
    account = ticket.account
    other = f'class "{account.klass.name}"' if toll.kind == "tenant" else f'tenant "{account.tenant}"'
    return f'{toll.kind} "{toll.name}" ({other})'


def _what(toll: Toll) -> str:
    return "connection" if toll.terms is not None and toll.terms.per_connection else "transaction"


def short_of(ticket: Ticket, toll: Toll, now: float) -> str:
    """What there is of what this ticket has to pay."""
    waiting = f", and {len(toll.line)} wait for them" if toll.line else ""
    return (f"rate limit of {_whose(ticket, toll)}: a {_what(toll)} costs {toll.cost:g}, and of its "
            f"{toll.bucket.burst:g} tokens {toll.level(now):.3g} are there ({toll.bucket.rate:g} come in a "
            f"second{waiting})")


def _never(ticket: Ticket, toll: Toll) -> str:
    return (f"a {_what(toll)} of {_whose(ticket, toll)} costs {toll.cost:g}, and its bucket never holds more "
            f"than {toll.bucket.burst:g}")
