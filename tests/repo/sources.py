"""The project's own files, as the rules see them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("pooler", "coordinator", "chaos", "benchmarks")


def python_files(*folders: str) -> list[Path]:
    """Every Python file of these folders."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


@dataclass(frozen=True, slots=True)
class Function:
    """One function and how long it is, its docstring left out."""

    where: str
    lines: int


def functions(path: Path) -> Iterator[Function]:
    """Each function and method of a file, nested ones too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Function(f"{name_of(path)}:{node.lineno} {node.name}", _length(node))


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    end = node.end_lineno or node.lineno
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        return end - node.lineno - ((first.end_lineno or first.lineno) - first.lineno)
    return end - node.lineno + 1
