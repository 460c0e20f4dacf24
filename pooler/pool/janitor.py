"""What is done by the clock, one function per rule. Each takes `now` in seconds of the monotonic clock."""

from __future__ import annotations

from pooler.admission.ticket import Ticket
from pooler.pool.pool import Pool
from pooler.relay import owed as o
from pooler.relay.parting import end_if_late
from pooler.relay.server import ServerConn
from pooler.relay.waiting import wait_ended
from pooler.wire.messages import Fault, notice_response

IN_TRANSACTION, FAILED = 0x54, 0x45
OWN_QUERY_SECONDS_MAX = 10.0
WAITING = notice_response(Fault(
    "NOTICE", "01000", "No server connection available in postgres backend, client being queued"))
CANCELLED_SECONDS = 1.0  # for a client to end its transaction after a cancel


def end_late_waits(pool: Pool, now: float) -> None:
    """query_wait_timeout, pooler.deadline, or what its class lets a ticket wait: one past its deadline is
    answered."""
    for ticket in pool.core.expired(now) if pool.core.waiting else ():
        ticket.refused(wait_ended(pool, ticket, now - ticket.queued_at, why_waits(pool, ticket)))
    pool.parts.tollgate.end_late(now)


def why_waits(pool: Pool, ticket: Ticket) -> str:
    """What this ticket waits for."""
    account, klass = ticket.account, ticket.account.klass
    if account.executing >= account.inflight_max:
        return f'tenant "{account.tenant}" executes {account.executing} (inflight {account.inflight_max})'
    if klass.executing >= klass.allotted:
        return f'class "{klass.name}" executes {klass.in_use} of {klass.allotted} that this worker may'
    return why_none(pool)


def why_none(pool: Pool) -> str:
    """What a wait for a session of this pool is for."""
    view = pool.parts.permits.ledgers.get(pool.plan.ledger)
    if pool.core.paused:
        return "the database is paused"
    if pool.parts.cut_off.is_over:
        return "its worker's lease is over, and without one it grants nothing (on_ledger_loss: stop)"
    if view is None or not view.reachable:
        return "the ledger is unreachable, so that no new session may be opened"
    if view.state in ("LOST", "RECOVERING"):
        return f"the ledger is {view.state}: no new session may be opened before it is rebuilt"
    if view.frozen:
        return f"{view.frozen} froze it, so that no new session may be opened"
    if not view.epoch:
        return "no server was found yet that can serve it"
    if not view.serving:
        return f"epoch {view.epoch} drains"
    if pool.last_error is not None:
        return str(pool.last_error)
    return f"all {len(pool.core.active)} sessions of this worker are in use"


def end_hung_cleanups(pool: Pool, now: float) -> None:
    """The pooler's own queries (a clean-up, a rollback, a client's parameters) are answered soon, or the
    session is closed: nobody waits for it for ever."""
    for server in list(pool.core.active):
        if server.own and not server.closing and now - server.own_at > OWN_QUERY_SECONDS_MAX:
            server.give_up("one of the pooler's own queries was not answered")


def is_working(server: ServerConn) -> bool:
    """Whether a transaction is open on this session, or something of its client's is unanswered."""
    return bool(server.owed) or server.unsynced or server.status in (IN_TRANSACTION, FAILED)


def end_idle_transactions(pool: Pool, now: float) -> None:
    """idle_transaction_timeout: a client that holds a transaction and says nothing is disconnected."""
    limit = pool.plan.settings.idle_transaction_timeout_seconds
    if not limit:
        return
    for server in list(pool.core.active):
        client = server.client
        if client is not None and not server.owed and is_working(server) and (
                now - max(server.last_used, server.query_at) > limit):
            client.break_off("25P03", "idle transaction timeout")


def end_long_transactions(pool: Pool, now: float) -> None:
    """transaction_timeout: a transaction that lasts longer ends its client (FATAL) and, what runs there being
    cancelled, its session."""
    limit = pool.plan.settings.transaction_timeout_seconds
    if not limit:
        return
    for server in list(pool.core.active):
        if server.client is not None and is_working(server) and now - server.started_at > limit:
            server.client.break_off("25P04", "transaction timeout")


def end_long_queries(pool: Pool, now: float) -> None:
    """query_timeout: a query that runs longer ends its client (FATAL) and, cancelled, its session. Each of a
    pipeline has its own time, from the end of the one before it; a server tells nothing of those before a
    Sync until it comes there, so that they have their times together."""
    limit = pool.plan.settings.query_timeout_seconds
    if not limit:
        return
    for server in list(pool.core.active):
        late = now - server.query_at
        if server.client is not None and server.owed and late > limit and late > limit * _queries(server):
            server.client.break_off("57014", "query_timeout")


