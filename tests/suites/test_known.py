"""What is known not to pass is written down for those who want to know."""

from __future__ import annotations

from pathlib import Path

from tests.suites.__main__ import SUITES
from tests.suites.known import KNOWN, Reason, by_reason, known
from tests.suites.outcomes import Explained, Outcome, losses

PAGE = Path(__file__).parent.parent.parent / "docs" / "compatibility.md"


def section() -> str:
    """The part of the page about driver suites."""
    return PAGE.read_text().partition("\n## Driver suites\n")[2].partition("\n## ")[0]


def test_every_reason_and_every_pattern_is_in_the_document() -> None:
    told = section()
    patterns = {pattern for entry in KNOWN for pattern in entry.tests}
    assert [reason for reason in Reason if f"| {reason} |" not in told] == []
    assert sorted(pattern for pattern in patterns if f"`{pattern}`" not in told) == []


def test_every_entry_is_of_a_suite_that_there_is() -> None:
    assert [entry.suite for entry in KNOWN
            if not any(known(name, pool) for name in SUITES for pool in entry.pools)] == []


def test_a_pattern_explains_the_tests_it_covers_and_no_other() -> None:
    passed = Outcome("passed")
    found = losses({"t::a": passed, "t::b": passed}, {})
    assert by_reason(found, [Explained("*::a", "LISTEN")]) == {"LISTEN": [found[0]], "": [found[1]]}


def test_what_transactions_cannot_do_is_no_excuse_with_a_session_of_ones_own() -> None:
    assert {entry.reason for entry in known("psycopg2", "session")} == set()
    assert {entry.reason for entry in known("asyncpg", "session")} == {
        Reason.CHANCE, Reason.IDLE_END, Reason.STAYS}
