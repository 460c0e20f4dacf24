"""The comparison: CPU per transaction, speed of two workers, memory of idle clients, requests to etcd.

QUICK is for every day and takes under 90 seconds; FULL repeats more and longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from psycopg.sql import SQL, Literal

from benchmarks.measure import Run, Target, median_of, now, pgbench, resident_bytes
from benchmarks.sides import POOL_SIZE, SCALE, Sides, both_sides, idle_clients

WORKERS = 2
MODES = {"simple": "transaction", "extended": "transaction", "prepared": "session"}  # and the peer's pooling
CPU_CLIENTS, SPEED_CLIENTS = 16, 100

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. Times in seconds, of one run."""

    repeats: int
    cpu_seconds: float
    speed_repeats: int  # more and shorter: on two busy cores single runs differ by a tenth
    speed_seconds: float
    idle_clients: int


QUICK = Plan(repeats=2, cpu_seconds=3, speed_repeats=5, speed_seconds=2, idle_clients=2_000)
FULL = Plan(repeats=5, cpu_seconds=10, speed_repeats=5, speed_seconds=20, idle_clients=5_000)


def compare(plan: Plan, say: Say) -> dict[str, Any]:
    """The result document. Raises Void when a run had errors, PartFailed when a part is missing."""
    began = now()
    with both_sides(WORKERS) as sides:
        version = sides.peers["transaction"].version
        say(f"{WORKERS} workers beside {version}")
        idle = {"ours": _bytes_per_idle(sides.ours, sides.fleet_pids(), plan.idle_clients),
                "peer": _bytes_per_idle(sides.peer(), sides.peer_pids(), plan.idle_clients)}
        say(f"bytes per idle client: {idle['ours']} ours, {idle['peer']} peer")
        runs = {mode: _pair(sides, mode, CPU_CLIENTS, plan.repeats, plan.cpu_seconds, say) for mode in MODES}
        speed = _pair(sides, "simple", SPEED_CLIENTS, plan.speed_repeats, plan.speed_seconds, say)
        etcd = etcd_requests(sides, plan.speed_seconds)
        config = sides.fleet.config.read_text()
        peer_config = sides.peers["transaction"].file.read_text()
    return {
        "peer": version,
        "cpu_ratio": {mode: _ratio(runs[mode], "cpu_us") for mode in MODES},
        "tps_ratio_2_workers": _ratio(speed, "tps"),
        "bytes_per_idle_client": idle,
        "etcd_requests_per_transaction": etcd["per_transaction"],
        "etcd_requests": etcd,
        "runs": {name: {side: [_shown(run) for run in each] for side, each in pair.items()}
                 for name, pair in {**runs, "speed": speed}.items()},
        "settings": {"workers": WORKERS, "pool_size": POOL_SIZE, "scale": SCALE, "peer_pool_mode": MODES,
                     "cpu_clients": CPU_CLIENTS, "speed_clients": SPEED_CLIENTS, **asdict(plan)},
        "config": config, "peer_config": peer_config, "seconds": round(now() - began, 1),
    }


def _pair(
    sides: Sides, mode: str, clients: int, repeats: int, seconds: float, say: Say
) -> dict[str, list[Run]]:
    """Both sides in turn, so that a noisy moment hits both."""
    pool_mode = MODES[mode]
    found: dict[str, list[Run]] = {"ours": [], "peer": []}
    for _ in range(repeats):
        for side, target, pids in (("ours", sides.ours, sides.fleet_pids()),
                                   ("peer", sides.peer(pool_mode), sides.peer_pids(pool_mode))):
            found[side].append(pgbench(target, pids, clients=clients, seconds=seconds, mode=mode))
    say(f"{mode}, {clients} clients: " + "; ".join(
        f"{side} {median_of(runs, 'tps'):.0f} tps, {median_of(runs, 'cpu_us'):.1f} us CPU"
        for side, runs in found.items()))
    return found


def _bytes_per_idle(target: Target, pids: set[int], count: int) -> int:
    with idle_clients(target, 20):
        before = resident_bytes(pids)
        with idle_clients(target, count):
            return round((resident_bytes(pids) - before) / count)


def etcd_requests(sides: Sides, seconds: float) -> dict[str, float]:
    """By etcd's own counters, keep-alives and watches aside: those of a run less those of an idle time as
    long (the coordinator reads epoch and policy by the clock, load or not). Under one in 2,000 is none."""
    pids = sides.fleet_pids()
    start, asked = now(), sides.etcd.requests()
    run = pgbench(sides.ours, pids, clients=SPEED_CLIENTS, seconds=seconds)
    loaded, lasted = sides.etcd.requests() - asked, now() - start
    asked = sides.etcd.requests()
    sides.server.execute(SQL("SELECT pg_sleep({})").format(Literal(lasted)))
    idle = sides.etcd.requests() - asked
    return {"loaded": loaded, "idle": idle, "seconds": round(lasted, 2), "transactions": run.transactions,
            "per_transaction": round(max(0.0, loaded - idle) / run.transactions, 3)}


def _ratio(pair: dict[str, list[Run]], field: str) -> float:
    return round(median_of(pair["ours"], field) / median_of(pair["peer"], field), 3)


def _shown(run: Run) -> dict[str, Any]:
    return {"transactions": run.transactions, "failed": run.failed, "tps": round(run.tps, 1),
            "latency_ms": run.latency_ms, "cpu_us": round(run.cpu_us, 2),
            "cpu_us_by_process": {name: round(each, 2) for name, each in run.cpu_us_by_process.items()}}
