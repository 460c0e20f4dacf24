"""Which sessions a worker's pools have, who has them, and which of them somebody has had for too long."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic

from coordinator.ledger.record import Permit
from coordinator.session_table import decode_who
from pooler.pool.holder import LateCheckout
from pooler.pool.janitor import is_working
from pooler.pool.pool import Pool
from pooler.pool.transaction_limit import policy_of, transaction_limit_seconds
from pooler.relay.client import ClientConn
from pooler.relay.server import ServerConn
from pooler.serve.registry import Registry


def pooled(registry: Registry) -> set[tuple[str, Permit]]:
    """See Holder.pooled. What is being closed is in no pool by right."""
    found = {(server.pool.plan.ledger, server.permit)
             for server in registry.parts.servers if server.closing}
    for pool in registry.pools.values():
        found |= {(pool.plan.ledger, server.permit) for server in (*pool.core.idle, *pool.core.active)}
    return found | {(each.plan.ledger, each.permit) for each in registry.replications.values()}


SHOWN_SECONDS = 1.0  # a checkout that is shorter is nobody's trouble
SHOWN_MAX = 1_000
FAILED = 0x45
_FIRST_WORD = re.compile(rb"[A-Za-z]{1,32}").search


@dataclass(frozen=True, slots=True)
class Checkout:
    """One session that somebody has: who, since when, and what it waits for."""

    pool: Pool
    server: ServerConn
    user: str  # as whom the client came; empty: the pooler itself
    client: str  # its address
    application_name: str
    tenant: str
    class_name: str
    why: str  # executing, idle in transaction, idle in transaction (aborted), held, being cleaned
    waits_for: str  # server or client
    last_command: str  # the first word of the last simple query; no text is told
    age_seconds: float
    silent_seconds: float  # since the one that is waited for last said something
    limit_seconds: float  # the transaction limit of the client's class; 0: none

    @property
    def is_late(self) -> bool:
        """Past the limit. A client that keeps its session is late in a transaction only."""
        return 0 < self.limit_seconds < self.age_seconds and self.why != "held" and self.user != ""

    @property
    def holder(self) -> str:
        """For a line of a log."""
        name = f" ({self.application_name})" if self.application_name else ""
        return (f"{self.user}@{self.pool.plan.name} from {self.client}{name}: {self.why}, waits for its "
                f"{self.waits_for} since {self.silent_seconds:.1f} s")


def checkout(pool: Pool, server: ServerConn, now: float) -> Checkout:
    """What a session in use is in use for."""
    client = server.client
    mine = client if isinstance(client, ClientConn) else None
    tenant, class_name = decode_who(mine.who)[:2] if mine is not None else ("", "")
    waits_for = "server" if server.owed or server.own else "client"
    spoke = max(server.last_used, server.query_at, server.own_at if server.own else 0.0)
    return Checkout(
        pool=pool, server=server, user=pool.plan.user if client is not None else "",
        client=mine.address if mine is not None else "",
        application_name=mine.application_name if mine is not None else "", tenant=tenant,
        class_name=class_name, why=_why(server), waits_for=waits_for,
        last_command=_command(client.last_sent) if client is not None else "",
        age_seconds=now - server.started_at, silent_seconds=max(0.0, now - spoke),
        limit_seconds=transaction_limit_seconds(policy_of(pool), class_name))


def _why(server: ServerConn) -> str:
    if server.client is None:
        return "being cleaned"
    if server.owed or server.own:
        return "executing"
    if server.status == FAILED:
        return "idle in transaction (aborted)"
    return "idle in transaction" if is_working(server) else "held"


def _command(text: bytes) -> str:
    """The first word of a Query's text, which its header may stand before."""
    found = _FIRST_WORD(text, 5 if text[:2] == b"Q\0" else 0)
    return found[0].decode().upper() if found else ""


def checkouts(registry: Registry) -> Iterator[Checkout]:
    """Every session in use."""
    now = monotonic()
    for pool in registry.pools.values():
        for server in pool.core.active:
            yield checkout(pool, server, now)


def late_checkouts(registry: Registry) -> list[LateCheckout]:
    """See Holder.late_checkouts. What the pooler itself does with a session is no checkout."""
    found = [LateCheckout(each.pool.plan.ledger, each.server.permit, each.server.pid, each.tenant,
                          int(each.age_seconds * 1e6), each.limit_seconds, each.holder)
             for each in checkouts(registry) if each.is_late]
    return sorted(found, key=lambda late: -late.age_us)


def leak_rows(registry: Registry) -> list[dict[str, str | int | None]]:
    """SHOW LEAKS: the permits that are open and that no pool has; then who has had a session for more than a
    second and what for, late ones first, the oldest before others."""
    found = sorted((each for each in checkouts(registry) if each.age_seconds > SHOWN_SECONDS),
                   key=lambda each: (not each.is_late, -each.age_seconds))
    return [*_lost_rows(registry), *map(_row, found)][:SHOWN_MAX]


def _row(each: Checkout) -> dict[str, str | int | None]:
    return {
        "database": each.pool.plan.name, "user": each.user or each.pool.plan.user,
        "permit": str(each.server.permit), "pid": each.server.pid, "why": each.why,
        "late": "yes" if each.is_late else "no", "age_ms": int(each.age_seconds * 1000),
        "limit_ms": int(each.limit_seconds * 1000) or None, "waits_for": each.waits_for,
        "silent_ms": int(each.silent_seconds * 1000), "client": each.client,
        "application_name": each.application_name, "tenant": each.tenant, "class": each.class_name,
        "last_command": each.last_command}


def _lost_rows(registry: Registry) -> Iterator[dict[str, str | int | None]]:
    for db, permit in sorted(registry.parts.permits.leaked(), key=str):
        yield {"database": db, "permit": str(permit), "why": "in no pool", "late": "yes"}
