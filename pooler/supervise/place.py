"""A place in the fleet (the coordinator, or worker i) and the processes that stand in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import trio

from pooler.supervise.backoff import Deaths
from pooler.supervise.process import Ending, Process

COORDINATOR = "coordinator"
WORKER = "worker"


@dataclass(slots=True)
class Place:
    """`current` serves; `others` are on their way in or out during a rolling restart."""

    role: str
    index: int
    current: Process | None = None
    others: list[Process] = field(default_factory=list)
    deaths: Deaths = field(default_factory=Deaths)
    is_down: bool = False  # died too often, and has not served since
    try_now: trio.Event = field(default_factory=trio.Event)  # set: the next try waits no longer
    last_ending: Ending | None = None

    @property
    def name(self) -> str:
        return self.role if self.role == COORDINATOR else f"{self.role} {self.index}"

    def processes(self) -> Iterator[Process]:
        """Every process of this place that still runs."""
        if self.current is not None:
            yield self.current
        yield from self.others

    def is_settled(self) -> bool:
        """Serving, or down."""
        return self.is_down or (self.current is not None and self.current.is_serving)

    def hurry(self) -> None:
        """An operator asked for another try: the back-off is over and begins anew."""
        self.deaths.forgive()
        self.try_now.set()
        self.try_now = trio.Event()

    def leave(self, process: Process) -> bool:
        """It ended. Returns whether it was the one that serves here."""
        self.last_ending = process.ending
        if self.current is process:
            self.current = None
            return True
        if process in self.others:
            self.others.remove(process)
        return False

    def take_over(self, process: Process) -> Process | None:
        """`process`, ready, serves here from now on; returns the one it replaces, now on its way out."""
        old = self.current
        self.others.remove(process)
        self.current = process
        if old is not None:
            self.others.append(old)
        return old

    def rows(self, now: float) -> Iterator[dict[str, Any]]:
        """What `fleet status` shows of it; `now` in seconds of trio's clock."""
        if self.current is None:
            yield self._row(None, "down" if self.is_down else "restarting", now)
        for process in self.processes():
            yield self._row(process, self._state_of(process), now)

    def _state_of(self, process: Process) -> str:
        if process is not self.current:
            return "retiring" if process.ready.is_set() else "starting"
        return "ready" if process.is_serving else "starting"

    def _row(self, process: Process | None, state: str, now: float) -> dict[str, Any]:
        return {
            "name": self.name,
            "role": self.role,
            "index": self.index,
            "state": state,
            "pid": process.pid if process else None,
            "boot_id": process.boot_id if process else None,
            "text": process.text if process else "",
            "uptime_seconds": round(now - process.started_at, 3) if process else None,
            "deaths": self.deaths.total,
            "last_exit": str(self.last_ending) if self.last_ending else None,
            "figures": {},
        }
