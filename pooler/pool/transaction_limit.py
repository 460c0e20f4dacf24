"""How long a transaction of a class may last (`transactionLimit` of the policy), and what is done past it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from coordinator.session_table import decode_who
from pooler.pool.janitor import is_working
from pooler.relay.cancel import cancel_for
from pooler.relay.client import ClientConn

if TYPE_CHECKING:
    from pooler.pool.pool import Pool

CANCELLED_SECONDS = 5.0  # what was cancelled has so long to end by itself


def transaction_limit_seconds(policy: Mapping[str, Any], class_name: str) -> float:
    """The limit of a client's class; of one without a class of the policy, that of the first; 0: none."""
    classes: Mapping[str, Mapping[str, Any]] = policy.get("executionClasses") or {}
    own = classes.get(class_name) or next(iter(classes.values()), {})
    return float(own.get("transactionLimitSeconds") or 0.0)


def policy_of(pool: Pool) -> Mapping[str, Any]:
    """What is in force for its ledger, as far as this worker has heard."""
    view = pool.parts.permits.ledgers.get(pool.plan.ledger)
    return view.policy if view is not None else {}


def end_past_limit(pool: Pool, now: float) -> None:
    """What runs past the limit of its class is cancelled, once; a transaction that is still open five seconds
    later ends its client (FATAL) and its session. PgBouncer's transaction_timeout, where it is shorter, has
    done so before."""
    policy = policy_of(pool)
    limits = [float(each.get("transactionLimitSeconds") or 0.0)
              for each in (policy.get("executionClasses") or {}).values()]
    told, pool.past_limit = pool.past_limit, {}
    if not any(limits):
        return
    shortest = min(limits)
    for server in list(pool.core.active):
        client = server.client
        age = now - server.started_at
        if age <= shortest or not isinstance(client, ClientConn) or not is_working(server):
            continue
        class_name = decode_who(client.who)[1]
        limit = transaction_limit_seconds(policy, class_name)
        late = age - limit
        if not limit or late <= 0:
            continue
        if late > CANCELLED_SECONDS:
            client.break_off("25P04", f"transaction limit: one of class {class_name or 'default'!r} may last "
                                      f"{limit:g} s (transactionLimit)")
            continue
        pool.past_limit[server] = server.started_at
        if server.owed and told.get(server) != server.started_at:
            pool.parts.nursery.start_soon(partial(
                cancel_for, server, client, pool.plan.settings.cancel_wait_timeout_seconds))
