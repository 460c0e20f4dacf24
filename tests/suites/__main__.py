"""`python -m tests.suites NAME`: a driver's own tests, through the pooler and straight at PostgreSQL."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

from pooler.demo.process import PartFailed
from tests.suites import node, pg_regress
from tests.suites.asyncpg import Asyncpg
from tests.suites.known import by_reason, known
from tests.suites.outcomes import Difference, Run, differences
from tests.suites.pg8000 import Pg8000
from tests.suites.postgres_js import PostgresJs
from tests.suites.psycopg2 import Psycopg2
from tests.suites.rig import Pool
from tests.suites.run import Plan, Suite, kept, measure
from tests.suites.sqlalchemy import EVERYTHING, SqlAlchemy

_ALL: Final[tuple[Suite, ...]] = (
    Asyncpg(), Psycopg2(), Pg8000(), SqlAlchemy("psycopg"), SqlAlchemy("psycopg_async"),
    SqlAlchemy("asyncpg"), SqlAlchemy("psycopg2"), SqlAlchemy("pg8000"), SqlAlchemy("psycopg", EVERYTHING),
    pg_regress.PgRegress(), pg_regress.PINNED, pg_regress.ONCE,
    node.NodePostgres(), node.PINNED, PostgresJs(),
)
SUITES: Final[Mapping[str, Suite]] = {suite.name: suite for suite in _ALL}
POOLS: Final[tuple[Pool, ...]] = ("direct", "session", "transaction")


def main(words: Sequence[str] | None = None) -> int:
    """Exit 1 when a test passes straight at the server and not through the pooler, and it is not known why;
    2 when a part failed."""
    arguments = _parser().parse_args(words)
    signal.signal(signal.SIGTERM, _end)
    plan = Plan(SUITES[arguments.name], arguments.postgres, arguments.only)
    pools: Sequence[Pool] = arguments.pool or ("session",)
    try:
        runs = kept(plan, pools, _say) if arguments.kept else measure(
            plan, pools, _say, fresh_direct=arguments.fresh or "direct" in pools)
    except PartFailed as fault:
        print(f"{arguments.name}: {fault}", file=sys.stderr)  # noqa: T201  this is its output
        return 2
    faults = [_report(plan.suite.name, pool, runs, detail=arguments.detail)
              for pool in runs if pool != "direct"]
    return 1 if any(faults) else 0


def _end(number: int, frame: object) -> NoReturn:
    """What was started is ended on the way out."""
    raise SystemExit(128 + number)


def _report(suite: str, pool: Pool, runs: Mapping[Pool, Run], *, detail: bool) -> int:
    """Says how a pooled run differs; how many losses have no known reason."""
    found = differences(runs["direct"], runs[pool])
    lost = [each for each in found if each.is_loss]
    sorted_out = by_reason(lost, known(suite, pool))
    unknown = sorted_out.pop("", [])
    _say(f"{pool}: {len(lost)} passed directly and not through the pooler, {len(unknown)} of them for no"
         f" known reason; {len(found) - len(lost)} differ otherwise")
    for reason, tests in sorted(sorted_out.items()):
        _say(f"  {reason}: {len(tests)}")
    for each in [*unknown, *(each for each in found if not each.is_loss), *(lost if detail else ())]:
        _say(_line(each))
        if detail:
            _say(each.pooled.detail)
    return len(unknown)


def _line(each: Difference) -> str:
    verdicts = f"{each.direct.verdict} directly, {each.pooled.verdict} pooled"
    return f"  {each.test}: {verdicts}: {each.pooled.reason}"


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201  this is its output


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.suites", description=__doc__)
    parser.add_argument("name", choices=sorted(SUITES))
    parser.add_argument("--pool", action="append", choices=POOLS,
                        help="may be repeated; `direct` runs that side anew (default: session)")
    parser.add_argument("--postgres", type=int, default=18, help="major version (default: 18)")
    parser.add_argument("--only", action="append", default=[], help="a test's name; may be repeated")
    parser.add_argument("--fresh", action="store_true", help="do not reuse an earlier direct run")
    parser.add_argument("--kept", action="store_true", help="run nothing: what the last whole runs gave")
    parser.add_argument("--detail", action="store_true", help="the end of each difference's error")
    return parser


if __name__ == "__main__":
    sys.exit(main())
