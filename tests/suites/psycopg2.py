"""psycopg2's own tests, from its source distribution, on the library of its binary one."""

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
class Psycopg2:
    """Two-phase commits and replication are switched on: it skips them otherwise."""

    name: str = "psycopg2"
    postgres: Mapping[str, str] = field(default_factory=lambda: {
        "max_prepared_transactions": "10", "wal_level": "logical", "max_wal_senders": "10",
        "max_replication_slots": "10"})
    pooler: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def prepare(self, home: Path) -> str:
        sources.sdist(home, "psycopg2>=2.9.11,<3")
        release = sources.version(home)
        sources.venv(home, [f"psycopg2-binary=={release}", *PYTEST])
        return release

    def set_up(self, server: Server) -> None:
        """The extension that it looks for."""
        server.execute("CREATE EXTENSION IF NOT EXISTS hstore", dbname="test")

    def run(self, home: Path, where: Target, out: Path, only: Sequence[str]) -> Run:
        env = {
            "PSYCOPG2_TESTDB": where.dbname, "PSYCOPG2_TESTDB_HOST": where.host,
            "PSYCOPG2_TESTDB_PORT": str(where.port), "PSYCOPG2_TESTDB_USER": where.user,
            "PSYCOPG2_TESTDB_PASSWORD": where.password, "PSYCOPG2_TEST_REPL_DSN": ""}
        return run_pytest(
            home / "venv" / "bin" / "python", home / "source", out, only=only, seconds_max=1500, env=env,
            arguments=["tests"])
