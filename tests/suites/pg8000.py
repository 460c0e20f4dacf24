"""pg8000's own tests, from its source distribution: a driver without libpq, with three interfaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pooler.demo.postgres import Server
from tests.suites import sources
from tests.suites.outcomes import Run
from tests.suites.rig import Target
from tests.suites.with_pytest import PYTEST, run_pytest

# those want a server each with a way to log in of its own, and time themselves
LEFT_OUT = ("--ignore-glob=test/*/auth", "--ignore-glob=*/test_benchmarks.py", "--ignore=test/test_readme.py")


@dataclass(frozen=True, slots=True)
class Pg8000:
    """It logs in as `postgres`, to the database of that name."""

    name: str = "pg8000"
    postgres: Mapping[str, str] = field(default_factory=lambda: {"max_prepared_transactions": "10"})
    pooler: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def prepare(self, home: Path) -> str:
        source = sources.sdist(home, "pg8000>=1.31,<2")
        sources.venv(home, ["-e", source, *PYTEST, "pytest-mock>=3,<4", "pytz"])
        return sources.version(home)

    def set_up(self, server: Server) -> None:
        """The extension that it looks for."""
        server.execute("CREATE EXTENSION IF NOT EXISTS hstore")

    def run(self, home: Path, where: Target, out: Path, only: Sequence[str]) -> Run:
        env = {name: where.libpq[name] for name in ("PGHOST", "PGPORT", "PGPASSWORD")}
        return run_pytest(
            home / "venv" / "bin" / "python", home / "source", out, only=only, seconds_max=1500, env=env,
            arguments=[*LEFT_OUT, "test"])
