"""The coordinator of one host: builds its parts, runs them, ends when the supervisor's link ends.

`python -m coordinator.service --link-fd N`: everything else is asked over that link. The only process of the
data plane that talks to etcd.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog
import trio

from coordinator import inspect
from coordinator.election import Election, Leader
from coordinator.etcd_process import EtcdMissing, EtcdProcess, find_etcd, version_warning
from coordinator.events import Event
from coordinator.founding import Founder
from coordinator.granting import Granting
from coordinator.http import Figures, serve_http
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.ledger import Ledger
from coordinator.link import Args, Handler, Link, LinkLost, LinkRefused
from coordinator.looks import Door, Looker, LookFailed
from coordinator.reconcile import Reconciler
from coordinator.registry import Registry, read_kernel_boot_id
from coordinator.remembered import Remembered
from coordinator.serve_workers import WorkerServer
from coordinator.spec import CoordinatorSpec, SpecFault
from coordinator.store.api import Store, StoreUnavailable, StoreUnknown
from coordinator.store.etcd import Tls, open_etcd
from coordinator.view import View, Views

FOUNDING_INTERVAL_SECONDS = 1.0
STOP_TIMEOUT_SECONDS = 3.0
SOCKET_BACKLOG = 128

_log = structlog.get_logger("coordinator")


def now_us() -> int:
    """The wall clock, as stored in records: shown, never compared."""
    return time.time_ns() // 1000


class Coordinator:
    """The parts of one coordinator over one store, and the nursery they live in."""

    def __init__(self, spec: CoordinatorSpec, store: Store, looker: Looker) -> None:
        self.spec = spec
        self.store = store
        self.looker = looker
        self.keys = FleetKeys(spec.prefix, spec.fleet)
        remembered = Remembered(Path(spec.run_dir))
        databases = spec.ledgers()
        self.ledgers = {
            db: Ledger(store, self.keys.db(db), self.keys, now_us, home=zlib.crc32(spec.host.encode()),
                       seen=remembered.seen(db))
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
        self.founder = Founder(store, self.keys, databases, looker)
        self.election = Election(
            store, self.keys, Leader(spec.host, os.getpid(), now_us()), ttl_seconds=spec.lease_ttl_seconds)
        self.reconciler = Reconciler(
            store, self.keys, self.ledgers, self.views, looker, spec=spec, now_us=now_us)
        self.reconciler.on_unknown.append(lambda db, s: self.workers.tell_owner(db, s, "permit_unknown"))
        self.reconciler.on_released.append(lambda db, _: self.granting.stir(db))
        self._incomplete = trio.Event()
        self.views.on_change.append(self._seen)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled; `started` when workers can connect."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.views.run)
            nursery.start_soon(self._found)
            nursery.start_soon(self.granting.run)
            nursery.start_soon(self.election.run, self.reconciler.lead)
            await nursery.start(self._serve_socket)
            if self.spec.http_fd is not None:
                nursery.start_soon(serve_http, self.spec.http_fd, self)
            task_status.started()

    async def worker_exited(self, args: Args) -> Args:
        """The supervisor saw a process end: in etcd before this answers."""
        await self.registry.bury(args["boot_id"], args["how"], args["at_us"])
        self.reconciler.stir()
        return {}

    async def status(self, args: Args) -> Args:
        """Figures for `fleet status`."""
        return {
            "leader": self.election.leading,
            "workers": len(self.registry.linked()),
            "waiting": self.granting.waiting(),
            "ledgers": {db: {"state": view.state, "reachable": view.reachable,
                             "epoch": view.epoch.number if view.epoch else 0}
                        for db, view in self.views.views.items()},
        }

    # ---- what is shown of it

    def views_now(self) -> dict[str, View]:
        """Every ledger as it was last read."""
        return self.views.views

    def figures(self) -> Figures:
        """Numbers of this moment."""
        now = now_us()
        return Figures(
            leading=self.election.leading, workers_linked=len(self.registry.linked()),
            waiting=self.granting.waiting(), released=self.reconciler.released,
            unknown_age_seconds={db: (now - since) / 1_000_000 if since else 0.0
                                 for db, since in self.reconciler.unknown_since_us.items()},
            requests=getattr(self.store, "requests", {}),
        )

    async def rows(self) -> list[dict[str, Any]]:
        """Every permit of every ledger. Raises StoreUnavailable."""
        activities = inspect.read_activities(Path(self.spec.run_dir))
        rows = []
        for db, ledger in self.ledgers.items():
            rows += inspect.session_rows(
                db, await ledger.snapshot(), activities, now_us(), self.reconciler.awaiting[db])
        return rows

    async def sums(self) -> list[dict[str, Any]]:
        """Each ledger in figures. Raises StoreUnavailable."""
        activities = inspect.read_activities(Path(self.spec.run_dir))
        sums = []
        for db, ledger in self.ledgers.items():
            snapshot = await ledger.snapshot()
            rows = inspect.session_rows(db, snapshot, activities, now_us(), self.reconciler.awaiting[db])
            found = inspect.sum_up(snapshot, rows)
            sums.append({"database": db, "line": found.line(), **asdict(found)})
        return sums

    def _seen(self, view: View) -> None:
        if view.reachable and not view.complete:
            self._incomplete.set()

    async def _found(self) -> None:
        """Until every ledger is complete, and again whenever one is found to lack something."""
        while True:
            await self._incomplete.wait()
            self._incomplete = trio.Event()
            for view in tuple(self.views.views.values()):
                try:
                    if await self.founder.found(view):
                        self.views.hint()
                except (StoreUnavailable, StoreUnknown):
                    pass
            await trio.sleep(FOUNDING_INTERVAL_SECONDS)  # noqa: TID251 - servers tell nobody when they are up
            if any(view.reachable and not view.complete for view in self.views.views.values()):
                self._incomplete.set()
            elif not self.election.leading:
                await self.looker.close()

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


def make_looker(spec: CoordinatorSpec, tag_of: Callable[[str], str], *, name: str = "command") -> Looker:
    """Eyes with the monitor login of whichever database names the host; sessions are pooler:<tag>:<name>."""

    logins = [each for each in spec.databases if each.monitor is not None]

    def door(address: str) -> Door:
        """A backend that a drain moved to is in no host list yet: any monitor may try."""
        named = [each for each in logins if address in each.hosts]
        for each in named or logins:
            assert each.monitor is not None  # as selected above
            return Door(each.monitor, each.dbname, f"pooler:{tag_of(each.db)}:{name}")
        raise LookFailed(f"{address}: no monitor login is configured for it")

    return Looker(door, provider_identity=spec.node_identity == "provider")


@asynccontextmanager
async def open_store(spec: CoordinatorSpec) -> AsyncIterator[Store]:
    """The store of the specification; with `embedded`, on an etcd that lives as long as this block."""
    if not spec.etcd.embedded:
        async with open_etcd(
            spec.etcd.endpoints, user=spec.etcd.user or "", password=spec.etcd.password or "", tls=_tls(spec)
        ) as store:
            yield store
        return
    data_dir = Path(spec.etcd.data_dir) if spec.etcd.data_dir else None
    process = EtcdProcess(Path(spec.run_dir), find_etcd(), data_dir=data_dir)
    async with trio.open_nursery() as nursery:
        await nursery.start(process.run)
        async with open_etcd([process.endpoint]) as store:
            yield store
        nursery.cancel_scope.cancel()


def _tls(spec: CoordinatorSpec) -> Tls | None:
    etcd = spec.etcd
    if not (etcd.ca or etcd.cert):
        return None

    def read(path: str | None) -> bytes | None:
        return Path(path).read_bytes() if path else None

    return Tls(read(etcd.ca), read(etcd.cert), read(etcd.key))


async def _warn_of_version(store: Store) -> None:
    try:
        status = await store.status()
    except (StoreUnavailable, StoreUnknown):
        return
    warning = version_warning(status.version)
    if warning is not None:
        _log.warning(Event.ETCD_VERSION_UNSAFE, version=status.version, why=warning)


class Service:
    """The process: the supervisor's link, and the coordinator between its first answer and its end."""

    def __init__(self) -> None:
        self._stopping = trio.Event()
        self._coordinator: Coordinator | None = None
        self._up = trio.Event()

    async def run(self, link_fd: int) -> int:
        """Exit code: 0 after `stop` or the supervisor's end, 2 for a specification that cannot be used."""
        handlers: dict[str, Handler] = {
            "stop": self._stop, "drain": self._nothing, "reload": self._reload, "status": self._status,
            "worker_exited": self._worker_exited,
        }
        link = Link(_stream(link_fd), {op: _guarded(handler) for op, handler in handlers.items()})
        code = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run)
            nursery.start_soon(self._stop_when_lost, link)
            try:
                spec = CoordinatorSpec.parse(await link.call("spec"))
                await self._serve(spec, link)
            except (SpecFault, EtcdMissing, LinkRefused) as fault:
                _log.error(Event.SOMETHING_FAILED, why=str(fault))
                code = 2
            except LinkLost:
                pass
            nursery.cancel_scope.cancel()
        return code

    async def _stop_when_lost(self, link: Link) -> None:
        await link.lost.wait()
        self._stopping.set()

    async def _serve(self, spec: CoordinatorSpec, link: Link) -> None:
        async with open_store(spec) as store:
            coordinator: Coordinator | None = None

            def tag_of(db: str) -> str:
                head = coordinator.views.views[db].head if coordinator else None
                return head.tag if head else "new"

            coordinator = Coordinator(spec, store, make_looker(spec, tag_of, name="reaper"))
            self._coordinator = coordinator
            async with trio.open_nursery() as nursery:
                await nursery.start(coordinator.run)
                self._up.set()
                _log.info(Event.COORDINATOR_STARTED, fleet=spec.fleet, host=spec.host, socket=spec.socket)
                nursery.start_soon(_warn_of_version, store)
                nursery.start_soon(_say_ready, link)
                await self._stopping.wait()
                _log.info(Event.COORDINATOR_STOPPING)
                nursery.cancel_scope.cancel()

    async def _stop(self, args: Args) -> Args:
        self._stopping.set()
        return {}

    async def _nothing(self, args: Args) -> Args:
        return {}

    async def _reload(self, args: Args) -> Args:
        return {"problems": []}

    async def _status(self, args: Args) -> Args:
        return await self._coordinator.status(args) if self._coordinator else {}

    async def _worker_exited(self, args: Args) -> Args:
        await self._up.wait()
        assert self._coordinator is not None  # `_up` says so
        return await self._coordinator.worker_exited(args)


async def _say_ready(link: Link) -> None:
    try:
        await link.call("ready")
    except (LinkLost, LinkRefused):
        return


def _guarded(handler: Callable[[Args], Awaitable[Any]]) -> Handler:
    async def guarded(args: Args) -> Any:
        try:
            return await handler(args)
        except (KeyError, TypeError, ValueError) as fault:
            _log.exception(Event.SOMETHING_FAILED)
            raise LinkRefused("bad_request", f"{type(fault).__name__}: {fault}") from None

    return guarded


def _stream(fd: int) -> trio.SocketStream:
    return trio.SocketStream(trio.socket.from_stdlib_socket(socket.socket(fileno=fd)))


def configure_logs() -> None:
    """JSON lines on standard output, as the rest of the fleet."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
    )
    structlog.contextvars.bind_contextvars(process="coordinator")


def main() -> int:
    """`python -m coordinator.service --link-fd N`."""
    parser = argparse.ArgumentParser(prog="python -m coordinator.service", description=__doc__)
    parser.add_argument("--link-fd", type=int, required=True, help="descriptor of the supervisor's link")
    arguments = parser.parse_args()
    configure_logs()
    return trio.run(Service().run, arguments.link_fd)


if __name__ == "__main__":
    sys.exit(main())
