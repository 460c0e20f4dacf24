"""What the value of a setting is: PgBouncer's spelling in, a plain value out, or what is allowed. Pure.

Whole numbers are C's (`0777` is octal, `0x10` sixteen), times are seconds with a fraction; units (`5m`,
`64kB`) are taken as well.
"""

from __future__ import annotations

import math
import re
from typing import Final

from pooler.dropin.known import CHOICES, Kind
from pooler.settings_units import parse_duration_seconds

WHOLE_MAX: Final = 2**32 - 1
_DECIMAL = re.compile(r"[+-]?\d+")
_WORDS = re.compile(r"[\s,]+")

Value = str | int | float | bool | tuple[str, ...]


def read_value(name: str, kind: Kind, text: str) -> Value:
    """The value of `text`. Raises ValueError that says what is allowed."""
    if kind == "whole":
        return _whole(text)
    if kind == "milliseconds":
        return max(0, _whole(text)) / 1000
    if kind == "time":
        return _time(text)
    if kind == "flag":
        return _whole(text) != 0
    if kind == "words":
        return tuple(word for word in _WORDS.split(text) if word)
    if kind == "choice":
        return _choice(name, text)
    return text


def _whole(text: str) -> int:
    found = text.strip().lower()
    try:
        if re.fullmatch(r"[+-]?0[0-7]+", found):
            number = int(found, 8)
        elif re.fullmatch(r"[+-]?0x[0-9a-f]+", found):
            number = int(found, 16)
        elif _DECIMAL.fullmatch(found) and not re.match(r"[+-]?0\d", found):
            number = int(found)
        else:
            raise ValueError
    except ValueError:
        raise ValueError(f'"{_short(text)}" is not a whole number') from None
    if abs(number) > WHOLE_MAX:
        raise ValueError(f'"{_short(text)}" is out of range')
    return number


def _time(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parse_duration_seconds(text)
        except ValueError:
            raise ValueError(f'"{_short(text)}" is not a time: write seconds, such as 15 or 0.5') from None
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f'"{_short(text)}" is not a time of zero or more seconds')
    return seconds


def _choice(name: str, text: str) -> str:
    word = text.strip().lower()
    if word not in CHOICES[name]:
        raise ValueError(f'"{_short(text)}" is not one of {", ".join(CHOICES[name])}')
    return word


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
