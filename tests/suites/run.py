"""Runs one suite against one target, and again what ended otherwise; what it says is the caller's to print.

A suite is any object with the members of `Suite`; `SUITES` of `__main__` has them all.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pooler.demo.postgres import Server
from pooler.demo.process import PartFailed
from tests.suites.outcomes import Run, differences, from_lines, settled, to_lines, totals
from tests.suites.rig import Pool, Target, target
from tests.suites.sources import cache

Say = Callable[[str], None]
AGAIN_MAX = 400  # more differences than these are no matter of chance


class Suite(Protocol):
    """A driver's own tests: where they come from, what server they want, how they are run."""

    @property
    def name(self) -> str:
        """The word on the command line, and of its directory in the cache."""

    @property
    def postgres(self) -> Mapping[str, str]:
        """Settings of the server."""

    @property
    def pooler(self) -> Mapping[str, Mapping[str, Any]]:
        """Sections of pooler.yaml, beyond the rig's own."""

    def prepare(self, home: Path) -> str:
        """Fetch and build it in `home`, once; returns its version. Raises PartFailed."""

    def set_up(self, server: Server) -> None:
        """What it needs there beyond the database and the superuser of the rig."""

    def run(self, home: Path, where: Target, out: Path, only: Sequence[str]) -> Run:
        """All its tests, or `only` these; `out` is a directory of this run's own. Raises PartFailed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One suite at one version of PostgreSQL."""

    suite: Suite
    version: int
    only: Sequence[str] = ()

    @property
    def home(self) -> Path:
        return cache() / self.suite.name


def measure(
    plan: Plan, pools: Sequence[Pool], say: Say, *, fresh_direct: bool = False
) -> dict[Pool, Run]:
    """The suite straight at the server (an earlier run's result will do unless `fresh_direct`) and through
    each pool; what differs is run once more on both sides. Raises PartFailed."""
    release = plan.suite.prepare(plan.home)
    say(f"{plan.suite.name} {release}, PostgreSQL {plan.version}")
    runs: dict[Pool, Run] = {}
    direct = None if fresh_direct or plan.only else load(plan, "direct")
    if direct is None:
        direct = one_run(plan, "direct", plan.only, say)
    else:
        say(f"direct: {totals(direct)} (of an earlier run)")
    for pool in (pool for pool in pools if pool != "direct"):
        pooled = one_run(plan, pool, plan.only, say)
        direct, runs[pool] = _again(plan, pool, direct, pooled, say)
        save(plan, pool, runs[pool], release)
    save(plan, "direct", direct, release)
    return {"direct": direct, **runs}


def kept(plan: Plan, pools: Sequence[Pool], say: Say) -> dict[Pool, Run]:
    """What the last whole runs gave. Raises PartFailed where there was none."""
    runs: dict[Pool, Run] = {}
    for pool in ("direct", *pools):
        run = load(plan, pool)
        if run is None:
            raise PartFailed(f"no run of {plan.suite.name} at PostgreSQL {plan.version}, {pool}, is kept")
        runs[pool] = run
        about = json.loads(_file(plan, pool).with_suffix(".json").read_text())
        say(f"{plan.suite.name} {about['release']}, PostgreSQL {plan.version}, {pool}: {totals(run)}"
            f" ({about['at']})")
    return runs


def one_run(plan: Plan, pool: Pool, only: Sequence[str], say: Say) -> Run:
    """On a server, and in front of it a fleet, of this run's own. Their logs stay beside the results."""
    suite = plan.suite
    out = plan.home / "results" / f"pg{plan.version}-{pool}{'-some' if only else ''}"
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with target(pool, plan.version, settings=suite.postgres, set_up=suite.set_up,
                sections=suite.pooler) as where:
        try:
            found = suite.run(plan.home, where, out, only)
        finally:
            for log in (where.log, where.server.log):
                if log is not None:
                    (out / f"{log.parent.name}.log").write_bytes(log.read_bytes())
    say(f"{pool}: {totals(found)} in {time.monotonic() - began:.0f} s")
    return found


def _again(plan: Plan, pool: Pool, direct: Run, pooled: Run, say: Say) -> tuple[Run, Run]:
    """Chance aside: whatever differs is run once more on both sides, and the better of two counts on each."""
    names = [each.test for each in differences(direct, pooled)]
    if not 0 < len(names) <= AGAIN_MAX:
        return direct, pooled
    say(f"{pool}: {len(names)} differ, once more:")
    return (settled(direct, one_run(plan, "direct", names, say)),
            settled(pooled, one_run(plan, pool, names, say)))


def _file(plan: Plan, pool: Pool) -> Path:
    return plan.home / f"pg{plan.version}-{pool}.jsonl"


def save(plan: Plan, pool: Pool, run: Run, release: str) -> None:
    """Beside the suite in the cache; a run of a part of it is not kept."""
    if plan.only:
        return
    _file(plan, pool).write_text("".join(line + "\n" for line in to_lines(run)))
    about = {"suite": plan.suite.name, "release": release, "postgres": plan.version, "pool": pool,
             "totals": totals(run), "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    _file(plan, pool).with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n")


def load(plan: Plan, pool: Pool) -> Run | None:
    """What `save` kept."""
    path = _file(plan, pool)
    return from_lines(path.read_text().splitlines()) if path.exists() else None


def command(
    argv: Iterable[str | Path], log: Path, *, cwd: Path, env: Mapping[str, str], seconds_max: float,
    unset: Sequence[str] = (),
) -> int:
    """A suite's own runner to its end, its output in `log`; its exit status is not judged: tests fail.

    It and all it started are ended when the time is over, and PartFailed is raised."""
    inherited = {name: value for name, value in os.environ.items()
                 if not name.startswith("PG") and name not in unset}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(word) for word in argv], cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            env={**inherited, **env}, start_new_session=True)
        try:
            return process.wait(seconds_max)
        except subprocess.TimeoutExpired:
            raise PartFailed(f"the suite has not ended within {seconds_max:g} s: {log}") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
