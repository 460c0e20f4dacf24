"""Values of a console row in the two formats of the protocol. Pure.

Drivers that always ask for binary results (asyncpg) read int4, int8, numeric and text. Source: the server's
int4send, int8send and numeric_send.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from pooler.wire.messages import Column, message, text

TEXT_FORMAT, BINARY_FORMAT = 0, 1
INT8_OID, INT4_OID, TEXT_OID, NUMERIC_OID = 20, 23, 25, 1700
_INT4_RANGE = range(-(2**31), 2**31)
_NUMERIC_BASE = 10_000


def encode_row(
    columns: Sequence[Column], values: Sequence[str | int | None], formats: Sequence[int]
) -> bytes:
    """A DataRow. `formats` as in Bind: none (all text), one for all, or one for each column."""
    parts = [struct.pack("!h", len(values))]
    for at, (column, value) in enumerate(zip(columns, values, strict=True)):
        if value is None:
            parts.append(b"\xff\xff\xff\xff")
            continue
        raw = _binary(column, value) if format_of(formats, at) == BINARY_FORMAT else text(str(value))
        parts.append(struct.pack("!i", len(raw)) + raw)
    return message(b"D", b"".join(parts))


def format_of(formats: Sequence[int], at: int) -> int:
    """The format of the column at `at`."""
    if len(formats) > 1:
        return formats[at] if at < len(formats) else TEXT_FORMAT
    return formats[0] if formats else TEXT_FORMAT


def describe_row(columns: Sequence[Column], formats: Sequence[int]) -> bytes:
    """A RowDescription with the formats that the rows will have."""
    parts = [struct.pack("!h", len(columns))]
    for at, column in enumerate(columns):
        shape = struct.pack("!ihihih", 0, 0, column.oid, column.size, -1, format_of(formats, at))
        parts.append(text(column.name) + b"\0" + shape)
    return message(b"T", b"".join(parts))


def _binary(column: Column, value: str | int) -> bytes:
    if column.oid == INT4_OID:
        number = int(value)
        return struct.pack("!i", min(max(number, _INT4_RANGE[0]), _INT4_RANGE[-1]))
    if column.oid == INT8_OID:
        return struct.pack("!q", int(value))
    if column.oid == NUMERIC_OID:
        return encode_numeric(int(value))
    return text(str(value))


def encode_numeric(value: int) -> bytes:
    """A whole number as numeric: groups of four decimal digits without trailing zero groups."""
    groups: list[int] = []
    left = abs(value)
    while left:
        left, group = divmod(left, _NUMERIC_BASE)
        groups.append(group)
    weight = max(len(groups) - 1, 0)
    while groups and groups[0] == 0:
        del groups[0]
    sign = 0x4000 if value < 0 else 0
    return struct.pack(f"!hhHh{len(groups)}h", len(groups), weight, sign, 0, *reversed(groups))
