"""The fleet of a drop-in: the supervisor with PgBouncer's signals and its ways to shut down and to reload."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog
import trio

from coordinator.link import Args, LinkLost, LinkRefused
from pooler.dropin.takeover import Predecessor, serve_takeovers
from pooler.dropin.words import of_the_ini
from pooler.errors import UsageFault
from pooler.observe.events import Event
from pooler.serve.moving import arrivals_path
from pooler.settings import Settings
from pooler.supervise.process import Process
from pooler.supervise.sockets import FleetSockets, PortRefused
from pooler.supervisor import Supervisor

WAIT_FOR: Final = {"wait_for_clients": "clients", "wait_for_servers": "servers"}

log = structlog.get_logger()


class BouncerSupervisor(Supervisor):
    """`regenerate` writes the config anew from the ini. Raises UsageFault, then the old one stays."""

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

    def __init__(
        self, config: Path, settings: Settings, regenerate: Callable[[], None], old: Predecessor | None = None
    ) -> None:
        super().__init__(config, settings)
        self._regenerate = regenerate
        self._old = old
        self._leaving = False

    def open_sockets(self) -> FleetSockets:
        """Those of the process that runs, where one is taken over."""
        taken_over = None if self._old is None else self._old.sockets
        try:
            return FleetSockets.open(self._settings, taken_over)
        except PortRefused as refused:
            raise PortRefused(of_the_ini(str(refused))) from None

    async def started(self) -> None:
        """From now on a successor may ask; a predecessor is told to go."""
        if self._old is not None:
            for each in self._sockets.unix:  # from here on the kernel says that we listen there
                each.listen(self._settings.fleet.listen_backlog)
            await trio.to_thread.run_sync(self._old.let_go, self._settings.fleet.run_dir)
        self._nursery.start_soon(serve_takeovers, self._settings.fleet.run_dir, self)

    def shared_sockets(self) -> tuple[list[socket.socket], list[socket.socket]]:
        """What a successor gets."""
        return self._sockets.listen, self._sockets.unix

    def replaced(self, run_dir: Path) -> None:
        """The successor at `run_dir` serves: it gets the clients, and this one ends."""
        if self._leaving:
            return
        self._leaving = True
        self._sockets.give_away()
        self._nursery.start_soon(self._leave, "moved", run_dir)

    def obey(self, number: signal.Signals) -> None:
        """HUP reload, TERM wait for clients, INT wait for servers, QUIT at once, USR1 pause, USR2 resume; the
        second TERM or INT at once, and no resume while shutting down."""
        log.info(Event.SIGNAL_RECEIVED, signal=number.name)
        if number == signal.SIGQUIT:
            self.stop_now()
        elif number == signal.SIGTERM:
            self._leave_or_end("clients")
        elif number == signal.SIGINT:
            self._leave_or_end("servers")
        elif number == signal.SIGUSR1:
            self._nursery.start_soon(self._order_all, "pause")
        elif number == signal.SIGUSR2:
            if not self._leaving:
                self._nursery.start_soon(self._order_all, "resume")
        else:
            super().obey(number)

    async def reload(self) -> dict[str, Any]:
        """As the supervisor's, of a config that is made anew first."""
        try:
            self._regenerate()
        except (UsageFault, OSError) as refused:
            lines = str(refused).splitlines()
            log.error(Event.CONFIG_REFUSED, problems=lines)
            return {"refused": True, "problems": lines, "warnings": []}
        return await super().reload()

    async def _on_shutdown(self, args: Args) -> dict[str, Any]:
        wait_for = WAIT_FOR.get(str(args.get("mode") or ""))
        if wait_for is None:
            self._nursery.start_soon(self._stop_soon)
        else:
            self._leave_or_end(wait_for)
        return {}

    async def _stop_soon(self) -> None:
        """At once, but for the answer to who asked."""
        await trio.lowlevel.checkpoint()
        self.stop_now()

    def _leave_or_end(self, wait_for: str) -> None:
        if self._leaving:
            self.stop_now()
            return
        self._leaving = True
        self._nursery.start_soon(self._leave, wait_for)

    async def _leave(self, wait_for: str, successor: Path | None = None) -> None:
        """The shared port is shut, the unix socket stays; ended once nobody is waited for any more."""
        log.info(Event.FLEET_STOPPING, fleet=self._settings.fleet.name, waits_for=wait_for)
        self._sockets.release_tcp()
        async with trio.open_nursery() as nursery:
            for process in self._serving():
                to = None if successor is None else str(arrivals_path(successor, 0))
                nursery.start_soon(self._call, process, "leave", {"wait_for": wait_for, "to": to})
        self._ask_stop(drain_first=False)

    async def _order_all(self, name: str) -> None:
        async with trio.open_nursery() as nursery:
            for process in self._serving():
                nursery.start_soon(self._call, process, "order", {"name": name})

    def _serving(self) -> list[Process]:
        return [process for place in self._workers for process in place.processes() if process.is_serving]

    async def _call(self, process: Process, op: str, args: Args) -> None:
        if process.link is None:
            return
        try:
            await process.link.call(op, **args)
        except (LinkLost, LinkRefused) as failed:
            log.error(Event.SOMETHING_FAILED, process=process.name, what=op, why=str(failed))
