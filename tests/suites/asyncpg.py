"""asyncpg's own tests, from its source distribution."""

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


@dataclass(frozen=True, slots=True)
class Asyncpg:
    """Given PGHOST it uses the server there, and leaves out what wants to configure one."""

    name: str = "asyncpg"
    postgres: Mapping[str, str] = field(default_factory=dict)
    pooler: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def prepare(self, home: Path) -> str:
        source = sources.sdist(home, "asyncpg>=0.31,<0.40")
        # in place, for its tests are started where the package's source is found first
        sources.venv(home, ["-e", source, *PYTEST, "uvloop>=0.22", "distro"])
        return sources.version(home)

    def set_up(self, server: Server) -> None:
        """It needs nothing more."""

    def run(self, home: Path, where: Target, out: Path, only: Sequence[str]) -> Run:
        source = home / "source"
        env = {**where.libpq, "PGDATABASE": "postgres"}  # some tests are about the two of them
        return run_pytest(
            home / "venv" / "bin" / "python", source, out, only=only, seconds_max=1500, env=env,
            arguments=["tests", "--deselect", "tests/test__sourcecode.py"])
