"""Messages of a server, made apart from `pooler.wire` so that they can judge it."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from pooler.demo.client import message

__all__ = ["answered", "backend_key", "columns", "complete", "error", "message", "parameter", "ready",
           "request", "row"]


def request(code: int, extra: bytes = b"") -> bytes:
    """An authentication request; 0 is AuthenticationOk."""
    return message(b"R", struct.pack("!i", code) + extra)


def parameter(name: str, value: str) -> bytes:
    """A ParameterStatus."""
    return message(b"S", f"{name}\0{value}\0".encode())


def backend_key(pid: int, key: bytes = b"key!") -> bytes:
    """A BackendKeyData."""
    return message(b"K", struct.pack("!i", pid) + key)


def ready(status: bytes = b"I") -> bytes:
    """A ReadyForQuery."""
    return message(b"Z", status)


def error(code: str, text: str, severity: str = "ERROR", kind: bytes = b"E") -> bytes:
    """An ErrorResponse, or with kind N a NoticeResponse."""
    return message(kind, f"S{severity}\0V{severity}\0C{code}\0M{text}\0\0".encode())


def columns(count: int, types: Sequence[int] = ()) -> bytes:
    """A RowDescription, of text unless types are given."""
    names = (b"c%d\0" % at for at in range(count))
    kinds = types or (25,) * count
    parts = [name + struct.pack("!ihihih", 0, 0, kind, -1, -1, 0)
             for name, kind in zip(names, kinds, strict=True)]
    return message(b"T", struct.pack("!h", count) + b"".join(parts))


def row(values: Sequence[str | None]) -> bytes:
    """A DataRow."""
    parts = [struct.pack("!h", len(values))]
    for value in values:
        raw = None if value is None else value.encode()
        parts.append(struct.pack("!i", -1) if raw is None else struct.pack("!i", len(raw)) + raw)
    return message(b"D", b"".join(parts))


def complete(tag: str) -> bytes:
    """A CommandComplete."""
    return message(b"C", tag.encode() + b"\0")


def answered(
    rows: Sequence[Sequence[str | None]], types: Sequence[int] = (), *, described: bool = True,
    ends: bool = True,
) -> bytes:
    """A whole answer to a query: its columns if `described`, its ReadyForQuery if `ends`."""
    head = columns(len(rows[0]) if rows else 1, types) if described else b""
    return head + b"".join(map(row, rows)) + complete(f"SELECT {len(rows)}") + (ready() if ends else b"")
