"""Who is refused as he asks, and not after a wait: a full queue, or less time than the wait must take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pooler.admission.classes import UNLIMITED
from pooler.admission.foresight import expected_seconds
from pooler.errors import PoolerError, QueueFull, TooLate
from pooler.relay.waiting import limit_of
from pooler.wire.own_parameters import shown_deadline

if TYPE_CHECKING:
    from pooler.admission.ticket import Ticket
    from pooler.pool.pool import Pool


def count_refused(ticket: Ticket) -> None:
    """One more of its tenant and class that was not served for want of something."""
    ticket.account.refused += 1
    ticket.account.klass.refused += 1


def queue_full(ticket: Ticket) -> QueueFull:
    """As many wait as may."""
    account, klass = ticket.account, ticket.account.klass
    return QueueFull(
        f'the queue of class "{klass.name}" is full: {klass.waiting} wait for a session, and maxQueue is '
        f'{klass.queue_max} (tenant "{account.tenant}")')


def sessions_of(pool: Pool) -> int:
    """How many sessions this pool can count on: what it may have, or what it has while it gets no more."""
    core = pool.core
    return core.size_max if pool.last_error is None else len(core.idle) + len(core.active)


def too_late(pool: Pool, ticket: Ticket) -> PoolerError | None:
    """What to answer a ticket that was just queued, if it will not be served in time as far as can be told.
    PgBouncer tells nobody; one that does not wait at all is told by what is in use."""
    account, now = ticket.account, ticket.queued_at
    left = ticket.deadline - now
    if not account.klass.estimator.may_exceed(left, account.klass.waiting, now):
        return None  # as for most: no turn of anybody who waits takes longer than one execution
    core = pool.core
    if left <= 0 or pool.parts.as_pgbouncer or core.blocked:
        return None
    expected = expected_seconds(core.waiting, account, sessions_of(pool), len(core.active), now)
    if expected is None or expected <= left:
        return None
    klass, limit = account.klass, limit_of(pool, ticket)
    permits = f" of {klass.allotted}" if klass.allotted < UNLIMITED else ""
    return TooLate(
        f"{left * 1e3:.0f} ms are left ({limit.name} = {shown_deadline(limit.seconds)}), and a wait of "
        f'{expected * 1e3:.0f} ms is expected: class "{klass.name}" executes {klass.in_use}{permits} and '
        f'{klass.waiting - 1} of it wait before this (tenant "{account.tenant}")')
