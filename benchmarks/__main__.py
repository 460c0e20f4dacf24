"""`python -m benchmarks NAME`: measure, print the figures beside their bounds, write out/NAME.json."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.bulk import weigh
from benchmarks.comparison import FULL, QUICK, compare
from benchmarks.fairness import shares
from benchmarks.ledger import weigh_ledger
from benchmarks.logins import storms
from benchmarks.measure import Void
from benchmarks.waits import waits
from pooler.demo.process import PartFailed

OUT = Path(__file__).parent / "out"
# what, how to read it, and the bound that must hold: lower is better for a cost, higher for a speed
Bounds = dict[tuple[str, ...], tuple[str, str, float]]
BULK_BOUNDS: Bounds = {("highest_mib_above_idle",): ("MiB of a worker above idle", "<=", 64)}
LOGIN_BOUNDS: Bounds = {
    ("ratio", "p99_ms"): ("p99 of transactions while 1,000 log in", "<=", 1.0),
    ("ratio", "seconds"): ("time until the last is in", "<=", 3.0),
}
LEDGER_BOUNDS: Bounds = {
    ("session", "more_p50_ms"): ("ms of a reservation, p50", "<=", 5.0),
    ("at_once", "burst_ratio"): ("64 at once beside plain puts", ">=", 0.5),
    ("steady", "per_transaction"): ("etcd requests per transaction", "<=", 0.0),
}
FAIRNESS_BOUNDS: Bounds = {
    ("worst_off",): ("off the weights, the worst case", "<=", 0.05),
    ("least_finished",): ("finished, the fewest of a case", ">=", 20_000),
    ("most_busy",): ("permits in use, the most of a case", "<=", 1.0),
    ("least_busy",): ("permits busy, the fewest of a case", ">=", 0.95),
    ("flood_moves",): ("p99 wait moved by, in transactions", "<=", 1.0),
}
WAIT_BOUNDS: Bounds = {("worst_ratio",): ("p99 / p50 of 500 clients on 40", "<=", 1.0)}
BOUNDS: Bounds = {
    ("cpu_ratio", "simple"): ("CPU per transaction, simple", "<=", 1.8),
    ("cpu_ratio", "extended"): ("CPU per transaction, extended", "<=", 1.8),
    ("cpu_ratio", "prepared"): ("CPU per transaction, prepared", "<=", 1.8),
    ("tps_ratio_2_workers",): ("tps of 2 workers, 100 clients", ">=", 0.9),
    ("bytes_per_idle_client", "ours"): ("bytes per idle client", "<=", 6144),
    ("etcd_requests_per_transaction",): ("etcd requests per transaction", "<=", 0.0),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=["quick", "full", "bulk", "logins", "ledger", "fairness", "waits"],
                        help="quick takes under 90 seconds; bulk is about memory while much passes, logins "
                             "about what many at once cost the transactions of others, ledger about what "
                             "a session's permit costs, fairness about who gets how many of "
                             "them, waits about how even it is")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bound is missed")
    arguments = parser.parse_args()
    try:
        if arguments.name == "bulk":
            result, bounds = weigh(_say), BULK_BOUNDS
        elif arguments.name == "logins":
            result, bounds = storms(_say), LOGIN_BOUNDS
        elif arguments.name == "ledger":
            result, bounds = weigh_ledger(_say), LEDGER_BOUNDS
        elif arguments.name == "fairness":
            result, bounds = shares(_say), FAIRNESS_BOUNDS
        elif arguments.name == "waits":
            result, bounds = waits(_say), WAIT_BOUNDS
        else:
            result, bounds = compare(QUICK if arguments.name == "quick" else FULL, _say), BOUNDS
    except (Void, PartFailed) as fault:
        print(f"benchmarks: {fault}", file=sys.stderr)
        return 1
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{arguments.name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    rows = list(table(result, bounds))
    for _, line in rows:
        print(line)
    print(f"{result['seconds']} s; all figures and both configurations: {path}")
    return 1 if arguments.check and not all(held for held, _ in rows) else 0


def _say(line: str) -> None:
    print(line, flush=True)


def table(result: dict[str, Any], bounds: Bounds) -> Iterator[tuple[bool, str]]:
    """Each figure beside its bound."""
    yield True, f"{'against ' + result['peer'] if 'peer' in result else '':34} {'found':>9}   must"
    for keys, (what, sign, bound) in bounds.items():
        value: Any = result
        for key in keys:
            value = value[key]
        held = value <= bound if sign == "<=" else value >= bound
        yield held, f"{what:34} {value:>9}   {sign} {bound}{'' if held else '   MISSED'}"


if __name__ == "__main__":
    sys.exit(main())