def _queries(server: ServerConn) -> int:
    """How many the server answers together."""
    count = 0
    for entry in server.owed:
        if entry == o.SYNC or entry == o.QUERY:
            break
        count += entry == o.EXECUTE
    return max(1, count)


def end_idle_clients(pool: Pool, now: float) -> None:
    """client_idle_timeout: a client without a session that says nothing is disconnected. One that keeps a
    session (session pooling) may be listening, and stays."""
    limit = pool.plan.settings.client_idle_timeout_seconds
    if not limit:
        return
    for client in list(pool.clients):
        if client.server is None and not client.ticket.waiting and (
                now - max(client.requested_at, client.idle_since) > limit):
            client.break_off("57P05", "client_idle_timeout")


def end_late_partings(pool: Pool, now: float) -> None:
    """Who is to go, and has not taken its last word within PARTING_SECONDS_MAX, goes without it."""
    for client in list(pool.clients):
        end_if_late(client, now)


def tell_who_waits(pool: Pool, now: float) -> None:
    """query_wait_notify: a client that has waited so long is told once that it waits."""
    limit = pool.plan.settings.query_wait_notify_seconds
    if not limit or not pool.core.waiting:
        return
    told = pool.notified_at
    for ticket in list(pool.core.waiting):
        if ticket.queued_at > now - limit:
            break
        if ticket.queued_at > told:
            pool.notified_at = max(pool.notified_at, ticket.queued_at)
            if ticket.holder in pool.clients:
                ticket.holder.deliver(WAITING)


def use_reserve(pool: Pool, now: float) -> None:
    """reserve_pool_size: sessions more while somebody has waited for reserve_pool_timeout."""
    core, plan = pool.core, pool.plan
    waited = now - core.oldest_wait() > plan.settings.reserve_pool_timeout_seconds
    if plan.reserve and waited:
        core.size_max = plan.size_max + plan.reserve
        pool.grow()
    elif not core.waiting:
        core.size_max = plan.size_max


def close_old_sessions(pool: Pool, now: float, growth_allowed: bool) -> None:
    """server_idle_timeout and server_lifetime; nothing is closed by choice while the ledger is away."""
    if not growth_allowed:
        return
    idle = pool.plan.settings.server_idle_timeout_seconds
    idle_before = now - idle if idle else float("-inf")
    for server in pool.core.retire_idle(now, idle_before, pool.plan.size_min):
        pool.retire(server, "server_lifetime or server_idle_timeout")


def replenish(pool: Pool, now: float) -> None:
    """min_pool_size: open what is missing, through the same gate and without waiting there; where others are
    at it, or no permit is left, it is looked at again each retain_connections_time. Of a user whom clients
    name only once one of them has got in."""
    core = pool.core
    may_get_in = pool.greeting is not None or pool.plan.is_forced
    is_short = core.total < pool.plan.size_min and now >= pool.growth.replenish_at
    if may_get_in and not core.blocked and is_short:
        core.opening += 1
        pool.growth.start()


def is_unused(pool: Pool, now: float) -> bool:
    """autodb_idle_timeout: whether nobody has come for this pool or held a session of it for so long.

    One that never had a session only keeps the pause after a refused login (server_login_retry). A client
    that is still being greeted is not seen here: no pool goes within the time of a login.
    """
    core, settings = pool.core, pool.plan.settings
    if pool.clients or core.total or core.waiting:
        pool.used_at = now
        return False
    if pool.greeting is None:
        return now - pool.used_at > settings.server_login_retry_seconds
    kept, login = settings.autodb_idle_timeout_seconds, settings.client_login_timeout_seconds
    return kept > 0 and login > 0 and now - pool.used_at > max(kept, login)


def end_overdue_drain(pool: Pool, now: float) -> None:
    """drain_timeout: what still runs under an epoch that drains, or is over, is cancelled, and closed if it
    is still there a moment later. A client that holds a transaction and runs nothing has nothing to cancel:
    it is disconnected at once. What is still being opened there is given up."""
    if pool.drain_at is None or now < pool.drain_at:
        return
    pool.growth.give_up_outlived()
    is_last = pool.drain_cancelled
    pool.drain_at, pool.drain_cancelled = (None, False) if is_last else (now + CANCELLED_SECONDS, True)
    for server in list(pool.core.active):
        if server.epoch > pool.core.epoch or (server.epoch == pool.core.epoch and pool.core.serving):
            continue
        if server.client is None or (server.owed and not is_last):
            pool.break_off_session(server)
        else:
            server.client.break_off("57P01", "the server of this session is drained (drain_timeout)")
