"""YAML that people wrote, read within limits: of its length, its nesting, and what its aliases unfold to.

PyYAML's composer calls itself for every level, so a file of brackets ends in RecursionError; and a few
aliases of aliases are a small file that is more than memory for whoever walks through it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

BYTES_MAX = 1 << 20
LEVELS_MAX = 50
VALUES_MAX = 200_000  # with every alias unfolded


class TooMuch(yaml.YAMLError):
    """A text over one of the limits: says which."""


class BoundedLoader(yaml.SafeLoader):
    """A SafeLoader that goes so many levels deep."""

    levels = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """As its base has it. Raises TooMuch."""
        self.levels += 1
        if self.levels > LEVELS_MAX:
            line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
            raise TooMuch(f"line {line}: it is nested over {LEVELS_MAX} levels deep")
        try:
            return super().compose_node(parent, index)
        finally:
            self.levels -= 1


def text_within(path: Path) -> str:
    """A file's text. Raises OSError, UnicodeDecodeError; TooMuch if it is longer than any that is read."""
    with path.open("rb") as file:
        raw = file.read(BYTES_MAX + 1)
    if len(raw) > BYTES_MAX:
        raise TooMuch(f"it has over {BYTES_MAX} bytes")
    return raw.decode()


def read_yaml(text: str) -> Any:
    """The value of a text. Raises yaml.YAMLError (TooMuch is one), and nothing else."""
    if len(text) > BYTES_MAX:
        raise TooMuch(f"it has over {BYTES_MAX} characters")
    return value_of(BoundedLoader(text))


def value_of(loader: BoundedLoader) -> Any:
    """The value of the text that it has. Raises yaml.YAMLError, and nothing else."""
    try:
        value = loader.get_single_data()
    except (ValueError, TypeError, OverflowError) as fault:  # a date such as 2026-99-99, a list as a key
        raise TooMuch(f"a value of it cannot be read: {fault}") from None
    finally:
        loader.dispose()
    _count(value)
    return value


def _count(value: Any) -> None:
    """Raises TooMuch: a value within itself never ends, and is over the limit, too."""
    left, waiting = VALUES_MAX, [value]
    while waiting:
        each = waiting.pop()
        inner: list[Any] = []
        if isinstance(each, dict):
            inner = [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set):
            inner = list(each)
        left -= len(inner)
        if left < 0:
            raise TooMuch(f"its aliases unfold to over {VALUES_MAX} values")
        waiting += inner
