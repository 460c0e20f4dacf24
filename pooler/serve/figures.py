"""What one worker tells of itself: statistics, SHOW rows, health, status. Reads, changes nothing."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from time import monotonic
from typing import Any

from pooler.net.tls import tls_text
from pooler.observe import rows as r
from pooler.observe import snapshot as s
from pooler.observe.http import Parts
from pooler.observe.metrics import WorkerMetrics
from pooler.pool.permits import Permits
from pooler.pool.pool import Pool
from pooler.relay.client import ClientConn
from pooler.relay.server import ServerConn
from pooler.serve import replication_rows
from pooler.serve.admission_rows import class_rows, tenant_rows, ticket_rows, waiter_rows
from pooler.serve.checkouts import leak_rows
from pooler.serve.config_rows import config_rows
from pooler.serve.descriptors import descriptor_rows
from pooler.serve.memory import memory_rows
from pooler.serve.registry import EVERY, Registry
from pooler.serve.stillness import ITEM as STILLNESS
from pooler.serve.stillness import close_needed, stillness_rows
from pooler.settings import Settings

VERSION = version("pooler")
_wall_minus_monotonic = time.time() - monotonic()


def _clock_us(at: float) -> int:
    return int((at + _wall_minus_monotonic) * 1e6)


class Figures:
    """The figures of one worker."""

    def __init__(self, registry: Registry, permits: Permits, index: int, boot_id: str) -> None:
        self._registry = registry
        self._permits = permits
        self._index = index
        self.boot_id = boot_id
        self._started_at = monotonic()
        self._before: dict[str, s.Totals] = {}
        self._period: dict[str, s.Totals] = {}
        self._period_seconds = 0.0
        self._period_at = monotonic()
        self.logins_open: Callable[[], int] = lambda: 0
        self.refusals: Callable[[], int] = lambda: 0
        self.clients_of_host: Callable[[], int] = lambda: 0
        self.listening: Callable[[], Iterable[socket.socket]] = lambda: ()

    # ---- one snapshot

    def statistics(self) -> s.WorkerStatistics:
        """Everything, at this moment."""
        registry, ledger = self._registry, self._permits.statistics()
        pools = tuple(pool_statistics(pool) for pool in registry.pools.values())
        views = self._permits.ledgers
        tolls = {(db, toll.name): toll for db, book in registry.parts.classes.all().items()
                 for toll in book.tolls.tenants()}
        return s.WorkerStatistics(
            worker=str(self._index), version=VERSION, started_at_us=_clock_us(self._started_at),
            state=self.state(), pools=pools,
            stats=r.stats_rows(pools, {}, self._period, self._period_seconds),
            clients_max=registry.settings.pool.max_client_conn, logins_open=self.logins_open(),
            logins_refused={"any": self.refusals()},
            prepared_statements=len(registry.parts.statements),
            prepared_text_bytes=registry.parts.statements.text_bytes,
            link_up=ledger.linked, links_lost=ledger.links_lost_total,
            ledger_reachable={db: view.reachable for db, view in views.items()},
            epochs={db: view.epoch for db, view in views.items()},
            policy_generations={db: view.policy_generation for db, view in views.items()},
            permits=ledger.held, permits_granted=ledger.granted_total,
            permits_refused=ledger.refused_total, permits_gone=ledger.permits_gone_total,
            permits_unknown=ledger.unknown_total,
            tenants_admitted_cost={key: toll.admitted_cost for key, toll in tolls.items()},
            tenants_refused_cost={key: toll.refused_cost for key, toll in tolls.items()})

    def state(self) -> str:
        """active, paused, suspended or draining."""
        registry = self._registry
        if registry.draining or registry.suspended:
            return "draining" if registry.draining else "suspended"
        each = not registry.settings.admin.as_pgbouncer and all(
            map(registry.is_paused, registry.settings.databases))
        return "paused" if each or EVERY in registry.paused else "active"

    def end_period(self) -> None:
        """Once a stats_period: what was done in it becomes the averages."""
        totals: dict[str, s.Totals] = {}
        for pool in self._registry.pools.values():
            name = pool.plan.name
            totals[name] = totals.get(name, s.Totals()) + pool_totals(pool)
        now = monotonic()
        self._period = {n: t - self._before.get(n, s.Totals()) for n, t in totals.items()}
        self._period_seconds, self._period_at = now - self._period_at, now
        self._before = totals

    # ---- what others read

    def rows(self, what: str) -> list[Any]:
        """This worker's rows of a SHOW, by item name in lower case."""
        known = r.statistics_rows(self.statistics(), what)
        if known is not None:
            return known
        makers: dict[str, Callable[[], Iterable[Any]]] = {
            "clients": self._clients, "servers": self._servers, "databases": self._databases,
            "users": self._users, "lists": self._lists, "workers": self._worker,
            "config": self._config, STILLNESS: self._stillness, "fds": self._descriptors,
            "mem": partial(memory_rows, self._registry), "leaks": partial(leak_rows, self._registry),
            "classes": partial(class_rows, self._registry), "tenants": partial(tenant_rows, self._registry),
            "tickets": partial(ticket_rows, self._registry), "waiters": partial(waiter_rows, self._registry),
        }
        make = makers.get(what)
        return [] if make is None else list(make())

    def http(self, settings: Settings) -> Parts:
        """The pages of this worker."""
        metrics = WorkerMetrics(self.statistics)
        token = settings.http.token.get_secret_value() if settings.http.token is not None else None
        return Parts(ready=self.ready, metrics=metrics.render, token=token)

    def ready(self, role: str) -> str:
        """Why this worker does not serve `role` ("" for any), "" if it does. KeyError: no such role."""
        registry = self._registry
        if registry.draining:
            return "draining"
        wanted = [d for d in registry.settings.databases.values() if not role or d.role == role]
        if role and not wanted:
            raise KeyError(role)
        reasons = [self._not_ready(database.ledger, role) for database in wanted]
        return "" if "" in reasons else (reasons[0] if reasons else "no database")

    def _not_ready(self, db: str, role: str) -> str:
        view = self._permits.ledgers.get(db)
        if view is None or not view.epoch:
            return f"no ledger heard of {db}"
        if not view.serving:
            return f"epoch {view.epoch} of {db} drains"
        if role == "write" and view.backend is not None and view.backend.in_recovery:
            return f"the backend of {db} is in recovery"
        pools = [pool for pool in self._registry.pools.values() if pool.plan.ledger == db]
        served = any(pool.core.idle or pool.core.active for pool in pools)
        found = (pool.growth.unfit(monotonic(), has_sessions=served) for pool in pools)
        return next(filter(None, found), "")

    def status(self) -> dict[str, Any]:
        """Figures for `fleet status`."""
        pools = list(self._registry.pools.values())
        return {
            "state": self.state(), "clients": len(self._registry.clients) + len(self._registry.replications),
            "waiting": sum(pool.core.count_waiting() for pool in pools),
            "sessions": len(self._registry.parts.servers),
            "sessions_busy": sum(len(pool.core.active) for pool in pools),
            "transactions": sum(pool.transactions for pool in pools),
            "holders": holders(self._registry),
            "set": dict(self._registry.set_here),
            "linked": self._permits.statistics().linked,
            "epochs": {db: view.epoch for db, view in self._permits.ledgers.items()},
        }

    # ---- rows

    def _clients(self) -> Iterable[r.Row]:
        now = monotonic()
        for pool in self._registry.pools.values():
            for client in pool.clients:
                yield r.socket_row(client_row(pool, client, now, self._registry.numbers.number(client)))
        yield from map(r.socket_row, replication_rows.client_rows(self._registry, _clock_us))

    def _servers(self) -> Iterable[r.Row]:
        for server, number in self._registry.parts.servers.items():
            yield r.socket_row(server_row(server, number))
        yield from map(r.socket_row, replication_rows.server_rows(self._registry, _clock_us))

    def _databases(self) -> Iterable[r.Row]:
        registry = self._registry
        for name, database in registry.settings.databases.items():
            pools = list(registry.by_name(name))
            view = self._permits.ledgers.get(database.ledger)
            host, _, port = (view.address if view is not None and view.address else
                             str(database.hosts[0])).rpartition(":")
            yield r.database_row(s.DatabaseRow(
                name=name, host=host, port=int(port or 0), database=database.dbname or name,
                force_user=database.user, pool_size=registry.settings.pool_size(name),
                min_pool_size=database.min_pool_size or registry.settings.pool.min_pool_size,
                reserve_pool_size=database.reserve_pool_size or registry.settings.pool.reserve_pool_size,
                pool_mode=registry.settings.pool_mode(name),
                max_connections=int(view.policy.get("serverSessionPermits", 0)) if view is not None else 0,
                current_connections=sum(pool.core.total for pool in pools),
                max_client_connections=_limit(database.max_db_client_connections,
                                              registry.settings.pool.max_db_client_connections),
                current_client_connections=sum(len(pool.clients) for pool in pools),
                paused=registry.is_paused(name), disabled=name in registry.disabled))

    def _users(self) -> Iterable[r.Row]:
        """Sessions are those of the user they log in as, clients those of the user who came."""
        sessions, clients = Counter[str](), Counter[str]()
        for key, pool in self._registry.pools.items():
            sessions[pool.plan.user] += pool.core.total
            clients[key.user] += len(pool.clients)
        settings = self._registry.settings
        for name in {**sessions, **clients}:
            own = settings.user(name)
            yield r.user_row(s.UserRow(
                name=name, pool_size=own.pool_size, reserve_pool_size=own.reserve_pool_size,
                pool_mode=own.pool_mode,
                max_user_connections=_limit(own.max_user_connections, settings.pool.max_user_connections),
                current_connections=sessions[name],
                max_user_client_connections=_limit(own.max_user_client_connections,
                                                   settings.pool.max_user_client_connections),
                current_client_connections=clients[name]))

    def _lists(self) -> Iterable[r.Row]:
        users = {pool.plan.user for pool in self._registry.pools.values()}
        return r.lists_rows(
            self.statistics(), databases=len(self._registry.settings.databases), users=len(users),
            clients=self.clients_of_host())

    def _config(self) -> Iterable[r.Row]:
        return config_rows(self._registry.settings, self._registry.set_here)

    def _descriptors(self) -> Iterable[r.Row]:
        return descriptor_rows(self._registry, self.listening())

    def _stillness(self) -> Iterable[r.Row]:
        return stillness_rows(self._registry)

    def _worker(self) -> Iterable[r.Row]:
        status = self.status()
        return [{"index": self._index, "boot_id": self.boot_id, "state": status["state"],
                 "clients": status["clients"], "waiting": status["waiting"], "sessions": status["sessions"],
                 "linked": int(status["linked"])}]


