"""The supervisor: owns the listening sockets, starts what the fleet consists of, restarts what dies.

It never touches a client's bytes or the ledger. What it knows for certain, that a worker's process has ended,
it writes to the run directory before anything else and tells the coordinator until the ledger has it.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import trio

from coordinator.link import Args, LinkLost, LinkRefused
from pooler.errors import UsageFault
from pooler.net.auth_files import AuthFiles
from pooler.observe.events import Event
from pooler.settings import Settings, coordinator_spec, load
from pooler.supervise.control import Say, serve_control
from pooler.supervise.exits import ExitFiles
from pooler.supervise.left_over import settle_left_overs
from pooler.supervise.notify import notify_systemd, watchdog_period_seconds
from pooler.supervise.place import COORDINATOR, WORKER, Place
from pooler.supervise.process import ArgvFactory, Process
from pooler.supervise.reloading import merge_reload
from pooler.supervise.reporting import ExitReporter
from pooler.supervise.rolling import DRAIN_MARGIN_SECONDS, drain, figures_of, roll_workers
from pooler.supervise.run_dir import RunDir
from pooler.supervise.sockets import FleetSockets

STOP_SECONDS_MAX = 10.0
TERMINATE_SECONDS_MAX = 2.0
REPORT_SECONDS_MAX = 3.0
RETIRE_SECONDS = 3600.0
RETIRE_AGAIN_SECONDS = 1.0

log = structlog.get_logger()


def child_argv(role: str, link_fd: int) -> Sequence[str]:
    """How the real children are started: -P keeps the working directory out of the import path."""
    module = "coordinator.service" if role == COORDINATOR else "pooler.worker"
    return [sys.executable, "-P", "-m", module, "--link-fd", str(link_fd)]


class Supervisor:
    """One fleet's processes on this host. `argv_of` says how a child is started."""

    signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self, config: Path, settings: Settings, argv_of: ArgvFactory = child_argv) -> None:
        self._config = config
        self._settings = settings
        self._argv_of = argv_of
        self._coordinator = Place(COORDINATOR, 0)
        self._workers = [Place(WORKER, index) for index in range(settings.fleet.workers)]
        self._stop_asked = trio.Event()
        self._stopped = trio.Event()
        self._rolling = False
        self._waiting_changes: list[str] = []
        self._started_at = time.time()
        self._sockets: FleetSockets
        self._files: ExitFiles
        self._reporter: ExitReporter
        self._nursery: trio.Nursery

    async def run(self) -> None:
        """Run the fleet until it was told to stop. Must be in the main thread.

        Raises RunDirRefused and PortRefused before any child was started.
        """
        fleet = self._settings.fleet
        run_dir = RunDir.take(fleet.run_dir, fleet.name)
        try:
            self._files = ExitFiles(run_dir.path)
            self._reporter = ExitReporter(self._files, self._coordinator)
            await settle_left_overs(self._files)
            self._sockets = self.open_sockets()
            try:
                await self._run_children()
            finally:
                self._end_all_now()
                self._sockets.close()
        finally:
            run_dir.close()

    def open_sockets(self) -> FleetSockets:
        """Raises PortRefused."""
        return FleetSockets.open(self._settings)

    async def started(self) -> None:
        """Everything serves."""

    async def _run_children(self) -> None:
        with trio.open_signal_receiver(*self.signals) as signals:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._obey_signals, signals)
                nursery.start_soon(serve_control, self._settings.control_socket, self._control_handlers())
                nursery.start_soon(self._reporter.run)
                nursery.start_soon(self._tell_systemd)
                for place in self._places():
                    nursery.start_soon(self._bring_up, place)
                await self._stopped.wait()
                nursery.cancel_scope.cancel()
        log.info(Event.FLEET_STOPPED, fleet=self._settings.fleet.name)

    # starting and restarting

    def _places(self) -> list[Place]:
        return [self._coordinator, *self._workers]

    async def _bring_up(self, place: Place) -> None:
        """Start it, again and again with back-off, until it stands."""
        while place.current is None and not self._stop_asked.is_set():
            try:
                process = self.start(place)
            except OSError as fault:
                log.error(Event.SOMETHING_FAILED, what="cannot start", process=place.name, why=fault.strerror)
                await self._wait_after_death(place, 0.0)
            else:
                place.take_over(process)

    def start(self, place: Place) -> Process:
        """A new process beside the current one. Raises OSError, also once the fleet stops: the sockets that
        it would inherit are let go then."""
        if self._stop_asked.is_set():
            raise OSError(errno.ESHUTDOWN, "the fleet is being stopped")
        boot_id = uuid.uuid4().hex
        of_worker = place.role == WORKER
        inherited = (self._sockets.descriptors_of_worker(place.index) if of_worker
                     else self._sockets.descriptors_of_coordinator())
        process = Process.spawn(place.name, place.role, boot_id, self._argv_of, inherited)
        try:
            self._files.note_boot(boot_id, place.role, place.index, process.pid)
        except OSError:
            process.end_now()
            raise
        place.others.append(process)
        log.info(Event.PROCESS_STARTED, process=place.name, pid=process.pid, boot_id=boot_id)
        self._nursery.start_soon(self._attend, place, process)
        return process

    async def _attend(self, place: Place, process: Process) -> None:
        self._nursery.start_soon(self._announce, place, process)
        try:
            await process.run({
            "spec": partial(self._spec, place, process),
            "reload": self._on_reload, "shutdown": self._on_shutdown})
        finally:
            self._reporter.note_end(process)  # first: the ledger must learn of it even if we die now
        served = place.leave(process)
        self._reporter.spread_news()
        if served and not self._stop_asked.is_set():
            await self._wait_after_death(place, trio.current_time() - process.started_at)
            await self._bring_up(place)

    async def _announce(self, place: Place, process: Process) -> None:
        await process.settled.wait()
        if process.is_serving:
            place.is_down = False
            log.info(Event.PROCESS_READY, process=process.name, pid=process.pid)
        self._reporter.spread_news()

    async def _wait_after_death(self, place: Place, lived_seconds: float) -> None:
        delay = place.deaths.died(trio.current_time(), lived_seconds)
        if place.deaths.too_often:
            place.is_down = True
            log.error(Event.PROCESS_KEPT_DOWN, process=place.name, last_exit=str(place.last_ending),
                      deaths=place.deaths.total, next_try_seconds=delay,
                      hint="it dies too often; `pooler fleet reload` tries again at once")
            self._reporter.spread_news()
        with trio.move_on_after(delay):
            await place.try_now.wait()

    async def _spec(self, place: Place, process: Process, args: Args) -> dict[str, Any]:
        if place.role == COORDINATOR:
            http = self._sockets.descriptors_of_coordinator()
            token = self._settings.http.token
            return {**coordinator_spec(self._settings), "http_fd": http[0] if http else None,
                    "http_token": token.get_secret_value() if token is not None else None}
        if self._stop_asked.is_set():
            raise LinkRefused("stopping", "the fleet is being stopped")  # its sockets are let go
        return {
            "config": self._settings.to_wire(),
            "index": place.index,
            "boot_id": process.boot_id,
            "workers": len(self._workers),
            "coordinator_socket": str(self._settings.coordinator_socket),
            **self._sockets.for_worker(place.index),
        }

    async def _on_reload(self, args: Args) -> dict[str, Any]:
        """RELOAD of a console."""
        return await self.reload()

    async def _on_shutdown(self, args: Args) -> dict[str, Any]:
        """SHUTDOWN of a console."""
        self._ask_stop(drain_first=bool(args.get("drain")))
        return {}

    # what others are told

    async def _tell_systemd(self) -> None:
        while True:
            news = self._reporter.news
            serving = [place for place in self._workers if place.current is not None]
            if serving and all(place.is_settled() for place in self._places()):
                break
            await news.wait()
        log.info(Event.FLEET_STARTED, fleet=self._settings.fleet.name, workers=len(self._workers),
                 listen=[str(address) for address in self._settings.fleet.listen])
        notify_systemd("READY=1")
        await self.started()
        period = watchdog_period_seconds()
        while period is not None:
            notify_systemd("WATCHDOG=1")
            with trio.move_on_after(period):
                await self._stopped.wait()
                return

    # commands

    async def _obey_signals(self, signals: Any) -> None:
        async for number in signals:
            self.obey(signal.Signals(number))

    def obey(self, number: signal.Signals) -> None:
        """What one of `signals` does."""
        if number == signal.SIGHUP:
            self._nursery.start_soon(self.reload)
        elif self._stop_asked.is_set():
            self.stop_now()
        else:
            self._ask_stop(drain_first=number == signal.SIGTERM)

    def stop_now(self) -> None:
        """End everything at once, and be done."""
        self._end_all_now()
        self._stopped.set()

    def _control_handlers(self) -> dict[str, Any]:
        async def on_status(args: Args, say: Say) -> dict[str, Any]:
            return await self.status()

        async def on_reload(args: Args, say: Say) -> dict[str, Any]:
            return await self.reload()

        async def on_stop(args: Args, say: Say) -> dict[str, Any]:
            self._ask_stop(drain_first=bool(args.get("drain", True)))
            return {}

        async def on_roll(args: Args, say: Say) -> dict[str, Any]:
            return await self.restart_rolling(float(args["timeout_seconds"]), say)

        return {"status": on_status, "reload": on_reload, "stop": on_stop, "restart_rolling": on_roll}

    async def status(self) -> dict[str, Any]:
        """What `fleet status` shows: plain values."""
        rows = [row for place in self._places() for row in place.rows(trio.current_time())]
        processes = {p.boot_id: p for place in self._places() for p in place.processes()}

        async def add_figures(row: dict[str, Any]) -> None:
            if row["boot_id"] in processes:
                row["figures"] = await figures_of(processes[row["boot_id"]])

        async with trio.open_nursery() as nursery:
            for row in rows:
                nursery.start_soon(add_figures, row)
        return {
            "fleet": self._settings.fleet.name,
            "state": "stopping" if self._stop_asked.is_set() else "rolling" if self._rolling else "running",
            "config": str(self._config),
            "started_at": self._started_at,
            "processes": rows,
            "unreported_exits": self._reporter.unreported(),
            "waiting_for_restart": self._waiting_changes,
        }

    async def reload(self) -> dict[str, Any]:
        """Read the config again; a bad one changes nothing. {refused: bool, problems, warnings: [text]}"""
        try:
            fresh = load(self._config)
            AuthFiles.read(fresh.auth)
        except UsageFault as refused:
            lines = str(refused).splitlines()
            log.error(Event.CONFIG_REFUSED, problems=lines)
            return {"refused": True, "problems": lines, "warnings": []}
        notify_systemd(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        self._settings, self._waiting_changes = merge_reload(self._settings, fresh)
        said = {"problems": list(self._waiting_changes), "warnings": []}
        for place in self._places():
            place.hurry()
            for process in place.processes():
                for kind, texts in (await self._reload_child(process)).items():
                    said[kind] += texts
        notify_systemd("READY=1")
        log.info(Event.CONFIG_RELOADED, **said)
        return {"refused": False, **said}

    async def _reload_child(self, process: Process) -> dict[str, list[str]]:
        with trio.move_on_after(STOP_SECONDS_MAX):
            await process.settled.wait()  # it may have asked for its spec before this one was there
        if process.link is None or not process.is_serving:
            return {}  # it asks for its spec when it starts
        try:
            with trio.move_on_after(STOP_SECONDS_MAX):
                answer = await process.link.call("reload")
                return {kind: [f"{process.name}: {each}" for each in answer.get(kind, ())]
                        for kind in ("problems", "warnings")} if isinstance(answer, dict) else {}
        except LinkRefused as refused:
            return {"problems": [f"{process.name}: {refused.message}"]}
        except LinkLost:
            return {}
        return {"problems": [f"{process.name}: did not answer in {STOP_SECONDS_MAX:g} s"]}

    async def restart_rolling(self, timeout_seconds: float, say: Say) -> dict[str, Any]:
        """Replace every worker, one after the other. {code, text}"""
        if self._rolling or self._stop_asked.is_set():
            raise LinkRefused("busy", "the fleet is already being restarted or stopped")
        self._rolling = True
        try:
            rolled = await roll_workers(self._workers, self, timeout_seconds, say)
        finally:
            self._rolling = False
        return {"code": rolled.code, "text": rolled.text}

    def retire(self, process: Process) -> None:
        """See rolling.Hands."""
        self._nursery.start_soon(self._retire, process)

    async def _retire(self, process: Process) -> None:
        while await drain(process, RETIRE_SECONDS) is not None:
            with trio.move_on_after(RETIRE_AGAIN_SECONDS):
                await process.ended.wait()
        await self.end(process)

    # stopping

    def _ask_stop(self, *, drain_first: bool) -> None:
        if not self._stop_asked.is_set():
            self._stop_asked.set()
            for place in self._places():
                place.try_now.set()  # nothing is tried any more: let go who waits for the next try
            self._nursery.start_soon(self._shut_down, drain_first)

    async def _shut_down(self, drain_first: bool) -> None:
        log.info(Event.FLEET_STOPPING, fleet=self._settings.fleet.name, drain=drain_first)
        notify_systemd("STOPPING=1")
        self._sockets.release()  # a worker's own copies are closed when it ends
        grace = self._settings.fleet.drain_timeout_seconds if drain_first else 0.0
        async with trio.open_nursery() as nursery:
            for place in self._workers:
                for process in list(place.processes()):
                    nursery.start_soon(self._drain_then_end, process, grace)
        with trio.move_on_after(REPORT_SECONDS_MAX):
            await self._reporter.all_reported()
        if self._coordinator.current is not None:
            await self.end(self._coordinator.current)
        self._stopped.set()

    async def _drain_then_end(self, process: Process, grace_seconds: float) -> None:
        if grace_seconds > 0:
            with trio.move_on_after(grace_seconds + 2 * DRAIN_MARGIN_SECONDS):
                await drain(process, grace_seconds, last=True)
        await self.end(process)

    async def end(self, process: Process) -> None:
        """Stop it in order (it closes its sessions with proof), then by SIGTERM, then for certain."""
        with trio.move_on_after(STOP_SECONDS_MAX):
            if process.link is not None and process.is_serving:
                with contextlib.suppress(LinkLost, LinkRefused):
                    await process.link.call("stop")
                await process.ended.wait()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.ended.is_set():
                return
            process.signal(number)
            with trio.move_on_after(TERMINATE_SECONDS_MAX):
                await process.ended.wait()

    def _end_all_now(self) -> None:
        for place in self._places():
            for process in list(place.processes()):
                if process.ending is None:
                    process.end_now()
                    self._reporter.note_end(process)
