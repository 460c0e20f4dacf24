"""Telling the ledger which workers have ended: noted on disk first, then sent until the ledger has it."""

from __future__ import annotations

import math

import structlog
import trio

from coordinator.link import LinkLost, LinkRefused
from pooler.observe.events import Event
from pooler.supervise.exits import Exit, ExitFiles
from pooler.supervise.place import WORKER, Place
from pooler.supervise.process import Process

ANSWER_SECONDS_MAX = 3.0
TELL_AGAIN_SECONDS = 1.0

log = structlog.get_logger()


class ExitReporter:
    """Notes the end of every process and reports those of workers. `run()` must be running for reports."""

    def __init__(self, files: ExitFiles, coordinator: Place) -> None:
        self._files = files
        self._coordinator = coordinator
        self._news = trio.Event()

    @property
    def news(self) -> trio.Event:
        """Set at the next change: a process ready or ended, a report taken. Take it before looking."""
        return self._news

    def spread_news(self) -> None:
        """Something changed: let everybody who waits look again."""
        self._news.set()
        self._news = trio.Event()

    def note_end(self, process: Process) -> None:
        """Write down that it ended, once. Never raises: without the note its boot file stands for it."""
        ending = process.ending
        if ending is None or process.is_noted:
            return
        process.is_noted = True
        try:
            if process.role == WORKER:
                self._files.note_exit(process.boot_id, ending.how)
            else:
                self._files.forget(process.boot_id)
        except OSError as fault:
            log.error(Event.SOMETHING_FAILED, what="cannot note an exit in run_dir", why=fault.strerror,
                      boot_id=process.boot_id)
        tell = log.info if ending.code == 0 else log.warning
        tell(Event.PROCESS_EXITED, process=process.name, pid=process.pid, boot_id=process.boot_id,
             how=str(ending))

    def unreported(self) -> int:
        """Exits that the ledger does not have yet."""
        return len(self._files.unreported())

    async def run(self) -> None:
        """Report for ever: at once when there is news, again each second while something is left."""
        while True:
            news = self._news
            await self._report()
            with trio.move_on_after(TELL_AGAIN_SECONDS if self._files.unreported() else math.inf):
                await news.wait()

    async def all_reported(self) -> None:
        """Return once nothing is left to report, or nobody is there to take it."""
        while True:
            news, coordinator = self._news, self._coordinator.current
            if coordinator is None or not coordinator.is_serving or not self._files.unreported():
                return
            await news.wait()

    async def _report(self) -> None:
        for seen in self._files.unreported():
            if not await self._is_taken(seen):
                return
            self._files.forget(seen.boot_id)
            self.spread_news()

    async def _is_taken(self, seen: Exit) -> bool:
        coordinator = self._coordinator.current
        if coordinator is None or coordinator.link is None or not coordinator.is_serving:
            return False
        try:
            with trio.move_on_after(ANSWER_SECONDS_MAX):
                values = {"boot_id": seen.boot_id, "how": seen.how, "at_us": seen.at_us}
                await coordinator.link.call("worker_exited", **values)
                return True
        except (LinkLost, LinkRefused):
            pass
        return False
