"""How even waits are: 500 clients on 40 sessions, equal transactions, all served.

What counts is p99 over p50, beside PgBouncer's in the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import Target, Void, finished, logged, now, started
from benchmarks.sides import both_sides

CLIENTS, SESSIONS, WORKERS = 500, 40, (1, 2)
MS = 20.0  # a transaction at the server: sessions are short, and not this machine's processors
SECONDS, SETTLED_SECONDS = 30, 5

Say = Callable[[str], None]


def waits(say: Say) -> dict[str, Any]:
    """The result document. Raises PartFailed when a part is missing, Void when a client was not served."""
    began = now()
    runs: dict[str, dict[str, dict[str, float]]] = {}
    for workers in WORKERS:
        with both_sides(workers, pool_size=SESSIONS) as sides:
            of = runs[str(workers)] = {}
            for target in (sides.peer(), sides.ours):
                of[target.name] = one = _run(target, sides.directory)
                say(f"{workers} workers, {target.name}: {one['finished']:.0f} finished, "
                    f"p50 {one['p50_ms']:.0f} ms, p99 {one['p99_ms']:.0f} ms, p99 / p50 {one['spread']:.3f}")
    ratios = {workers: round(of["pooler"]["spread"] / of["pgbouncer"]["spread"], 3)
              for workers, of in runs.items()}
    return {"runs": runs, "ratio": ratios, "worst_ratio": max(ratios.values()), "peer": "pgbouncer",
            "seconds": round(now() - began, 1)}


def _run(target: Target, directory: Path) -> dict[str, float]:
    script = directory / "wait.sql"
    script.write_text(f"select pg_sleep({MS / 1000});\n")
    log = directory / f"wait-{target.name}"
    arguments = ["-f", str(script), "-c", str(CLIENTS), "-j", "1", "-T", str(SECONDS), "-l",
                 "--log-prefix", str(log)]
    with started(target, arguments) as run:
        total = finished(run)
    done = logged(log)
    first = min(each.at for each in done) + SETTLED_SECONDS
    served = {each.client for each in done}
    latencies = sorted(each.latency_ms for each in done if each.at >= first)
    if len(served) < CLIENTS or not latencies:
        raise Void(f"{target.name}: only {len(served)} of {CLIENTS} clients were served")
    p50, p99 = (latencies[int(len(latencies) * part)] for part in (0.5, 0.99))
    return {"finished": float(total), "p50_ms": p50, "p99_ms": p99, "spread": round(p99 / p50, 4)}
