"""Every file has its place, and tests wait for facts."""

from __future__ import annotations

import ast
import subprocess
from fnmatch import fnmatch

import pytest

from tests.repo.sources import ROOT, name_of, python_files

LAYOUT = (
    "pyproject.toml", "Makefile", "README.md", "CHANGELOG.md", "LICENSE", ".gitignore", ".ci/run",
    "scripts/*", "pooler/*", "coordinator/*", "chaos/*", "benchmarks/*", "tests/*", "config/*", "docs/*",
)
KINDS = (".py", ".md", ".toml", ".yaml", ".yml", ".cfg", ".ini", ".json", ".html", ".css", ".js", ".svg",
         ".txt", ".sql", ".service", ".rules", ".typed", "")
SLEEPS = {("trio", "sleep"), ("trio", "sleep_until"), ("time", "sleep"), ("asyncio", "sleep")}


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() or [
        str(path.relative_to(ROOT)) for path in ROOT.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(ROOT).parts[:-1])]


def test_no_file_stands_outside_the_layout(tracked: list[str]) -> None:
    assert [path for path in tracked if not any(fnmatch(path, place) for place in LAYOUT)] == []


def test_no_file_is_of_a_kind_nobody_expects(tracked: list[str]) -> None:
    names = [path.rpartition("/")[2] for path in tracked]
    assert [name for name in names if not name.endswith(KINDS[:-1]) and "." in name.lstrip(".")] == []


def test_every_folder_of_tests_is_a_package() -> None:
    folders = {path.parent for path in python_files("tests")}
    assert [name_of(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_tests_never_sleep() -> None:
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in python_files("tests")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in SLEEPS
    ]
    assert found == []


def test_no_cleanup_is_shielded_without_a_bound() -> None:
    bare = [
        f"{name_of(path)}:{node.lineno}"
        for path in python_files("pooler", "coordinator")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("CancelScope")
        and any(word.arg == "shield" for word in node.keywords)
        and not any(word.arg == "deadline" for word in node.keywords)
    ]
    assert bare == []
