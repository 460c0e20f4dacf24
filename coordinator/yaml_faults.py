"""What is said of a text that is not YAML, and how its names are shown. For the config and policies. Pure."""

from __future__ import annotations

import re

import yaml

_HINTS = (  # the parser's words, and what mostly is the cause of them
    (r"expected <block end>", "indent it as its neighbours are"),
    (r"mapping values are not allowed", 'indent it as its neighbours are, and quote a text with ": " in it'),
    (r"found character '\\t'", "indent with spaces, not tabs"),
    (r"expected ',' or '[\]}]'", "a [ or { is not closed, or a comma is missing"),
    (r"could not find expected ':'", 'write "key: value", with a space behind the colon'),
    (r"found character '[@`%]'", "quote the text"),
)


def yaml_fault(fault: Exception) -> str:
    """Where a text is not YAML, why, and what to do. Its lines are not shown: they may hold secrets."""
    mark: yaml.Mark | None = getattr(fault, "problem_mark", None)
    if not isinstance(fault, yaml.MarkedYAMLError) or mark is None:
        return " ".join(str(fault).replace('in "<unicode string>", ', "").split())
    why = " ".join(str(fault.problem or fault.context or "cannot be read").split())
    hint = next((hint for words, hint in _HINTS if re.search(words, why)), "")
    return f"line {mark.line + 1}, column {mark.column + 1}: {why}" + (f": {hint}" if hint else "")


def plain(name: object) -> str:
    """A name or value of somebody's file, for a terminal: quoted and escaped if it is not all printable."""
    text = str(name)
    return text if text.isprintable() else repr(text)
