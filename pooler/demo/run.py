"""The story of `pooler demo`: two tenants' load, a worker killed with -9, a planned failover under load.

Does it and writes down what was said; what that proves is pooler.demo.evidence's business.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pooler.demo import schema
from pooler.demo.fleet import import_path
from pooler.demo.load import Group, LoadSpec
from pooler.demo.parts import BATCH, DBNAME, PASSWORDS, SHOP, Parts
from pooler.demo.process import Child

TRANSACTIONS_MIN = 20_000
AROUND_SECONDS = 2.0
LOAD_SECONDS_MAX = 90.0
SETTLE_SECONDS = 30.0
DRAIN_TIMEOUT_SECONDS = 20

GROUPS = (
    Group("shop", SHOP, PASSWORDS[SHOP], schema.LOOKUP, 14),
    Group("shop", SHOP, PASSWORDS[SHOP], schema.WRITE, 4, writes=True),
    Group("batch", BATCH, PASSWORDS[BATCH], schema.REPORT, 6),
)


@dataclass(frozen=True, slots=True)
class Killed:
    """The worker that was killed, and what it held then."""

    boot_id: str
    pid: int
    index: int
    at: float
    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class Drained:
    """How the drain went. Times are seconds since 1970."""

    start: float
    end: float
    exit_code: int
    said: str


@dataclass(frozen=True, slots=True)
class Told:
    """What the story leaves behind for the judge."""

    load: dict[str, Any]  # LoadReport of pooler.demo.load
    killed: Killed
    drained: Drained
    timeline: list[tuple[float, str]]  # seconds since the load began: what
    began: float  # seconds since 1970


class Story:
    """One run over running parts. `say` is told each step as it happens."""

    def __init__(self, parts: Parts, say: Callable[[str], None], seconds: float) -> None:
        self.parts, self._say, self._seconds = parts, say, seconds
        self._timeline: list[tuple[float, str]] = []
        self._progress = parts.directory / "progress.json"
        self._result = parts.directory / "result.json"
        self._zero = time.time()

    def tell(self) -> Told:
        """The load, the kill and the drain, and then the quiet after them. Raises PartFailed."""
        load = self._start_load()
        try:
            self._wait(load, lambda: self._has_run(0.25) and self._moved() > 0, "the load moves")
            killed = self._kill_worker()
            self._wait(load, lambda: self._has_run(0.55), "the load goes on after the kill")
            drained = self._drain()
            late = time.monotonic() + LOAD_SECONDS_MAX
            load.wait_until(lambda: self._has_run(1.0) and time.time() > drained.end + AROUND_SECONDS
                            and (self._moved() >= TRANSACTIONS_MIN or time.monotonic() > late),
                            "the load is done", LOAD_SECONDS_MAX + 5)  # the judge sees how much it has done
        finally:
            load.stop(signal.SIGTERM, 30)
        self._note("load ends")
        self._settle(killed)
        return Told(json.loads(self._result.read_text()), killed, drained, self._timeline, self._zero)

    def _start_load(self) -> Child:
        spec = LoadSpec("127.0.0.1", self.parts.port, DBNAME, GROUPS, str(self._result), str(self._progress))
        path = self.parts.directory / "load.json"
        spec.save(path)
        self._zero = time.time()
        self._note(f"load starts: {sum(group.clients for group in GROUPS)} clients of two tenants")
        return Child([sys.executable, "-m", "pooler.demo.load", path], self.parts.directory / "load.log",
                     env={"PYTHONPATH": import_path()})

    def _wait(self, load: Child, fact: Callable[[], bool], what: str) -> None:
        load.wait_until(fact, what, LOAD_SECONDS_MAX)

    def _has_run(self, share: float) -> bool:
        return time.time() - self._zero >= share * self._seconds

    def _moved(self) -> int:
        try:
            return int(json.loads(self._progress.read_text())["done"])
        except FileNotFoundError:
            return 0

    def _kill_worker(self) -> Killed:
        workers = self.parts.watch.workers()
        held = {worker.boot_id: self.parts.watch.owned_by(worker.boot_id) for worker in workers}
        victim = max(workers, key=lambda worker: len(held[worker.boot_id]))
        os.kill(victim.pid, signal.SIGKILL)
        killed = Killed(victim.boot_id, victim.pid, victim.index, time.time(),
                        frozenset(self.parts.watch.owned_by(victim.boot_id)))
        self._note(f"worker {victim.index} (pid {victim.pid}) killed with -9; "
                   f"it holds {len(killed.keys)} permits")
        return killed

    def _drain(self) -> Drained:
        parts = self.parts
        promote = [sys.executable, "-m", "pooler.demo.promote", str(parts.primary.installation.bin),
                   str(parts.standby.data), str(parts.primary.directory), str(parts.primary.port)]
        run = f"PYTHONPATH={shlex.quote(import_path())} {shlex.join(promote)}"
        start = time.time()
        self._note(f"drain to the standby on {parts.standby.port} starts, to be promoted under load")
        with parts.parked[0].away(), parts.parked[1].away():
            done = parts.fleet.command("drain", DBNAME, "--to", f"127.0.0.1:{parts.standby.port}",
                                       "--run", run, "--timeout", f"{DRAIN_TIMEOUT_SECONDS}s")
        end = time.time()
        self._note(f"drain ends after {end - start:.2f} s with exit {done.returncode}")
        return Drained(start, end, done.returncode, (done.stderr or done.stdout).strip()[-500:])

    def _settle(self, killed: Killed) -> None:
        """Wait until nothing of the killed worker is left; past the time the judge sees what is."""
        assert self.parts.fleet.child is not None
        deadline = time.monotonic() + SETTLE_SECONDS
        self.parts.fleet.child.wait_until(
            lambda: not self.parts.watch.owned_by(killed.boot_id) or time.monotonic() > deadline,
            "the fleet lives", SETTLE_SECONDS + 5)

    def _note(self, what: str) -> None:
        at = time.time() - self._zero
        self._timeline.append((at, what))
        self._say(f"{at:6.2f} s  {what}")
