"""What commands print: tables that fit a terminal, JSON with stable keys, times for people."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from typing import Any

WIDTH_MAX = 100


def print_json(value: Any) -> None:
    """One JSON document."""
    print(json.dumps(value, indent=2, default=str))


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]], whole: int = 0) -> None:
    """Columns as wide as needed, on a terminal as table_lines cuts them; into a file or a pipe all of it."""
    for line in table_lines(head, rows, whole, terminal_width() if sys.stdout.isatty() else None):
        print(line)


def terminal_width() -> int:
    """Columns that a table may have on this terminal."""
    return max(WIDTH_MAX, shutil.get_terminal_size().columns)


def table_lines(
    head: Sequence[str], rows: Sequence[Sequence[object]], whole: int = 0, width: int | None = WIDTH_MAX
) -> list[str]:
    """The lines of a table. The widest column is cut, but for the first `whole` ones, until each line has at
    most `width` characters, as long as every column can have a few; None: nothing is cut."""
    cells = [list(head), *([_text(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    over = 0 if width is None else sum(widths) + 2 * (len(widths) - 1) - width
    while over > 0 and max(widths[whole:], default=0) > 4:
        widths[widths.index(max(widths[whole:]), whole)] -= 1
        over -= 1
    cut = [[_cut(cell, wide) for cell, wide in zip(row, widths, strict=True)] for row in cells]
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
