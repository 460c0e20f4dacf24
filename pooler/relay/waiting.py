"""How a client's wait for a session ends: by which limit, and what it is told. All off the hot path."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pooler.admission.budget import Limit, smallest
from pooler.admission.ticket import TicketState
from pooler.errors import NotServing, PoolerError, WaitEnded
from pooler.wire.own_parameters import shown_deadline

if TYPE_CHECKING:
    from pooler.pool.pool import Pool
    from pooler.relay.client import ClientConn

QUERY_WAIT_TIMEOUT, DEADLINE = "query_wait_timeout", "pooler.deadline"


def limit_of(pool: Pool, holder: Any) -> Limit:
    """What a wait of this holder ends by. A task (no client) has the pool's limit alone."""
    return smallest((Limit(QUERY_WAIT_TIMEOUT, pool.wait_timeout_seconds),
                     Limit(DEADLINE, getattr(holder, "deadline_seconds", math.inf))))


def wait_ended(pool: Pool, holder: Any, waited_seconds: float, why: str) -> WaitEnded:
    """What is said at the end of a wait, and `why` no session became free."""
    limit = limit_of(pool, holder)
    where = f"session of database {pool.plan.name!r} for user {pool.plan.user!r}"
    if limit.name == QUERY_WAIT_TIMEOUT and limit.seconds:
        return WaitEnded(
            f"query_wait_timeout: no {where} became free in {waited_seconds:.1f} s: {why}")
    value = shown_deadline(limit.seconds) if limit.seconds or limit.name == DEADLINE else "nowait"
    return WaitEnded(f"waited {waited_seconds * 1e3:.0f} ms for a {where}: {limit.name} = {value}: {why}")


def await_opening(client: ClientConn) -> bool:
    """Of a client that does not wait for a session in use: whether one is being opened that it may have. That
    is a wait for the connect alone; who waited before goes first, so that there has to be one for each."""
    core = client.pool.core
    if not core.paused and core.opening >= len(core.waiting):
        timeout = client.pool.plan.settings.server_connect_timeout_seconds or math.inf
        client.ticket.deadline = client.requested_at + timeout
        return True
    core.withdraw(client.ticket, TicketState.QUEUE_EXPIRED)
    return False


def why_refused(client: ClientConn) -> PoolerError:
    """Why a client was not even queued."""
    if client.ticket.state is TicketState.QUEUE_EXPIRED:
        pool = client.pool
        why = f"all {len(pool.core.active)} sessions of this worker are in use"
        return wait_ended(pool, client, 0.0, why)
    return client.pool.last_error or NotServing("no session can be had")
