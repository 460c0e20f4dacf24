"""One worker of the fleet: builds the parts, holds the nursery tree, and stops in order.

Started by the supervisor as `python -m pooler.worker --link-fd N`; what to be comes over that link, and its
end means that the supervisor is gone.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import structlog
import trio

from coordinator.link import Args, Link, LinkLost
from coordinator.logs import set_up_logging
from coordinator.session_table import SessionTable
from pooler.errors import PoolerError
from pooler.net.client_count import ClientCount
from pooler.net.listener import Acceptor, adopt
from pooler.net.login import CONSOLE_DATABASES, Door, ProxyRule
from pooler.net.name_counts import NameCounts
from pooler.net.proxy_protocol import PeerAddress, requires_header
from pooler.net.stream import KeepAlive
from pooler.observe.events import Event
from pooler.observe.http import serve_http
from pooler.pool import janitor, steering
from pooler.pool.cut_off import CutOff
from pooler.pool.gate import Gates
from pooler.pool.ledger_view import LedgerView
from pooler.pool.link_up import Identity
from pooler.pool.parts import Parts
from pooler.pool.permits import Permits
from pooler.pool.plan import keepalive_of
from pooler.pool.transaction_limit import end_past_limit
from pooler.relay.named import Names
from pooler.relay.reactor import Reactor
from pooler.serve.agent import serve_agent
from pooler.serve.authority import Authority
from pooler.serve.cancelling import Cancelling, cancel_address
from pooler.serve.changes import sweep_followed
from pooler.serve.commands import Commands
from pooler.serve.drain import drain_clients, end_clients
from pooler.serve.encryption import Encryption
from pooler.serve.entrance import Entrance
from pooler.serve.figures import Figures
from pooler.serve.fleet_view import FleetView, open_console
from pooler.serve.holder import WorkerHolder
from pooler.serve.leaving import Leaving
from pooler.serve.moving import Arrivals, arrivals_path
from pooler.serve.registry import PoolKey, Registry
from pooler.serve.standing import Standing
from pooler.settings import Settings
from pooler.wire.parameters import TrackedParameters
from pooler.wire.prepared import Statements
from pooler.wire.session_state import TextLook

TICK_SECONDS = 0.1
LIMIT_TICKS = 3
SLOW_TICKS = 10
AS_PGBOUNCER = frozenset({"pgbouncer"})
STATS_TICKS = 600  # stats_period 60 s
LOGINS_IN_FLIGHT_MAX = 2_000
CLOSE_SECONDS_MAX = 15.0
SETTLE_SECONDS_MAX = 5.0
ORPHAN_SECONDS_MAX = 3.0

log = structlog.get_logger()


class Worker:
    """All of one worker. `settings`, `spec` as the supervisor gave them."""

    def __init__(self, settings: Settings, spec: Args, link: Link, nursery: trio.Nursery) -> None:
        self.settings, self.spec, self._link = settings, spec, link
        run_dir = settings.fleet.run_dir
        boot_id = spec["boot_id"]
        self.holder = WorkerHolder()
        to_coordinator = partial(trio.open_unix_socket, spec["coordinator_socket"])
        self.permits = Permits(to_coordinator, _identity(spec, settings), self.holder)
        self.reactor = Reactor()
        self.tracked = TrackedParameters(settings.pool.track_extra_parameters)
        self.encryption = Encryption(settings)
        self.count = ClientCount(run_dir / "clients.cnt")
        look = TextLook(settings.pool.session_state_functions)
        self.parts = Parts(
            nursery=nursery, reactor=self.reactor, permits=self.permits,
            table=SessionTable.create(run_dir, boot_id), random=Random(),
            statements=Statements(look.residue), look=look,
            parameters_of=lambda statuses: self.tracked.from_statuses(statuses.items()),
            client_closed=self._client_closed, server_tls=self.encryption.servers,
            as_pgbouncer=settings.admin.as_pgbouncer)
        self.registry = Registry(settings, self.parts, names=NameCounts(run_dir / "names.cnt"))
        self.parts.gates = Gates(self.permits, spec["workers"])
        self.parts.cut_off = CutOff(
            lambda: self.registry.settings.failover.on_ledger_loss == "stop", self.permits.lease_left_seconds,
            self.registry.pools.values)
        self.permits.on_renewed(self.parts.cut_off.renewed)
        self.parts.names = Names(self.permits, nursery)
        self.permits.on_ticket_moved(self.parts.names.moved)
        self.permits.shares.count_in(self.parts.classes)
        self.parts.next_number = lambda: self.registry.numbers.reserve(self.permits.ordinal)
        self.parts.by_seat, self.parts.of_user = self.registry.by_seat, self.registry.of_user
        self.figures = Figures(self.registry, self.permits, spec["index"], boot_id)
        self.commands = Commands(self.registry, Standing(run_dir), self._take_settings)
        self.leaving = Leaving(self.registry, self.commands)
        self.fleet_view = FleetView(self.registry, self.permits, self.figures, link)
        cancelling = Cancelling(self.registry, self.holder, self.permits, nursery)
        self.entrance = Entrance(
            self.registry, self.count, cancelling.take, self._console, self.parts.parameters_of)
        self.acceptors: list[Acceptor] = []
        self.figures.logins_open = lambda: sum(acceptor.in_flight for acceptor in self.acceptors)
        self.figures.refusals = lambda: self.entrance.refusals
        self.figures.clients_of_host = self.count.total_alive
        self.figures.listening = lambda: chain.from_iterable(each.listening for each in self.acceptors)
        self.stopping = trio.Event()
        self.shutting_down = False
        self.authority = Authority(self.registry, _mock_key(run_dir))
        self.holder.registry = self.registry
        self.holder.show_rows = self.figures.rows
        self.holder.run_command = self.commands.run
        self.holder.epoch_heard = self._epoch_heard
        self._acknowledged: dict[str, int] = {}
        self._has_recalled = False

    # ---- parts that run

    def start(self, base: trio.Nursery, sessions: trio.Nursery) -> None:
        """Start everything but the sockets that let clients in."""
        base.start_soon(self.permits.run)
        base.start_soon(self.reactor.run)
        sessions.start_soon(self._tick)
        if self.settings.admin.as_pgbouncer:
            arrivals = arrivals_path(self.settings.fleet.run_dir, self.spec["index"])
            sessions.start_soon(Arrivals(self.registry, self.count, self.tracked, arrivals).serve)
        base.start_soon(serve_http, self.spec["http"], self.figures.http(self.settings))
        if self.spec.get("agent") is not None:
            base.start_soon(serve_agent, adopt(self.spec["agent"]), self.registry)

    def open_doors(self, logins: trio.Nursery) -> None:
        """Let clients in: the shared port and unix sockets, and one port per service."""
        shared, unix = ([adopt(fd) for fd in self.spec.get(kind, ())] for kind in ("listen", "unix"))
        doors: list[tuple[str | None, list[socket.socket]]] = [(None, shared), (None, unix)]
        doors += [(name, [adopt(fd)]) for name, fd in self.spec["services"].items()]
        for service, sockets in doors:
            handle = self.entrance.handler(service, partial(self._door, service))
            acceptor = Acceptor(
                sockets, handle, in_flight_max=LOGINS_IN_FLIGHT_MAX, keepalive=_of_clients(self.settings))
            self.acceptors.append(acceptor)
            if service is None:
                (self.leaving.doors if sockets is shared else self.leaving.unix_doors).append(acceptor)
            logins.start_soon(acceptor.run)

    def shut_doors(self) -> None:
        """Take no more clients."""
        self.registry.draining = True
        for acceptor in self.acceptors:
            acceptor.stop()

    async def _tick(self) -> None:
        """Everything that is done by the clock."""
        ticks = 0
        while True:
            await trio.sleep(TICK_SECONDS)  # noqa: TID251 - this is the worker's clock
            ticks += 1
            now = monotonic()
            if ticks % STATS_TICKS == 0:
                self.figures.end_period()
            if self.registry.suspended:
                continue  # nobody is late for what may not move
            sweep_followed(self.registry)
            if ticks % LIMIT_TICKS == 0:
                self.registry.keep_minimums()
            for key, pool in list(self.registry.pools.items()):
                janitor.end_late_waits(pool, now)
                janitor.end_overdue_drain(pool, now)
                if ticks % LIMIT_TICKS == 0:
                    janitor.end_idle_transactions(pool, now)
                    janitor.end_long_transactions(pool, now)
                    end_past_limit(pool, now)
                    janitor.end_long_queries(pool, now)
                    janitor.end_idle_clients(pool, now)
                    janitor.tell_who_waits(pool, now)
                    janitor.use_reserve(pool, now)
                    janitor.replenish(pool, now)
                if ticks % SLOW_TICKS == 0:  # once a second
                    janitor.end_hung_cleanups(pool, now)
                    janitor.end_late_partings(pool, now)
                    pool.successors.look(now)
                    janitor.close_old_sessions(pool, now, self.permits.growth_allowed(pool.plan.ledger))
                    if janitor.is_unused(pool, now) and self._is_automatic(key):
                        del self.registry.pools[key]

    def _is_automatic(self, key: PoolKey) -> bool:
        """Whether clients choose this pool's name, so that there may be any number of such."""
        return self.authority.files.userlist is None or key.name not in self.settings.databases

    # ---- clients

    def _door(self, service: str | None, peer: PeerAddress) -> Door:
        settings = self.settings
        must = requires_header(
            peer, at_service=service is not None, listen_proxy=settings.fleet.listen_proxy,
            networks=settings.fleet.proxy_protocol_from)
        gate = self.authority.rules(
            service, AS_PGBOUNCER if settings.admin.as_pgbouncer else frozenset())
        return Door(
            gate=gate, database_exists=lambda name: settings.database_for(name, service) is not None,
            proxy=ProxyRule.REQUIRED if must else ProxyRule.FORBIDDEN, tls=self.encryption.clients,
            shutting_down=self.shutting_down,
            console_users=frozenset((*settings.admin.users, *settings.admin.stats_users)),
            console_databases=AS_PGBOUNCER if settings.admin.as_pgbouncer else CONSOLE_DATABASES)

    def _client_closed(self, client: Any) -> None:
        self.registry.left(client)
        self.count.leave()

    async def _console(self, raw: Any, asked: Any) -> None:
        await open_console(raw, asked, self.registry, self.fleet_view)

    # ---- what the supervisor and the ledger say

    def _epoch_heard(self, view: LedgerView) -> None:
        if not self._has_recalled and view.reachable:  # from here on commands to the fleet reach us, too
            self._has_recalled = True
            self.commands.recall()
        if view.serving and self._acknowledged.get(view.db) != view.epoch:
            self._acknowledged[view.db] = view.epoch  # the pools were told first: none grants an older one
            self.permits.epoch_ack(view.db, view.epoch)

    async def drain(self, args: Args) -> Args:
        """Take no new client and let those here finish. The last at its sockets tells who comes why."""
        log.info(Event.WORKER_DRAINING, index=self.spec["index"])
        self.commands.wake()
        if args.get("last"):
            self.registry.draining = self.shutting_down = True
        else:
            self.shut_doors()
        await drain_clients(self.registry, self.figures.logins_open, args.get("timeout_seconds") or 0.0)
        return {"clients": len(self.registry.clients) + len(self.registry.replications)}

    async def stop(self, args: Args) -> Args:
        """Close every session with proof and end."""
        self.commands.wake()
        self.stopping.set()
        return {}

    async def reload(self, args: Args) -> Args:
        """Take over what may change while running."""
        spec = await self._link.call("spec")
        settings = Settings.from_wire(spec["config"])
        problems = self._take_settings(settings)
        self.commands.reloaded()
        return {"problems": problems}

    def _take_tls(self, settings: Settings) -> list[str]:
        problems, replaces = self.encryption.take(settings)
        self.parts.server_tls = self.encryption.servers
        if replaces:
            for pool in self.registry.pools.values():
                steering.reconnect(pool)
        return problems

    def _take_settings(self, settings: Settings) -> list[str]:
        """What of it could not be taken over; the rest is."""
        if settings.log != self.settings.log:
            set_up_logging(settings.log.format, settings.log.level, queries=settings.log.queries)
        problems = self._take_tls(settings)
        self.settings = self.registry.settings = settings
        self.registry.apply_settings()
        self.authority.take(settings)
        for acceptor in self.acceptors:
            acceptor.keepalive = _of_clients(settings)
        return [*self.authority.problems, *problems]

    async def status(self, args: Args) -> Args:
        """Figures for `fleet status`."""
        return self.figures.status()

    async def close_everything(self, seconds_max: float) -> None:
        """End clients and sessions; returns when every session is closed, or the time is over."""
        self.shut_doors()
        self.registry.stopping = True
        end_clients(self.registry)
        with trio.move_on_after(seconds_max):
            for pool in self.registry.pools.values():
                steering.stop(pool)
            while self.parts.servers or self.registry.replications:
                await self.parts.server_forgotten.wait()


