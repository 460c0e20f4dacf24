"""The page of field cases has every case, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.repo.sources import ROOT

PAGE = ROOT / "docs" / "field-cases.md"
CASES = [f"R{number:02}" for number in range(1, 89)]
ROW = re.compile(r"^\| (R\d+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> list[tuple[str, str, str]]:
    """(case, what must hold, what shows it)"""
    return ROW.findall(PAGE.read_text())


@cache
def names_in(path: str) -> frozenset[str]:
    """Names of a file's tests, which is read and not imported."""
    file = ROOT / path
    body = ast.parse(file.read_text()).body if file.exists() else []
    return frozenset(
        node.name for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"))


def test_every_case_is_there_once_and_in_order() -> None:
    assert [case for case, _, _ in rows()] == CASES


def test_every_case_names_a_test_or_says_why_it_comes_later() -> None:
    bare = [case for case, _, shown in rows() if not re.match(r"later: \w|`tests/", shown)]
    assert bare == []


def test_every_test_that_is_named_exists() -> None:
    missing = [
        f"{case}: {path}::{name}" for case, _, shown in rows() for path, name in NAMED.findall(shown)
        if name not in names_in(path)
    ]
    assert missing == []


def test_every_case_is_named_where_it_is_shown() -> None:
    """By the file of one of its tests at least."""
    unnamed = [
        case for case, _, shown in rows() if (named := NAMED.findall(shown)) and not any(
            re.search(rf"\b{case}\b", (ROOT / path).read_text()) for path, _ in named)
    ]
    assert unnamed == []


def test_a_variable_that_gives_a_case_its_size_is_read_by_a_test() -> None:
    named = set(re.findall(r"`(POOLER_[A-Z_]+)`", PAGE.read_text()))
    read = {
        word for path in {path for _, _, shown in rows() for path, _ in NAMED.findall(shown)}
        for word in re.findall(r'environ\.get\("(POOLER_[A-Z_]+)"', (ROOT / path).read_text())
    }
    assert named
    assert named <= read
