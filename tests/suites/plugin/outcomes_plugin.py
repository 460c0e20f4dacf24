"""A pytest plug-in that a driver's suite runs under: one JSON line a test, written as it ends.

It imports nothing of ours, for it is loaded in the environment of the suite. OUTCOMES_REPORT names the file
to write; OUTCOMES_ONLY a file of node ids, the only ones to run then.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

DETAIL_LENGTH_MAX = 4000


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test counts once for its call, and again for a set-up or tear-down that did not pass."""
    if report.when != "call" and report.passed:
        return
    verdict = {"passed": "passed", "failed": "failed"}.get(report.outcome, "skipped")
    detail = "" if report.passed else str(report.longrepr)[-DETAIL_LENGTH_MAX:]
    with Path(os.environ["OUTCOMES_REPORT"]).open("a") as out:
        out.write(json.dumps({"test": report.nodeid, "verdict": verdict, "detail": detail}) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what OUTCOMES_ONLY does not name."""
    chosen = os.environ.get("OUTCOMES_ONLY")
    if chosen:
        names = set(Path(chosen).read_text().splitlines())
        left_out = [item for item in items if item.nodeid not in names]
        items[:] = [item for item in items if item.nodeid in names]
        config.hook.pytest_deselected(items=left_out)
