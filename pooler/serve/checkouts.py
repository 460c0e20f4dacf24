"""Which sessions a worker's pools have, and which of them a client has had for too long."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

from coordinator.ledger.record import Permit
from coordinator.session_table import decode_who
from pooler.pool.holder import LateCheckout
from pooler.pool.janitor import is_working
from pooler.pool.pool import Pool
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


def late_checkouts(registry: Registry) -> list[LateCheckout]:
    """See Holder.late_checkouts."""
    now = monotonic()
    found = [late for pool in registry.pools.values() for server in pool.core.active
             if (late := _late(pool, server, registry, now)) is not None]
    return sorted(found, key=lambda late: -late.age_us)


def _late(pool: Pool, server: ServerConn, registry: Registry, now: float) -> LateCheckout | None:
    """A client that keeps its session (session pooling, or state on it) is late in a transaction only; what
    the pooler itself does with a session is no checkout."""
    client = server.client
    if client is None or (client.holds and not is_working(server)):
        return None
    view = registry.parts.permits.ledgers.get(pool.plan.ledger)
    tenant, class_name = decode_who(client.who)[:2] if isinstance(client, ClientConn) else ("", "")
    limit = transaction_limit_seconds(view.policy if view is not None else {}, class_name)
    age = now - server.started_at
    if not limit or age <= limit:
        return None
    return LateCheckout(pool.plan.ledger, server.permit, server.pid, tenant, int(age * 1e6), limit)


def transaction_limit_seconds(policy: Mapping[str, Any], class_name: str) -> float:
    """The limit of a client's class; of one without a class of the policy, that of the first; 0: none."""
    classes: Mapping[str, Mapping[str, Any]] = policy.get("executionClasses") or {}
    own = classes.get(class_name) or next(iter(classes.values()), {})
    return float(own.get("transactionLimitSeconds") or 0.0)
