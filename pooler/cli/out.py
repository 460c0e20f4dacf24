"""What commands print: tables of at most 100 columns, JSON with stable keys, times for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

WIDTH_MAX = 100


def print_json(value: Any) -> None:
    """One JSON document."""
    print(json.dumps(value, indent=2, default=str))


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as needed; the widest one is cut until the line fits."""
    for line in table_lines(head, rows):
        print(line)


def table_lines(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """The lines of a table, each at most WIDTH_MAX wide as long as every column can have a few characters."""
    cells = [list(head), *([_text(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH_MAX and max(widths) > 4:
        widths[widths.index(max(widths))] -= 1
    cut = [[_cut(cell, width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    return ["  ".join(row).rstrip() for row in cut]


def duration(seconds: float | None) -> str:
    """`42 s`, `3 m 5 s`, `2 h 7 m`, `5 d 3 h`."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.0f} s"
    for big, small, unit, next_unit in ((60, 1, "m", "s"), (3600, 60, "h", "m"), (86400, 3600, "d", "h")):
        if seconds < big * (24 if unit == "h" else 60) or unit == "d":
            return f"{int(seconds // big)} {unit} {int(seconds % big // small)} {next_unit}"
    raise AssertionError("unreachable")


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _cut(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else text[: width - 1] + "…"