def _limit(own: int | None, of_all: int) -> int:
    return of_all if own is None else own


def holders(registry: Registry, most: int = 5) -> list[str]:
    """Who keeps this worker from being drained, longest first."""
    now = monotonic()
    busy = [(client.requested_at, client) for client in registry.clients.values()
            if client.server is not None or client.ticket.waiting]
    busy.sort(key=lambda pair: pair[0])
    return [f"{client.pool.plan.user}@{client.pool.plan.name} from {client.address}: "
            f"{'waits' if client.ticket.waiting else 'in transaction'} for {now - since:.0f} s"
            for since, client in busy[:most]]


def pool_totals(pool: Pool) -> s.Totals:
    """Counters of one pool."""
    return s.Totals(
        server_assignments=pool.assignments, transactions=pool.transactions, queries=pool.queries,
        received_bytes=pool.received_bytes, sent_bytes=pool.sent_bytes,
        transaction_us=int(pool.transaction_times.sum_seconds * 1e6), query_us=int(pool.query_seconds * 1e6),
        wait_us=int(pool.waits.sum_seconds * 1e6), client_logins=pool.logins,
        client_parses=pool.client_parses, server_parses=pool.server_parses, binds=pool.binds)


def pool_statistics(pool: Pool) -> s.PoolStatistics:
    """One pool at this moment."""
    count = pool.core.count()
    oldest = 0.0 if count.oldest_queued_at is None else monotonic() - count.oldest_queued_at
    clients = len(pool.clients)
    return s.PoolStatistics(
        database=pool.plan.name, user=pool.plan.user, pool_mode=pool.plan.mode,
        clients_active=min(clients, count.active), clients_waiting=count.waiting,
        clients_idle=max(0, clients - count.active - count.waiting),
        sessions_active=count.active, sessions_idle=count.idle,
        sessions_opening=count.opening - pool.growth.expecting, scaling=asdict(pool.growth.counts),
        sessions_closing=count.closing, longest_wait_us=int(oldest * 1e6), size_max=pool.plan.size_max,
        paused=pool.core.paused, totals=pool_totals(pool), errors=pool.errors,
        sessions_opened=pool.sessions_opened, sessions_closed=pool.sessions_closed,
        sessions_lost=pool.sessions_lost, clients_pinned=len(pool.pinned), residues=dict(pool.states_left),
        waits=pool.waits.value(),
        transaction_times=pool.transaction_times.value())


