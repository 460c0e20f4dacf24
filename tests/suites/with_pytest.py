"""Suites that pytest runs: a plug-in of ours in their environment writes what became of each test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pooler.demo.process import PartFailed
from tests.suites.outcomes import Run, from_lines
from tests.suites.run import command

PLUGIN = Path(__file__).parent / "plugin"
PYTEST = ("pytest>=8,<10", "pytest-timeout>=2.3,<3")
TEST_SECONDS_MAX = 120


def run_pytest(
    python: Path, source: Path, out: Path, *, arguments: Sequence[str], only: Sequence[str],
    env: Mapping[str, str], seconds_max: float,
) -> Run:
    """The tests of `arguments`, or `only` these by node id. Raises PartFailed when there is no result."""
    report = out / "outcomes.jsonl"
    report.unlink(missing_ok=True)
    chosen = out / "only.txt"
    chosen.write_text("".join(name + "\n" for name in only))
    command(
        [python, "-m", "pytest", "-p", "outcomes_plugin", "-p", "no:cacheprovider", "-q", "-ra",
         f"--timeout={TEST_SECONDS_MAX}", *arguments],
        out / "pytest.log", cwd=source, seconds_max=seconds_max,
        env={"PYTHONPATH": str(PLUGIN), "OUTCOMES_REPORT": str(report), "PYTHONDONTWRITEBYTECODE": "1",
             **({"OUTCOMES_ONLY": str(chosen)} if only else {}), **env})
    if not report.exists():
        raise PartFailed(f"pytest ran no test: {out / 'pytest.log'}")
    return from_lines(report.read_text().splitlines())
