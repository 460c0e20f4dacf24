"""Every file has its place, and tests wait for facts."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

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


def sleeps(path: Path) -> Iterator[str]:
    """Each use of a sleep whose line does not say why nothing else will do."""
    lines = path.read_text().splitlines()
    for node in ast.walk(ast.parse(path.read_text())):
        if (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
                and (node.value.id, node.attr) in SLEEPS
                and not re.search(r"# noqa: TID251 - \w+", lines[node.lineno - 1])):
            yield f"{name_of(path)}:{node.lineno}"


def test_tests_sleep_only_where_nobody_tells_a_fact() -> None:
    found = [each for path in python_files("tests") for each in sleeps(path)]
    assert found == []


def test_the_rule_against_sleeps_sees_one(tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.py", tmp_path / "good.py"
    bad.write_text("import time\ntime.sleep(1)\n")
    good.write_text("import time\ntime.sleep(1)  # noqa: TID251 - another process\n")
    assert len(list(sleeps(bad))) == 1
    assert list(sleeps(good)) == []


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
