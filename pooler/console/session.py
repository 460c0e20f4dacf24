"""One administrator's session on the console database.

Speaks the simple protocol, and as much of the extended one as drivers need to run a SHOW. An error leaves the
session usable; only a broken message or the end of the stream ends it. Whatever is asked is asked of the
whole fleet, through a `FleetView`.
"""

from __future__ import annotations

from typing import Protocol

from pooler.console.desk import VERSION, CommandResult, ConsoleUser, Desk, FleetView
from pooler.console.dialogue import Dialogue
from pooler.errors import ProtocolViolation
from pooler.wire import messages
from pooler.wire.frames import FrameReader
from pooler.wire.messages import Fault

__all__ = ["CommandResult", "ConsoleSocket", "ConsoleUser", "FleetView", "serve_console"]

MESSAGE_BYTES_MAX = 131_072
# drivers choose their behaviour by the number; it is that of a current server, and the rest says what this is
SERVER_VERSION = f"17.0 ({VERSION})"
GREETED = (
    ("server_version", SERVER_VERSION), ("client_encoding", "UTF8"), ("server_encoding", "UTF8"),
    ("DateStyle", "ISO, MDY"), ("TimeZone", "UTC"), ("IntervalStyle", "postgres"),
    ("standard_conforming_strings", "on"), ("integer_datetimes", "on"), ("is_superuser", "off"),
    ("default_transaction_read_only", "off"), ("in_hot_standby", "off"),
)  # fmt: skip


class ConsoleSocket(Protocol):
    """What is needed of a socket; `recv` gives b"" at the end of the stream."""

    async def recv(self) -> bytes: ...

    async def send_all(self, data: bytes) -> None: ...


async def serve_console(
    sock: ConsoleSocket,
    who: ConsoleUser,
    fleet: FleetView,
    *,
    owed: bytes | None = None,
    leftover: bytes = b"",
) -> None:
    """Serve until the user leaves. The socket stays open; raises what `sock` raises.

    `owed` are the first bytes of the greeting, None if the user was greeted already; `leftover` came in
    behind the login.
    """
    dialogue = Dialogue(Desk(who, fleet), sock.send_all)
    if owed is not None:
        await sock.send_all(owed + greeting())
    reader = FrameReader(limit_bytes=MESSAGE_BYTES_MAX)
    reader.feed(leftover)
    try:
        while True:
            for frame in reader:
                if frame.kind == b"X":
                    return
                await dialogue.take(frame)
            await dialogue.flush()
            data = await sock.recv()
            if not data:
                return
            reader.feed(data)
    except ProtocolViolation as violation:
        fault = Fault("FATAL", violation.sqlstate, str(violation))
        await sock.send_all(messages.error_response(fault))


def greeting() -> bytes:
    """Parameters, a cancel key that cancels nothing, and ReadyForQuery."""
    parts = [messages.parameter_status(name, value) for name, value in GREETED]
    return b"".join([*parts, messages.backend_key_data(bytes(8)), messages.ready_for_query()])
