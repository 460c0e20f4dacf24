"""postgres.js: its npm package holds no tests, so that what its README describes is used here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pooler.demo.postgres import Server
from pooler.demo.process import PartFailed
from tests.suites import sources
from tests.suites.outcomes import Run, from_lines
from tests.suites.rig import Target
from tests.suites.run import command

PROGRAM: Final = Path(__file__).parent / "uses.js"
SECONDS_MAX: Final = 900


@dataclass(frozen=True, slots=True)
class PostgresJs:
    """One program, one test for each use."""

    name: str = "postgres-js"
    postgres: Mapping[str, str] = field(default_factory=lambda: {
        "max_prepared_transactions": "10", "wal_level": "logical", "max_wal_senders": "10",
        "max_replication_slots": "10"})
    pooler: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def prepare(self, home: Path) -> str:
        package = home / "node_modules" / "postgres" / "package.json"
        if not package.exists():
            home.mkdir(parents=True, exist_ok=True)
            (home / "package.json").write_text('{"private": true, "type": "module"}\n')
            sources.run("npm", "install", "--no-audit", "--no-fund", "postgres@3", cwd=home)
        return str(json.loads(package.read_text())["version"])

    def set_up(self, server: Server) -> None:
        """It needs nothing more."""

    def run(self, home: Path, where: Target, out: Path, only: Sequence[str]) -> Run:
        report = out / "uses.jsonl"
        report.unlink(missing_ok=True)
        program = shutil.copy(PROGRAM, home)  # `postgres` is found from there
        command(["node", program, where.url, report, *only], out / "uses.log", cwd=home, env={},
                seconds_max=SECONDS_MAX)
        if not report.exists():
            raise PartFailed(f"no test ran: {out / 'uses.log'}")
        return from_lines(report.read_text().splitlines())
