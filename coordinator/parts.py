"""The parts of one coordinator over one store, and the nursery they live in."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog
import trio

from coordinator import commands, inspect
from coordinator.alerting import Alerting
from coordinator.alerts import Alert
from coordinator.allotting import Allotting
from coordinator.awaiting import Publishing
from coordinator.counting import Counting
from coordinator.deaths import bury_earlier_boots
from coordinator.election import Election, Leader
from coordinator.etcd_health import EtcdHealth, Health
from coordinator.events import Event
from coordinator.failover import Failover
from coordinator.founding import Founder
from coordinator.freeing import Freeing
from coordinator.granting import Granting
from coordinator.homes import Homes
from coordinator.http import Figures, serve_http
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.record import LedgerState, UnknownSchema
from coordinator.link import Args
from coordinator.looks import Looker, LookFailed
from coordinator.noting import Noting
from coordinator.opening import etcd_tls_context
from coordinator.reach import Reach, Sight
from coordinator.rebuild import Rebuilder
from coordinator.reconcile import Reconciler
from coordinator.recovering import Recovering
from coordinator.registry import Registry, read_kernel_boot_id
from coordinator.relocating import Relocating
from coordinator.remembered import Remembered
from coordinator.room import Room
from coordinator.serve_workers import WorkerServer
from coordinator.shadowing import Shadowing
from coordinator.sharing import Sharing
from coordinator.spec import CoordinatorSpec
from coordinator.store.api import Compare, Store, StoreUnavailable, StoreUnknown
from coordinator.tickets import TicketReaper
from coordinator.view import View, Views

FOUNDING_INTERVAL_SECONDS = 1.0
SWEEP_INTERVAL_SECONDS = 30.0
SOCKET_BACKLOG = 128

_log = structlog.get_logger("coordinator")


def now_us() -> int:
    """The wall clock, as stored in records: shown, never compared."""
    return time.time_ns() // 1000


class Coordinator:
    """The parts of one coordinator over one store, and the nursery they live in."""

    def __init__(self, spec: CoordinatorSpec, store: Store, looker: Looker, remembered: Remembered) -> None:
        self.spec = spec
        self.store = store
        self.looker = looker
        self.keys = FleetKeys(spec.prefix, spec.fleet)
        databases = spec.ledgers()
        self.ledgers = {
            db: Ledger(store, self.keys.db(db), self.keys, now_us, memory=remembered.memory(db))
            for db in databases
        }
        self.views = Views(store, self.keys, databases, remembered, ttl_seconds=spec.lease_ttl_seconds)
        self.registry = Registry(
            store, self.keys, databases, host=spec.host, machine_id=spec.machine_id,
            kernel_boot_id=read_kernel_boot_id(), ttl_seconds=spec.lease_ttl_seconds, now_us=now_us)
        self.granting = Granting(store, self.views, self.ledgers, self.registry, host=spec.host)
        self.workers = WorkerServer(
            store, self.views, self.ledgers, self.registry, self.granting, host=spec.host,
            ttl_seconds=spec.lease_ttl_seconds, rows=self.rows)
        self.recovering = Recovering(
            store, self.views, self.ledgers, self.registry, host=spec.host, now_us=now_us)
        self.workers.on_hello.append(self.recovering.stir)
        self.relocating = Relocating(
            self.views, self.ledgers, self.registry, self.granting, ttl_seconds=spec.lease_ttl_seconds)
        self.workers.on_hello.append(self.relocating.stir)
        self.rebuilder = Rebuilder(store, self.views, self.ledgers, databases, looker, now_us=now_us)
        self.founder = Founder(
            store, self.keys, databases, looker, patroni=bool(spec.patroni), remembered=remembered)
        self.election = Election(
            store, self.keys, Leader(spec.host, os.getpid(), now_us()), ttl_seconds=spec.lease_ttl_seconds)
        sight = Sight(looker)
        self.reach = Reach(store, self.keys, self.election, sight, host=spec.host,
                           ttl_seconds=spec.lease_ttl_seconds)
        self.etcd = EtcdHealth(store, getattr(store, "endpoints", ()), etcd_tls_context(spec))
        self.homes = Homes(store, self.keys, self.reach.key, (*self.ledgers.values(), self.workers.creating),
                           ttl_seconds=spec.lease_ttl_seconds)
        tickets = TicketReaper(store, self.keys, self.workers.tickets)
        self.reconciler = Reconciler(
            store, self.keys, self.ledgers, self.views, sight, spec=spec, now_us=now_us, tickets=tickets)
        self.freeing = Freeing(store, self.keys, databases)
        self.reconciler.on_event.append(self.freeing.heard)
        self.sharing = Sharing(store, self.keys, self.ledgers, self.views, self.granting.wants)
        self.allotting = self._allotting()
        self.publishing = Publishing(
            store, self.keys, self.reconciler.backends.waits, host=spec.host,
            lease_id=lambda: self.election.lease_id, ttl_seconds=spec.lease_ttl_seconds)
        self.reconciler.owners.on_unknown.append(self.workers.became_unknown)
        self.reconciler.backends.on_released.append(self.workers.was_released)
        self.failover = Failover(spec, store, self.keys, self.ledgers, self.views, looker, now_us=now_us)
        self.failover.on_released.append(self.workers.was_released)
        self.reconciler.owners.on_unknown.append(self.failover.became_unknown)
        self.workers.on_backend_hint.append(self.failover.hint)
        self.alerting = Alerting(
            store, self.views, self.registry, host=spec.host, run_dir=Path(spec.run_dir),
            ttl_seconds=spec.lease_ttl_seconds, clock_us=self.reconciler.backends.clock_us)
        self.workers.on_report.append(self.alerting.reported)
        self.reconciler.owners.watched_here = self.alerting.watches
        self.counting = Counting(sight, self.ledgers, self.views_now, ttl_seconds=spec.lease_ttl_seconds)
        self.noting = Noting(self.ledgers, lambda: self.registry.workers, run_dir=Path(spec.run_dir),
                             ttl_seconds=spec.lease_ttl_seconds)
        self.reconciler.owners.on_unknown.append(lambda *_: self.noting.stir())
        self.room = Room(store, self.keys, looker, databases, self.views_now, now_us=now_us)
        self.views.on_change.append(self.room.heard)
        self.shadowing = Shadowing(store, self.keys, self.views_now, host=spec.host,
                                   ttl_seconds=spec.lease_ttl_seconds, now_us=now_us)
        self.workers.on_decided.append(self.shadowing.decided)
        self._incomplete = trio.Event()
        self._met: set[str] = set()  # ledgers that were reachable once
        self._another = trio.Event()  # one more was met: it need not wait for the next round
        self._compared: set[str] = set()  # ledgers whose policy file was held beside the active one
        self.views.on_change.append(self._seen)

    def _allotting(self) -> Allotting:
        """The leader's part in execution permits, and what this host's needs of the others."""
        shares = self.workers.shares
        shares.leading = lambda: self.election.leading
        shares.lease_id = lambda: self.reach.lease_id
        self.election.on_holder.append(shares.stir)
        allotting = Allotting(self.store, self.keys, self.ledgers, self.views, shares, host=self.spec.host,
                              ttl_seconds=self.spec.lease_ttl_seconds)
        self.reconciler.on_event += [self.sharing.heard, allotting.heard]
        return allotting

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled; `started` when workers can connect."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.views.run)
            nursery.start_soon(self._found)
            for ledger in self.ledgers.values():
                nursery.start_soon(ledger.run)
            nursery.start_soon(self.granting.run)
            nursery.start_soon(self.workers.shares.run)
            nursery.start_soon(self.shadowing.run)
            nursery.start_soon(self.recovering.run)
            nursery.start_soon(self.relocating.run)
            nursery.start_soon(self.failover.run)
            nursery.start_soon(self.election.run, self._lead)
            nursery.start_soon(self.alerting.run)
            nursery.start_soon(self.noting.run)
            nursery.start_soon(self.reach.run)
            nursery.start_soon(self.homes.run)
            nursery.start_soon(self._sweep_tables)
            nursery.start_soon(self._bury_commands)
            nursery.start_soon(self._bury_earlier_boots)
            await nursery.start(self._serve_socket)
            if self.spec.http_fd is not None:
                nursery.start_soon(serve_http, self.spec.http_fd, self, self.spec.http_token)
            task_status.started()

    async def _lead(self, fence: Compare) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.room.watch, fence)
            nursery.start_soon(self.freeing.lead, fence)
            nursery.start_soon(self.sharing.lead, fence)
            nursery.start_soon(self.allotting.lead, fence)
            nursery.start_soon(self.counting.watch)
            nursery.start_soon(self.reach.lead)
            nursery.start_soon(self.publishing.lead, fence)
            nursery.start_soon(self.rebuilder.lead, fence)
            nursery.start_soon(self.failover.lead, fence)
            await self.reconciler.lead(fence)
            nursery.cancel_scope.cancel()

    async def worker_exited(self, args: Args) -> Args:
        """The supervisor saw a process end: in etcd before this answers."""
        await self.registry.bury(args["boot_id"], args["how"], args["at_us"])
        self.reconciler.stir()
        self.noting.stir()
        self.workers.shares.stir()
        return {}

    async def status(self, args: Args) -> Args:
        """Figures for `fleet status`."""
        undecided = self.reconciler.owners.undecided if self.election.leading else {}
        return {
            "leader": self.election.leading,
            "workers": len(self.registry.linked()),
            "waiting": self.granting.waiting(),
            "ledgers": {db: {"state": view.state, "reachable": view.reachable,
                             "epoch": view.epoch.number if view.epoch else 0,
                             "no_room": self.room.crowded.get(db, ""),
                             "no_policy": self.refused().get(db, ""),
                             "backend": undecided.get(db) or self.failover.reasons().get(db, "")}
                        for db, view in self.views.views.items()},
        }

    # ---- what is shown of it

    def views_now(self) -> dict[str, View]:
        """Every ledger as it was last read."""
        return self.views.views

    def refused(self) -> dict[str, str]:
        """Of each ledger without a policy, why its file was not taken."""
        views = self.views.views
        return {db: why for db, why in self.founder.refused.items() if db in views and not views[db].policy}

    def figures(self) -> Figures:
        """Numbers of this moment."""
        now, leading, backends = now_us(), self.election.leading, self.reconciler.backends
        since = backends.unknown_since_us if leading else {}  # what an earlier term left says nothing now
        return Figures(
            leading=leading, workers_linked=len(self.registry.linked()),
            waiting=self.granting.waiting(), released=backends.released,
            unknown_age_seconds={db: (now - at) / 1_000_000 if at else 0.0 for db, at in since.items()},
            unknown_old=backends.unknown_old if leading else {}, no_room=tuple(self.room.crowded),
            requests=getattr(self.store, "requests", {}), alerts=self._alerts(),
            census=tuple(self.counting.census.values()), eaten=self.counting.eaten,
            unfit=self.failover.unfit() | (self.reconciler.owners.undecided.keys() if leading else set()),
        )

    def _alerts(self) -> list[tuple[Alert, float]]:
        """Every alert that this coordinator has told, with its age."""
        now = self.reconciler.backends.clock_us()
        rest = self.reconciler.owners.standing if self.election.leading else ()
        return [(each, each.age_seconds(now)) for each in (*self.alerting.standing, *rest)]

    async def etcd_health(self) -> Health:
        """How etcd is."""
        return await self.etcd.read()

    async def rows(self) -> list[dict[str, Any]]:
        """Every permit of every ledger. Raises StoreUnavailable."""
        activities = inspect.read_activities(Path(self.spec.run_dir))
        rows = []
        for db, ledger in self.ledgers.items():
            rows += inspect.session_rows(
                db, await ledger.snapshot(), activities, now_us(), self.reconciler.backends.waits[db])
        return rows

    async def sums(self) -> list[dict[str, Any]]:
        """Each ledger in figures. Raises StoreUnavailable."""
        activities = inspect.read_activities(Path(self.spec.run_dir))
        sums = []
        for db, ledger in self.ledgers.items():
            snapshot = await ledger.snapshot()
            waits = self.reconciler.backends.waits[db]
            rows = inspect.session_rows(db, snapshot, activities, now_us(), waits)
            found = inspect.sum_up(snapshot, rows)
            sums.append({"database": db, "line": found.line(), **asdict(found)})
        return sums

    def _seen(self, view: View) -> None:
        if view.reachable and view.db not in self._met:
            self._met.add(view.db)
            self._another.set()
        compared = view.db in self._compared and view.state != LedgerState.RECOVERING
        if view.reachable and not (view.complete and compared):
            self._incomplete.set()

    async def _found(self) -> None:
        """Until every ledger is complete, and again whenever one is found to lack something."""
        while True:
            await self._incomplete.wait()
            self._incomplete, self._another = trio.Event(), trio.Event()
            for view in tuple(self.views.views.values()):
                try:
                    if await self.founder.found(view):
                        self.views.hint()
                    elif view.complete:
                        self._compared.add(view.db)
                except (StoreUnavailable, StoreUnknown):
                    pass
                except (UnknownSchema, ValueError) as fault:
                    _log.error(Event.SOMETHING_FAILED, database=view.db, why=f"founding: {fault}")
            with trio.move_on_after(FOUNDING_INTERVAL_SECONDS):  # servers tell nobody when they are up
                await self._another.wait()
            if any(view.reachable and not view.complete for view in self.views.views.values()):
                self._incomplete.set()
            else:
                await self._tidy_eyes()

    async def _tidy_eyes(self) -> None:
        """What founding looked through: the leader keeps it, under the ledger's name; nobody else does."""
        if not self.election.leading:
            await self.looker.close()
            return
        with suppress(LookFailed):
            await self.looker.rename()

    async def _sweep_tables(self) -> None:
        """Session tables of this host's dead workers go when no permit of theirs is left."""
        run_dir = Path(self.spec.run_dir)
        while True:
            await trio.sleep(SWEEP_INTERVAL_SECONDS)  # noqa: TID251 - housekeeping has no event
            dead = set(inspect.tables_without_process(run_dir)) - self.registry.workers.keys()
            try:
                for ledger in self.ledgers.values() if dead else ():
                    snapshot = await ledger.snapshot()
                    dead -= {held.session.owner for held in snapshot.sessions} | snapshot.workers.keys()
            except (StoreUnavailable, StoreUnknown, UnknownSchema, ValueError):
                continue
            for boot_id in dead:
                inspect.remove_table(run_dir, boot_id)

    async def _bury_commands(self) -> None:
        """The deaths of this host's commands are put on record: nobody waits for their processes."""
        run_dir = Path(self.spec.run_dir)
        while True:
            for boot_id in commands.dead_ones(run_dir):
                await self.registry.bury(boot_id, "its process is gone", now_us())
                commands.forget(run_dir, boot_id)
                self.reconciler.stir()
            await trio.sleep(self.spec.lease_ttl_seconds)  # noqa: TID251 - a death elsewhere tells nobody

    async def _bury_earlier_boots(self) -> None:
        await bury_earlier_boots(
            self.ledgers, self.registry, host=self.spec.host, machine_id=self.spec.machine_id,
            kernel_boot_id=read_kernel_boot_id(), now_us=now_us, on_buried=self.reconciler.stir)

    async def _serve_socket(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            listener = trio.SocketListener(_bind(self.spec.socket))
            nursery.start_soon(trio.serve_listeners, self.workers.serve, [listener])
            task_status.started()


def _bind(path: str) -> trio.socket.SocketType:
    """The unix socket, mode 0600; a left-over one of a dead coordinator is replaced at once."""
    scratch = f"{path}.{os.getpid()}"
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        raw.bind(scratch)
    finally:
        os.umask(before)
    raw.listen(SOCKET_BACKLOG)
    os.replace(scratch, path)
    return trio.socket.from_stdlib_socket(raw)


