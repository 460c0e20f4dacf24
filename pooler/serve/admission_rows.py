"""SHOW CLASSES, TENANTS, TICKETS and WAITERS: one worker's rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from time import monotonic
from typing import Any

from pooler.admission.classes import UNLIMITED, ExecutionClass
from pooler.admission.foresight import expected_seconds
from pooler.admission.ticket import Ticket
from pooler.admission.tolls import Toll
from pooler.pool.early import sessions_of
from pooler.pool.pool import Pool
from pooler.relay.client import ClientConn
from pooler.relay.server import ServerConn
from pooler.serve.registry import Registry

Row = dict[str, Any]


def class_rows(registry: Registry) -> Iterator[Row]:
    """What each class may execute here, does, and who waits for it."""
    now = monotonic()
    for db, book in registry.parts.classes.all().items():
        for name, klass in book.classes.items():
            yield {
                "database": db, "class": name, "permits": _limit(klass.permits),
                "allotted": _limit(klass.allotted), "executing": klass.in_use, "waiting": klass.waiting,
                "max_queue": _limit(klass.queue_max), "oldest_wait_ms": _oldest_wait_ms(klass, now),
                "refused": klass.refused}


def tenant_rows(registry: Registry) -> Iterator[Row]:
    """Every tenant that has a client here, in each of its classes; its bucket is one for all of them."""
    now = monotonic()
    for db, book in registry.parts.classes.all().items():
        for account in book.accounts():
            yield {
                "database": db, "tenant": account.tenant, "class": account.klass.name,
                "weight": account.weight, "inflight": _limit(account.inflight_max),
                "executing": account.executing, "waiting": account.waiting, "served": account.served,
                "refused": account.refused, **_bucket(book.tolls.of_tenant(account.tenant), now)}


def _bucket(toll: Toll | None, now: float) -> Row:
    if toll is None:
        return dict.fromkeys(("rate", "burst", "tokens", "admitted_cost", "refused_cost"))
    return {"rate": toll.bucket.rate, "burst": toll.bucket.burst, "tokens": round(toll.level(now), 3),
            "admitted_cost": toll.admitted_cost, "refused_cost": toll.refused_cost}


def waiter_rows(registry: Registry) -> Iterator[Row]:
    """Everybody who waits for a session, and for what."""
    now = monotonic()
    for pool in registry.pools.values():
        ahead: Counter[ExecutionClass] = Counter()
        for ticket in pool.core.waiting:
            ahead[ticket.account.klass] += 1
            yield _waiter(pool, ticket, ahead[ticket.account.klass], now)
        for ticket, position in registry.parts.tollgate.waiting(pool):
            yield _waiter(pool, ticket, position, now)


def ticket_rows(registry: Registry) -> Iterator[Row]:
    """Every ticket that waits or executes: of clients, and of what the pooler itself does."""
    now = monotonic()
    for pool in registry.pools.values():
        for ticket in (*pool.core.waiting, *(each for each, _ in registry.parts.tollgate.waiting(pool))):
            yield _ticket(pool, ticket, None, now)
        for server in pool.core.active:
            held: Ticket | None = getattr(server.client, "ticket", None)
            if held is not None:
                yield _ticket(pool, held, server, now)


def _ticket(pool: Pool, ticket: Ticket, server: ServerConn | None, now: float) -> Row:
    account, client = ticket.account, ticket.holder
    known = client if isinstance(client, ClientConn) else None
    began = ticket.queued_at if server is None else server.started_at
    return {
        "database": pool.plan.name, "user": pool.plan.user, "ticket": known.ticket_id if known else "",
        "state": ticket.state.value, "client": known.address if known else "", "tenant": account.tenant,
        "class": account.klass.name, "waited_ms": int(max(0.0, (now if server is None else began)
                                                          - ticket.queued_at) * 1000),
        "executing_ms": None if server is None else int((now - began) * 1000),
        "permit": None if server is None else str(server.permit),
        "pid": None if server is None else server.pid}


def _waiter(pool: Pool, ticket: Ticket, position: int, now: float) -> Row:
    account, client = ticket.account, ticket.holder
    known = client if isinstance(client, ClientConn) else None
    expected = ticket.toll.seconds_until(now, position - 1) if ticket.toll is not None else expected_seconds(
        pool.core.waiting, account, sessions_of(pool), len(pool.core.active), now)
    return {
        "database": pool.plan.name, "user": pool.plan.user, "client": known.address if known else "",
        "application_name": known.application_name if known else "", "tenant": account.tenant,
        "class": account.klass.name, "position": position, "waited_ms": int((now - ticket.queued_at) * 1000),
        "bound_by": bound_by(pool, ticket),
        "expected_ms": None if expected is None else int(expected * 1000)}


def bound_by(pool: Pool, ticket: Ticket) -> str:
    """In a few words, what a ticket waits for."""
    account, core = ticket.account, pool.core
    if ticket.toll is not None:
        return f"{ticket.toll.kind} bucket"
    if core.paused:
        return "paused"
    if core.blocked or pool.parts.cut_off.is_over:
        return "draining or cut off"
    if account.executing >= account.inflight_max:
        return "tenant inflight"
    if account.klass.executing >= account.klass.allotted:
        return "class permits"
    return "session in opening" if core.opening else "session permits"


def _oldest_wait_ms(klass: ExecutionClass, now: float) -> int:
    since = min((group.oldest_queued_at() for group in klass.groups), default=now)
    return max(0, int((now - min(since, now)) * 1000))


def _limit(value: int) -> int | None:
    return None if value >= UNLIMITED else value
