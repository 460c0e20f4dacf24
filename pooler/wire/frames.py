"""Cutting a byte stream into protocol messages, for logins and the console.

Holds each message whole, so every message has a limit; the relay, which must never hold a large message,
does its own framing. Source: PostgreSQL documentation, "Message Formats". Pure: no sockets, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pooler.errors import ProtocolViolation

HEADER_BYTES = 5
STARTUP_BYTES_MAX = 10_000  # as PostgreSQL's MAX_STARTUP_PACKET_LENGTH
AUTH_BYTES_MAX = 65_536 + 1_024  # a cloud token of 64 KiB and its envelope
FRAME_BYTES_MAX = 1_048_576  # what a console or a login with a server may say in one message


class Frame(NamedTuple):
    """One message: its type as one byte, and its body without the length."""

    kind: bytes
    body: bytes


class FrameReader:
    """Feed bytes in any pieces, iterate whole messages out.

    `limit_bytes` bounds one message's length field; `allowed` is the set of types that may come now (None:
    any). Both may be changed between messages. A fault is raised as soon as the header shows it, before the
    body is waited for; after it the reader must not be used again.
    """

    def __init__(self, *, limit_bytes: int = FRAME_BYTES_MAX, allowed: bytes | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.allowed = allowed
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add what was received."""
        self._buffer += data

    def __iter__(self) -> Iterator[Frame]:
        """Every message that is complete by now. Raises ProtocolViolation on a bad type or length."""
        while (frame := self.next()) is not None:
            yield frame

    def next(self) -> Frame | None:
        """The next message, or None when more bytes are needed. Raises ProtocolViolation."""
        buffer = self._buffer
        if not buffer:
            return None
        kind = bytes(buffer[:1])
        if self.allowed is not None and kind not in self.allowed:
            raise ProtocolViolation(f"unexpected message type {_shown(kind)}")
        if len(buffer) < HEADER_BYTES:
            return None
        size = int.from_bytes(buffer[1:HEADER_BYTES], "big")
        if not 4 <= size <= self.limit_bytes:
            raise ProtocolViolation(f"invalid length of message type {_shown(kind)}")
        if len(buffer) < 1 + size:
            return None
        body = bytes(buffer[HEADER_BYTES : 1 + size])
        del buffer[: 1 + size]
        return Frame(kind, body)

    @property
    def buffered(self) -> int:
        """Bytes received and not yet taken as messages."""
        return len(self._buffer)

    def looks_bare(self) -> bool:
        """Whether what comes next is an error as plain text without a length, as a postmaster says it that
        cannot fork."""
        if len(self._buffer) < HEADER_BYTES or self._buffer[:1] != b"E":
            return False
        return all(32 <= byte <= 126 for byte in self._buffer[1:HEADER_BYTES])

    def take_rest(self) -> bytes:
        """The bytes after the last message, which the next reader of this stream must get first."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest


def _shown(kind: bytes) -> str:
    return repr(kind.decode("ascii")) if 33 <= kind[0] <= 126 else f"0x{kind[0]:02x}"
