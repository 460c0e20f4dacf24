"""A storm of logins beside running transactions: 1,000 at once, over TLS with SCRAM, as after a deployment.

What counts is what the transactions of others take meanwhile, beside PgBouncer's in the same run, and how
long it is until everybody is in. The load keeps its rate, so that a stall is seen by all that were due in it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.measure import Target, Void, find_pgbench, now
from benchmarks.sides import both_sides
from pooler.demo.fleet import import_path

LOGINS = 1_000
REPEATS = 3
RATE = 300  # transactions a second, by CLIENTS clients
CLIENTS = 4
QUIET_SECONDS = 3.0
LOAD_SECONDS = 20

Say = Callable[[str], None]


def storms(say: Say) -> dict[str, Any]:
    """The result document. Raises PartFailed when a part is missing, Void when a login failed."""
    began = now()
    found: dict[str, list[dict[str, float]]] = {"pooler": [], "pgbouncer": []}
    with both_sides(1, encrypts=True) as sides:
        for number in range(REPEATS):
            for target in (sides.ours, sides.peer()):
                one = _storm(target, sides.directory / f"latency-{number}-{target.name}")
                found[target.name].append(one)
                say(f"{target.name}: {LOGINS} logins in {one['seconds']:.2f} s; transactions meanwhile "
                    f"p50 {one['p50_ms']:.1f} ms, p99 {one['p99_ms']:.1f} ms, "
                    f"slowest {one['slowest_ms']:.1f} ms; before p99 {one['quiet_p99_ms']:.1f} ms")
    medians = {name: {key: sorted(run[key] for run in runs)[REPEATS // 2] for key in runs[0]}
               for name, runs in found.items()}
    ours, peer = medians["pooler"], medians["pgbouncer"]
    return {"logins": LOGINS, "runs": found, "medians": medians,
            "ratio": {key: round(ours[key] / peer[key], 3) for key in ("p99_ms", "slowest_ms", "seconds")},
            "seconds": round(now() - began, 1)}


def _storm(target: Target, log: Path) -> dict[str, float]:
    """One storm: seconds until all are in, and the latencies of the load before and meanwhile."""
    argv = [str(find_pgbench()), "-n", "-S", "-c", str(CLIENTS), "-j", "1", "-T", str(LOAD_SECONDS),
            "-R", str(RATE), "-l", "--log-prefix", str(log)]
    with subprocess.Popen(argv, env=target.environment, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL) as load:
        with suppress(subprocess.TimeoutExpired):
            load.wait(QUIET_SECONDS)
        environment = {**target.environment, "PGSSLMODE": "require", "PYTHONPATH": import_path()}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.login_storm", str(LOGINS)], env=environment,
            capture_output=True, text=True, check=False)
        if done.returncode or load.wait():
            raise Void(f"{target.name}: {done.stderr.strip() or 'pgbench failed'}")
    begun, ended, _ = map(float, done.stdout.split())
    before, meanwhile = [], []
    for line in next(log.parent.glob(f"{log.name}.*")).read_text().splitlines():
        words = line.split()
        latency_us, at = float(words[2]), float(words[4]) + float(words[5]) / 1e6
        if at < begun:
            before.append(latency_us)
        elif at - latency_us / 1e6 < ended:  # it ended in the storm, or began in it
            meanwhile.append(latency_us)
    if not before or not meanwhile:
        raise Void(f"{target.name}: no transaction beside the storm")
    return {"seconds": ended - begun, "p50_ms": _part(meanwhile, 0.5), "p99_ms": _part(meanwhile, 0.99),
            "slowest_ms": max(meanwhile) / 1000, "quiet_p99_ms": _part(before, 0.99)}


def _part(latencies_us: list[float], part: float) -> float:
    return sorted(latencies_us)[int(len(latencies_us) * part)] / 1000
