"""One administrator's session on the console database.

Speaks the simple protocol, and as much of the extended one as drivers need to run a SHOW. An error leaves the
session usable; only a broken message or the end of the stream ends it, also while a command waits. Whatever
is asked is asked of the whole fleet, through a `FleetView`.
"""

from __future__ import annotations

from typing import Protocol

import trio

from pooler.console.desk import CommandResult, ConsoleUser, Desk, FleetView, Interrupt
from pooler.console.dialogue import Dialogue
from pooler.console.manner import OWN, Manner
from pooler.errors import ProtocolViolation
from pooler.wire import messages
from pooler.wire.frames import Frame, FrameReader
from pooler.wire.messages import Fault

__all__ = ["CommandResult", "ConsoleSocket", "ConsoleUser", "FleetView", "Interrupt", "serve_console"]

MESSAGE_BYTES_MAX = 131_072


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
    key: bytes = bytes(8),
    interrupt: Interrupt | None = None,
    manner: Manner = OWN,
) -> None:
    """Serve until the user leaves. The socket stays open; raises what `sock` raises.

    `owed` are the first bytes of the greeting, None if the user was greeted already; `leftover` came in
    behind the login. `key` is the cancel key that is given out, for requests that come to `interrupt`.
    """
    dialogue = Dialogue(Desk(who, fleet, interrupt or Interrupt(), manner), sock.send_all)
    if owed is not None:
        await sock.send_all(owed + greeting(key, manner))
    reader = FrameReader(limit_bytes=MESSAGE_BYTES_MAX)
    reader.feed(leftover)
    try:
        while True:
            came = bytearray()  # while a command was carried out
            for frame in reader:
                if frame.kind == b"X" or not await _take(dialogue, frame, sock, came):
                    return
            await dialogue.flush()
            data = bytes(came) or await sock.recv()
            if not data:
                return
            reader.feed(data)
    except ProtocolViolation as violation:
        fault = Fault("FATAL", violation.sqlstate, str(violation))
        await sock.send_all(messages.error_response(fault))


async def _take(dialogue: Dialogue, frame: Frame, sock: ConsoleSocket, came: bytearray) -> bool:
    """One message; False if the user left meanwhile, which ends what it waits for. Raises as take()."""
    left = False
    failed: Exception | None = None

    async def listen(life: trio.CancelScope) -> None:
        nonlocal left, failed
        try:
            while len(came) < MESSAGE_BYTES_MAX:
                data = await sock.recv()
                if not data:
                    left = True
                    break
                came.extend(data)
        except Exception as fault:  # noqa: BLE001 - raised again below, outside the nursery
            failed = fault
        else:
            if not left:
                return
        life.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen, nursery.cancel_scope)
        try:
            await dialogue.take(frame)
        except Exception as fault:  # noqa: BLE001 - as above
            failed = fault
        nursery.cancel_scope.cancel()
    if failed is not None:
        raise failed
    return not left


def greeting(key: bytes, manner: Manner) -> bytes:
    """Parameters, the cancel key, and ReadyForQuery."""
    parts = [messages.parameter_status(name, value) for name, value in manner.greeted]
    return b"".join([*parts, messages.backend_key_data(key), messages.ready_for_query()])
