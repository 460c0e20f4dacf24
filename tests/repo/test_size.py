"""Files, functions and docstrings keep to their sizes."""

from __future__ import annotations

import ast
import statistics

import pytest

from tests.repo.sources import PACKAGES, functions, name_of, python_files

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
FUNCTION_LINES_MEDIAN_MAX = 10


@pytest.mark.parametrize("folder", [*PACKAGES, "tests"])
def test_no_file_is_too_long(folder: str) -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in python_files(folder)}
    assert {name: lines for name, lines in lengths.items() if lines > FILE_LINES_MAX} == {}


@pytest.mark.parametrize("folder", [*PACKAGES, "tests"])
def test_no_function_is_too_long(folder: str) -> None:
    found = [each for path in python_files(folder) for each in functions(path)]
    assert [each for each in found if each.lines > FUNCTION_LINES_MAX] == []


def test_half_of_all_functions_are_short() -> None:
    lines = [each.lines for path in python_files(*PACKAGES) for each in functions(path)]
    assert statistics.median(lines) < FUNCTION_LINES_MEDIAN_MAX


def test_every_module_says_what_it_decides() -> None:
    silent = [
        name_of(path) for path in python_files(*PACKAGES, "tests")
        if path.read_text().strip() and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []
