"""What became of each test of a suite, and how two runs of it differ. No files, no processes.

A run is a map from a test's name, as its own runner writes it, to an Outcome. A test that fails straight at
PostgreSQL too says nothing of the pooler.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Literal
from xml.etree import ElementTree

Verdict = Literal["passed", "failed", "skipped", "missing"]
DETAIL_LENGTH_MAX = 4000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What its runner said of one test. `detail` is the end of its error, for a reader."""

    verdict: Verdict
    detail: str = ""

    @property
    def reason(self) -> str:
        """The last line of the detail that says something."""
        lines = [line.strip() for line in self.detail.splitlines() if line.strip()]
        return lines[-1] if lines else ""


Run = Mapping[str, Outcome]
MISSING = Outcome("missing", "the run has no such test")


@dataclass(frozen=True, slots=True)
class Difference:
    """One test that ended otherwise through the pooler."""

    test: str
    direct: Outcome
    pooled: Outcome

    @property
    def is_loss(self) -> bool:
        """It passes straight at the server and not through the pooler."""
        return self.direct.verdict == "passed" and self.pooled.verdict != "passed"


@dataclass(frozen=True, slots=True)
class Explained:
    """Differences that a pattern of test names (as of a shell) covers, with the reason."""

    pattern: str
    reason: str


def differences(direct: Run, pooled: Run) -> list[Difference]:
    """Every test whose verdicts differ, those that only the pooled run has too, by name."""
    found = []
    for test in sorted(direct.keys() | pooled.keys()):
        pair = Difference(test, direct.get(test, MISSING), pooled.get(test, MISSING))
        if pair.direct.verdict != pair.pooled.verdict:
            found.append(pair)
    return found


def losses(direct: Run, pooled: Run) -> list[Difference]:
    """What passes straight at the server and does not through the pooler."""
    return [each for each in differences(direct, pooled) if each.is_loss]


def totals(run: Run) -> str:
    """`12 passed, 1 failed, 3 skipped`."""
    counts = Counter(outcome.verdict for outcome in run.values())
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("passed", "failed", "skipped"))


def settled(first: Run, again: Run) -> dict[str, Outcome]:
    """Two runs as one: a test that passed in either passed, one that did not keeps its later outcome."""
    kept = dict(first)
    for test, outcome in again.items():
        if test not in kept or kept[test].verdict != "passed":
            kept[test] = outcome
    return kept


def to_lines(run: Run) -> Iterator[str]:
    """One JSON object a test; `from_lines` reads them again."""
    for test, outcome in run.items():
        yield json.dumps({"test": test, **asdict(outcome)})


def from_lines(lines: Iterable[str]) -> dict[str, Outcome]:
    """The inverse of `to_lines`. A test that is there twice has failed if it did once."""
    run: dict[str, Outcome] = {}
    for line in lines:
        if line.strip():
            entry = json.loads(line)
            _note(run, entry["test"], Outcome(entry["verdict"], entry.get("detail", "")[-DETAIL_LENGTH_MAX:]))
    return run


def from_junit(text: str) -> dict[str, Outcome]:
    """The test cases of a JUnit report as `classname::name`. Raises ElementTree.ParseError."""
    run: dict[str, Outcome] = {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        name = "::".join(word for word in (case.get("classname", ""), case.get("name", "")) if word)
        _note(run, name, _of_case(case))
    return run


def _of_case(case: ElementTree.Element) -> Outcome:
    for child in case:
        if child.tag in ("failure", "error"):
            return Outcome("failed", f"{child.get('message', '')}\n{child.text or ''}"[-DETAIL_LENGTH_MAX:])
    if any(child.tag == "skipped" for child in case):
        return Outcome("skipped")
    return Outcome("passed")


def _note(run: dict[str, Outcome], test: str, outcome: Outcome) -> None:
    known = run.get(test)
    if known is None or known.verdict != "failed":
        run[test] = outcome
