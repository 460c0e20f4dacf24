"""`python -m chaos run all|NAME [--seed N] [--seconds S] [--json FILE]`: exit 0 only if all verdicts hold.

`python -m chaos replay relay-client|relay-server|port --seed N NUMBER …`: what one client of the fuzz was
sent, again, as a run that found it wrong has named it.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

from chaos.drain import drain
from chaos.fuzz import REPLAYED, fuzz, replay
from chaos.ledger import ledger
from chaos.outcome import Outcome
from chaos.storm import storm
from pooler.demo import judge
from pooler.demo.process import PartFailed

Scenario = Callable[[int, float, Callable[[str], None]], Outcome]
SCENARIOS: dict[str, Scenario] = {"storm": storm, "fuzz": fuzz, "ledger": ledger, "drain": drain}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("verb", choices=["run", "replay"])
    parser.add_argument("name", choices=["all", *SCENARIOS, *REPLAYED])
    parser.add_argument("numbers", type=int, nargs="*", metavar="NUMBER")
    parser.add_argument("--seed", type=int, help="repeats a run; default: a new one, printed")
    parser.add_argument("--seconds", type=float, default=60, help="how long each scenario disturbs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_intermixed_args()
    if (arguments.verb == "replay") != (arguments.name in REPLAYED and bool(arguments.numbers)):
        parser.error("scenarios are run; what is replayed has numbers")
    if arguments.verb == "replay":
        wrong = replay(arguments.name, arguments.seed or 0, arguments.numbers, print)
        print("\n".join(wrong) or "nothing was wrong")
        return 1 if wrong else 0
    seed = arguments.seed if arguments.seed is not None else secrets.randbelow(2**31)
    names = list(SCENARIOS) if arguments.name == "all" else [arguments.name]
    results = {name: run_one(name, seed, arguments.seconds) for name in names}
    if arguments.json:
        arguments.json.write_text(json.dumps({"seed": seed, "scenarios": results}, indent=2) + "\n")
    return 0 if all(each["passed"] for each in results.values()) else 1


def run_one(name: str, seed: int, seconds: float) -> dict[str, object]:
    """One scenario: its figures, PASS or FAIL with the reason."""
    print(f"{name}: seed {seed}", flush=True)
    try:
        result = SCENARIOS[name](seed, seconds, lambda line: print(f"  {line}", flush=True))
    except PartFailed as failed:
        print(f"{name}: FAIL: {failed}")
        return {"passed": False, "error": str(failed)}
    for verdict in result.verdicts:
        print(f"  {'ok  ' if verdict.held else 'FAIL'} {verdict.name:8} {verdict.text}")
    failed_names = [verdict.name for verdict in result.verdicts if not verdict.held]
    print(f"{name}: {'FAIL: ' + ', '.join(failed_names) if failed_names else 'PASS'}")
    return {"passed": not failed_names, "checks": judge.figures(result.verdicts), **result.figures}


if __name__ == "__main__":
    sys.exit(main())
