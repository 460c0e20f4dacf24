"""What a reload does to the pools there are: other limits, another database behind a name, another server.

A pool whose sessions would be of another database closes them as they fall idle; one whose ledger is another
is followed by a new pool, which gets its clients one by one, each as soon as it holds nothing of the old one.
Where the console stands for PgBouncer's, clients of a database that is gone from the file are told so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from pooler.observe.events import Event
from pooler.pool import steering
from pooler.pool.plan import PoolPlan, plan_for
from pooler.relay.moving import change_pool

if TYPE_CHECKING:
    from pooler.pool.pool import Pool
    from pooler.serve.registry import PoolKey, Registry

log = structlog.get_logger()


def apply_changes(registry: Registry) -> None:
    """Bring every pool to what the registry's settings say now."""
    for key, pool in list(registry.pools.items()):
        if registry.settings.database_for(key.name, None) is None:
            if registry.settings.admin.as_pgbouncer:
                _remove(registry, key, pool)
            continue
        plan = plan_for(registry.settings, key.name, key.user, pool.plan.secret, key.service,
                        forces_user=key.forces_user)
        if plan.ledger != pool.plan.ledger:
            _follow(registry, key, pool)
        else:
            is_other = _place_of(plan) != _place_of(pool.plan)
            pool.apply_settings(plan)
            if is_other:
                log.info(Event.POOL_CHANGED, database=key.name, user=key.user)
                steering.reconnect(pool)


def sweep_followed(registry: Registry) -> None:
    """Move clients on whose pool has been followed by another; forget it once nothing of it is left."""
    for old, new in list(registry.followed.items()):
        for client in list(old.clients):
            change_pool(client, new)
        if not old.clients and not old.core.total:
            del registry.followed[old]


def _place_of(plan: PoolPlan) -> tuple[str, str]:
    return plan.dbname, plan.user


def _follow(registry: Registry, key: PoolKey, old: Pool) -> None:
    log.info(Event.POOL_CHANGED, database=key.name, user=key.user)
    del registry.pools[key]
    new = registry.pool(key.name, key.user, key.service, old.plan.secret, forces_user=key.forces_user)
    for before, after in registry.followed.items():
        if after is old:
            registry.followed[before] = new
    registry.followed[old] = new
    steering.reconnect(old)
    sweep_followed(registry)


def _remove(registry: Registry, key: PoolKey, pool: Pool) -> None:
    for client in list(pool.clients):
        client.break_off("08P01", "database removed")
    steering.reconnect(pool)
    pool.close_idle("database removed")
    if not pool.core.total and not pool.clients:
        del registry.pools[key]
