"""Messages of a server."""

from __future__ import annotations

import struct

from pooler.demo.client import message

PARAMETERS = {
    b"client_encoding": b"UTF8", b"DateStyle": b"ISO, MDY", b"TimeZone": b"UTC",
    b"IntervalStyle": b"postgres",
    b"standard_conforming_strings": b"on", b"application_name": b"",
}


class Failed(Exception):
    """An ErrorResponse that is not the end."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Ended(Exception):
    """The session is over."""


def error(code: str, text: str, severity: str = "ERROR") -> bytes:
    """An ErrorResponse."""
    fields = f"S{severity}\0V{severity}\0C{code}\0M{text}\0"
    return message(b"E", fields.encode() + b"\0")


def row(*values: bytes) -> bytes:
    """A DataRow."""
    parts = [struct.pack("!h", len(values))] + [struct.pack("!i", len(v)) + v for v in values]
    return message(b"D", b"".join(parts))


def columns(*names: bytes) -> bytes:
    """A RowDescription of text columns."""
    parts = [n + b"\0" + struct.pack("!ihihih", 0, 0, 25, -1, -1, 0) for n in names]
    return message(b"T", struct.pack("!h", len(names)) + b"".join(parts))