def client_row(pool: Pool, client: ClientConn, now: float, number: int) -> s.ClientRow:
    """SHOW CLIENTS."""
    host, _, port = client.address.rpartition(":")
    waiting = client.ticket.waiting
    local = _name_of(client.sock.getsockname())
    return s.ClientRow(
        user=pool.plan.user, database=pool.plan.name,
        state="waiting" if waiting else ("active" if client.server is not None else "idle"),
        address=host, port=int(port or 0), local_address=local[0], local_port=local[1],
        connected_at_us=_clock_us(client.connected_at), requested_at_us=_clock_us(client.requested_at),
        wait_us=int((now - client.ticket.queued_at) * 1e6) if waiting else 0,
        pointer=f"{id(client):#x}", link=f"{id(client.server):#x}" if client.server is not None else "",
        remote_pid=0, tls=tls_text(client.sock), application_name=client.application_name,
        prepared_statements=len(client.statements) if client.statements is not None else 0,
        id=number)


def server_row(server: ServerConn, number: int) -> s.ServerRow:
    """SHOW SERVERS."""
    plan = server.pool.plan
    host, _, port = server.opened.backend.address.rpartition(":")
    local = _name_of(server.sock.getsockname()) if not server.closing else ("", 0)
    state = "being_canceled" if server.cancels else ("active" if server.client is not None else "idle")
    return s.ServerRow(
        user=plan.user, database=plan.name, state=state, address=host, port=int(port or 0),
        local_address=local[0], local_port=local[1], connected_at_us=_clock_us(server.connected_at),
        requested_at_us=_clock_us(server.query_at), close_needed=close_needed(server),
        pointer=f"{id(server):#x}", link=f"{id(server.client):#x}" if server.client is not None else "",
        remote_pid=server.pid, tls="" if server.closing else tls_text(server.sock),
        prepared_statements=len(server.statements),
        application_name=(server.parameters.get(b"application_name") or b"").decode(errors="replace"),
        permit=str(server.permit), epoch=server.epoch, id=number)


def _name_of(name: Any) -> tuple[str, int]:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else ("unix", 0)