def _identity(spec: Args, settings: Settings) -> Identity:
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return Identity(spec["boot_id"], spec["index"], os.getpid(), int(stat[19]), cancel_address(settings))


def _of_clients(settings: Settings) -> KeepAlive:
    return keepalive_of(settings.pool, KeepAlive(0, 0, 0))


def _mock_key(run_dir: Path) -> bytes:
    """A secret of this fleet that lasts: unknown users get the same salt from every worker at any time."""
    path, beside = run_dir / "mock.key", run_dir / f".mock.key.{os.getpid()}"
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(os.urandom(32))
    with suppress(FileExistsError):  # whole from the first moment: workers start side by side
        path.hardlink_to(beside)
    beside.unlink()
    return path.read_bytes()


async def run(link_fd: int) -> int:
    """Be a worker until the supervisor says stop, or is gone. The exit code: not 0 if it could not start."""
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(socket.socket(fileno=link_fd)))
    handlers: dict[str, Any] = {}
    link = Link(stream, handlers)
    async with trio.open_nursery() as base:
        base.start_soon(link.run)
        base.start_soon(_obey_signals, link)
        try:
            spec = await link.call("spec")
        except LinkLost:
            base.cancel_scope.cancel()
            return 0
        settings = Settings.from_wire(spec["config"])
        set_up_logging(settings.log.format, settings.log.level, queries=settings.log.queries)
        structlog.contextvars.bind_contextvars(worker=spec["index"])
        async with trio.open_nursery() as sessions:
            try:
                worker = Worker(settings, spec, link, sessions)
            except (PoolerError, OSError) as fault:
                base.cancel_scope.cancel()
                return _cannot_start(fault)
            handlers.update(drain=worker.drain, stop=worker.stop, reload=worker.reload, status=worker.status,
                            leave=worker.leaving.leave, order=worker.leaving.order)
            worker.start(base, sessions)
            await _serve(worker, link, sessions)
            sessions.cancel_scope.cancel()
        with trio.move_on_after(SETTLE_SECONDS_MAX):
            await worker.permits.settled()
        base.cancel_scope.cancel()
    return 0


