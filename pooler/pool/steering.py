"""What a pool does when its ledger or the operator says that sessions of now are of yesterday."""

from __future__ import annotations

from time import monotonic

import structlog

from pooler.errors import NotServing
from pooler.observe.events import Event
from pooler.pool.ledger_view import LedgerView
from pooler.pool.pool import IDLE, Pool
from pooler.relay.leaving import CHANGED
from pooler.relay.server import ServerConn

NO_SLOT = "its policy has fewer slots now"

log = structlog.get_logger()


def ledger_changed(pool: Pool, view: LedgerView) -> None:
    """Sessions of another epoch, or of one that drains, serve nobody from here on."""
    core = pool.core
    changed = (view.epoch, view.serving) != (core.epoch, core.serving)
    core.epoch, core.serving = view.epoch, view.serving
    core.ages = view.has_successors  # else nothing is closed by age
    if not core.ages:
        _keep_given_up(pool)
    if changed:
        if view.epoch:
            log.info(Event.EPOCH_CHANGED, database=pool.plan.name, epoch=view.epoch, serving=view.serving)
        limit = view.drain_timeout_seconds  # none: a drain given up, or an epoch nobody drained for
        pool.drain_at = None if view.serving and not limit else monotonic() + limit
        pool.drain_cancelled = False
        pool.growth.outlive()
        _begin_anew(pool)
    pool.wake()


def reconnect(pool: Pool) -> None:
    """Every session of now is closed as it falls idle; who refused us is asked again at once."""
    pool.core.generation += 1
    if pool.plan.settings.server_fast_close:
        _break_off_holders(pool)
    _begin_anew(pool)
    pool.grow()


def _begin_anew(pool: Pool) -> None:
    pool.growth.forget()
    pool.starts.forget()
    for server in pool.core.retire_idle(monotonic(), float("-inf"), 0):
        pool.retire(server, "its epoch or generation is over")


def _break_off_holders(pool: Pool) -> None:
    """Clients with a session of their own go now, or as their transaction ends."""
    for server in list(pool.core.active):
        client = server.client
        if client in pool.clients and pool.holds_session:
            if server.owed or server.unsynced or server.status != IDLE:
                server.retire = CHANGED
            else:
                client.break_off("57P01", CHANGED)


def give_up(pool: Pool, server: ServerConn) -> None:
    """Its policy has no slot for this session any more: it is closed, or as it falls idle."""
    if server in pool.core.idle:
        pool.retire(server, NO_SLOT)
    elif server in pool.core.active:
        server.retire = server.retire or NO_SLOT


def _keep_given_up(pool: Pool) -> None:
    """Nobody could say now that its slot is free again."""
    for server in pool.core.active:
        if server.retire == NO_SLOT:
            server.retire = ""


def stop(pool: Pool) -> None:
    """The worker ends: refuse who waits, close what is idle; the rest closes as it falls idle."""
    pool.core.serving = False
    pool.refuse_waiting(NotServing("the pooler is shutting down"))
    pool.close_idle("the worker stops")
