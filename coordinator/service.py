"""The coordinator of one host: builds its parts, runs them, ends when the supervisor's link ends.

`python -m coordinator.service --link-fd N`: everything else is asked over that link. The only process of the
data plane that talks to etcd.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import structlog
import trio

from coordinator.etcd_process import EtcdMissing, version_warning
from coordinator.events import Event
from coordinator.ledger.invariants import UNFOUNDED_TAG
from coordinator.link import Args, Handler, Link, LinkLost, LinkRefused
from coordinator.link_guard import guarded
from coordinator.logs import set_up_logging
from coordinator.opening import make_reaper, open_store
from coordinator.parts import Coordinator
from coordinator.policy_difference import policy_differences
from coordinator.remembered import MemoryUnreadable, Remembered
from coordinator.renewal import Renewal
from coordinator.spec import CoordinatorSpec, SpecFault
from coordinator.store.api import Store, StoreUnavailable, StoreUnknown

VERSION_RETRY_SECONDS = 5.0
ANEW_SECONDS_MAX = 5.0

_log = structlog.get_logger("coordinator")


async def _warn_of_version(store: Store) -> None:
    """Once etcd answers: whether this version is fit to keep a ledger."""
    while True:
        try:
            warning = version_warning((await store.status()).version)
        except (StoreUnavailable, StoreUnknown):
            await trio.sleep(VERSION_RETRY_SECONDS)  # noqa: TID251 - back-off towards the store
            continue
        if warning is not None:
            _log.warning(Event.ETCD_VERSION_UNSAFE, why=warning)
        return


class Service:
    """The process: the supervisor's link, and the coordinator between its first answer and its end."""

    def __init__(self) -> None:
        self._stopping = trio.Event()
        self._coordinator: Coordinator | None = None
        self._link: Link | None = None
        self._renewal = Renewal()
        self._up = trio.Event()

    async def run(self, link_fd: int) -> int:
        """Exit code: 0 after `stop` or the supervisor's end, 2 for a specification that cannot be used."""
        handlers: dict[str, Handler] = {
            "stop": self._stop, "drain": self._nothing, "reload": self._reload, "status": self._status,
            "worker_exited": self._worker_exited,
        }
        link = self._link = Link(_stream(link_fd), {op: guarded(handler) for op, handler in handlers.items()})
        code = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run)
            nursery.start_soon(self._stop_when_lost, link)
            nursery.start_soon(self._stop_on_signal)
            try:
                spec = CoordinatorSpec.parse(await link.call("spec"))
                self._renewal.ask(spec)
                set_up_logging(spec.log.format, spec.log.level)
                await self._serve(spec, link)
            except (SpecFault, EtcdMissing, MemoryUnreadable, LinkRefused) as fault:
                _log.error(Event.SOMETHING_FAILED, why=str(fault))
                code = 2
            except LinkLost:
                pass
            nursery.cancel_scope.cancel()
        return code

    async def _stop_when_lost(self, link: Link) -> None:
        await link.lost.wait()
        self._end()

    async def _stop_on_signal(self) -> None:
        """SIGTERM stops; SIGINT is the supervisor's to hear (a terminal sends it to all of us)."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                if number == signal.SIGTERM:
                    self._end()

    async def _serve(self, spec: CoordinatorSpec, link: Link) -> None:
        remembered = Remembered(Path(spec.run_dir))  # before anything is started that its fault would end
        async with open_store(spec) as store, trio.open_nursery() as nursery:
            nursery.start_soon(_warn_of_version, store)
            while not self._stopping.is_set():
                await self._serve_over(store, self._renewal.begin(), link, remembered)
            nursery.cancel_scope.cancel()

    async def _serve_over(
        self, store: Store, asked: CoordinatorSpec, link: Link, remembered: Remembered
    ) -> None:
        """Until the end, or until there is another specification."""
        spec = _with_own_socket(asked)
        coordinator: Coordinator | None = None

        def tag_of(db: str) -> str:
            head = coordinator.views.views[db].head if coordinator else None
            return head.tag if head else UNFOUNDED_TAG

        coordinator = Coordinator(spec, store, make_reaper(spec, tag_of), remembered)
        self._coordinator = coordinator
        room = coordinator.room
        room.on_change.append(lambda: link.notify("state", text="; ".join(room.crowded.values())))
        async with trio.open_nursery() as nursery:
            await nursery.start(coordinator.run)
            _log.info(Event.COORDINATOR_STARTED, fleet=spec.fleet, host=spec.host, socket=spec.socket)
            if not self._up.is_set():
                self._up.set()
                nursery.start_soon(_say_ready, link)
            self._renewal.serves(asked)
            await self._renewal.other.wait()
            _log.info(Event.COORDINATOR_STOPPING)
            nursery.cancel_scope.cancel()

    def _end(self) -> None:
        self._stopping.set()
        self._renewal.other.set()

    async def _stop(self, args: Args) -> Args:
        self._end()
        return {}

    async def _nothing(self, args: Args) -> Args:
        return {}

    async def _reload(self, args: Args) -> Args:
        """What differs is taken up by starting anew, over the same store where it is the same: workers serve
        on meanwhile, and what is new is served when this answers."""
        assert self._link is not None
        fresh = CoordinatorSpec.parse(await self._link.call("spec"))
        set_up_logging(fresh.log.format, fresh.log.level)
        before = self._renewal.asked
        self._renewal.ask(fresh)
        views = self._coordinator.views.views if self._coordinator is not None else {}
        active = {db: view.policy for db, view in views.items()}
        if before is not None and fresh != (before := replace(before, log=fresh.log)):
            _log.info(Event.COORDINATOR_STARTS_ANEW)
            if fresh != replace(before, databases=fresh.databases):
                self._end()
            else:
                self._renewal.other.set()
        if self._up.is_set() and not self._stopping.is_set():
            await self._renewal.until_served(ANEW_SECONDS_MAX)
        return {"problems": [], "warnings": policy_differences(fresh.databases, active)}

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


def _with_own_socket(spec: CoordinatorSpec) -> CoordinatorSpec:
    """What serves closes its listening socket at its end; the next one needs it."""
    return spec if spec.http_fd is None else replace(spec, http_fd=os.dup(spec.http_fd))


def _stream(fd: int) -> trio.SocketStream:
    return trio.SocketStream(trio.socket.from_stdlib_socket(socket.socket(fileno=fd)))


def main() -> int:
    """`python -m coordinator.service --link-fd N`."""
    parser = argparse.ArgumentParser(prog="python -m coordinator.service", description=__doc__)
    parser.add_argument("--link-fd", type=int, required=True, help="descriptor of the supervisor's link")
    arguments = parser.parse_args()
    set_up_logging()
    structlog.contextvars.bind_contextvars(process="coordinator")
    return trio.run(Service().run, arguments.link_fd)


if __name__ == "__main__":
    sys.exit(main())