def _cannot_start(fault: PoolerError | OSError) -> int:
    """Say in one line why, and what to do; the exit code."""
    log.error(Event.SOMETHING_FAILED, what="the worker cannot start", why="; ".join(str(fault).splitlines()),
              hint="mend it; the supervisor tries again by itself, and at once after `pooler fleet reload`")
    return fault.exit_code if isinstance(fault, PoolerError) else 1


async def _serve(worker: Worker, link: Link, sessions: trio.Nursery) -> None:
    async with trio.open_nursery() as logins:
        worker.open_doors(logins)
        link.notify("ready")
        async with trio.open_nursery() as waits:
            waits.start_soon(_first, worker.stopping, waits.cancel_scope)
            waits.start_soon(_first, link.lost, waits.cancel_scope)
        orphaned = link.lost.is_set() and not worker.stopping.is_set()
        await worker.close_everything(ORPHAN_SECONDS_MAX if orphaned else CLOSE_SECONDS_MAX)
        logins.cancel_scope.cancel()


async def _obey_signals(link: Link) -> None:
    """SIGTERM comes when the supervisor died: as the end of the link."""
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            link.lost.set()


async def _first(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def main() -> int:
    """The entry point."""
    parser = argparse.ArgumentParser(prog="pooler.worker")
    parser.add_argument("--link-fd", type=int, required=True)
    return trio.run(run, parser.parse_args().link_fd)


if __name__ == "__main__":
    sys.exit(main())
