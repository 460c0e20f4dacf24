"""The page of ledger cases has every case, and every test that it names exists."""

from __future__ import annotations

import re

from tests.repo.sources import ROOT
from tests.repo.test_field_cases import NAMED, names_in

PAGE = ROOT / "docs" / "ledger-cases.md"
CASES = [f"T{number:02}" for number in range(1, 34)]
LATER = {"T09", "T12", "T13", "T23", "T27", "T32", "T33"}  # those of permits of execution, which are to come
ROW = re.compile(r"^\| (T\d+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
NUMBERED = re.compile(r"test_(\d{1,2})_(?!0)[a-z]")


def rows() -> list[tuple[str, str, str]]:
    """(case, what must hold, what shows it)"""
    return ROW.findall(PAGE.read_text())


def test_every_case_is_there_once_and_in_order() -> None:
    assert [case for case, _, _ in rows()] == CASES


def test_every_case_names_a_test_but_those_of_what_is_not_built_yet() -> None:
    assert {case for case, _, shown in rows() if re.match(r"later: \w", shown)} == LATER
    assert {case for case, _, shown in rows() if NAMED.search(shown)} == set(CASES) - LATER


def test_every_test_that_is_named_exists() -> None:
    missing = [
        f"{case}: {path}::{name}" for case, _, shown in rows() for path, name in NAMED.findall(shown)
        if name not in names_in(path)
    ]
    assert missing == []


def test_a_test_that_bears_a_number_is_named_by_its_case() -> None:
    strays = [
        f"{case}: {name}" for case, _, shown in rows() for _, name in NAMED.findall(shown)
        if (number := NUMBERED.match(name)) and f"T{int(number[1]):02}" != case
    ]
    assert strays == []
    unnamed = {
        name for path in ("tests/ledger/test_traces.py", "tests/ledger/test_traces_more.py")
        for name in names_in(path) if NUMBERED.match(name)
    } - {name for _, _, shown in rows() for _, name in NAMED.findall(shown)}
    assert unnamed == set()
