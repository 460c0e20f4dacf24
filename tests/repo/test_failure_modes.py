"""The page of failure modes names a test for each line, and every test that it names exists."""

from __future__ import annotations

import re

from tests.repo.sources import ROOT
from tests.repo.test_field_cases import NAMED, names_in

PAGE = ROOT / "docs" / "failure-modes.md"


def rows() -> list[list[str]]:
    """The cells of every line of its tables, without heads."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines
            if not line.startswith(("| what |", "| --- |"))]


def test_every_line_says_what_becomes_of_clients_permits_and_itself_and_names_a_test() -> None:
    bare = [row[0] for row in rows() if len(row) != 5 or not all(row) or not NAMED.search(row[4])]
    assert len(rows()) > 30
    assert bare == []


def test_every_test_that_is_named_exists() -> None:
    missing = [f"{path}::{name}" for row in rows() for path, name in NAMED.findall(row[4])
               if name not in names_in(path)]
    assert missing == []


def test_every_part_of_the_architecture_has_its_line() -> None:
    told = " ".join(row[0] for row in rows())
    for part in ("worker", "coordinator", "leading coordinator", "supervisor", "host", "member", "primary",
                 "standby", "command", "monitor", "stranger"):
        assert re.search(rf"\b{part}", told), part
