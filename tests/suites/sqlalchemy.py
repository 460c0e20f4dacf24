"""SQLAlchemy's own tests of its PostgreSQL dialect, with one of its drivers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pooler.demo.postgres import Server
from tests.suites import sources
from tests.suites.outcomes import Run
from tests.suites.rig import DATABASE, Target
from tests.suites.with_pytest import PYTEST, run_pytest

Driver = Literal["psycopg", "psycopg_async", "asyncpg", "psycopg2", "pg8000"]
MARKS = "backend and not memory_intensive and not timing_intensive"
DIALECT = ("test/dialect/postgresql", "test/dialect/test_suite.py")
EVERYTHING = ("test",)  # whatever depends on a database: seven times as much, of half an hour or more
SCHEMAS = ("test_schema", "test_schema_2")


@dataclass(frozen=True, slots=True)
class SqlAlchemy:
    """As its README says: an empty database, two schemas and two extensions. All drivers share a source."""

    driver: Driver
    tests: tuple[str, ...] = DIALECT
    postgres: Mapping[str, str] = field(default_factory=lambda: {
        "max_prepared_transactions": "10", "max_locks_per_transaction": "256"})
    pooler: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"sqlalchemy-{self.driver}{'-all' if self.tests == EVERYTHING else ''}"

    def prepare(self, home: Path) -> str:
        shared = home.parent / "sqlalchemy"
        source = sources.sdist(shared, "SQLAlchemy>=2.1,<3")
        sources.venv(shared, [
            f"{source}[asyncio]", *PYTEST, "psycopg[binary]>=3.3,<4",
            "psycopg2-binary>=2.9,<3", "asyncpg>=0.31,<0.40", "pg8000>=1.31,<2"])
        return sources.version(shared)

    def set_up(self, server: Server) -> None:
        for extension in ("hstore", "citext"):
            server.execute(f"CREATE EXTENSION {extension}", dbname=DATABASE)
        for schema in SCHEMAS:
            server.execute(f"CREATE SCHEMA {schema} AUTHORIZATION scott", dbname=DATABASE)

    def run(self, home: Path, where: Target, out: Path, only: Sequence[str]) -> Run:
        shared = home.parent / "sqlalchemy"
        url = where.url.replace("postgresql:", f"postgresql+{self.driver}:", 1)
        return run_pytest(
            shared / "venv" / "bin" / "python", shared / "source", out, only=only, seconds_max=7200,
            env={"PYTHONNOUSERSITE": "1", "SQLALCHEMY_WARN_20": "1"},
            arguments=["--dburi", url, "-m", MARKS, "--maxfail=100000", *self.tests])
