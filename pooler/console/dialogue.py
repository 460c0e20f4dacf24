"""The messages of a console session: the simple protocol, and of the extended one what drivers need.

A statement is a text; its columns are found by carrying a SHOW out when it is described, since they may
depend on the rows. Only SHOW and what has no effect is carried out at Describe.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from pooler.console.binary import describe_row, encode_row
from pooler.console.commands import Answer, Command, Nothing, Show, Unknown
from pooler.console.desk import Desk, Refused, Result
from pooler.errors import PoolerError, ProtocolViolation
from pooler.wire import messages
from pooler.wire.frames import Frame
from pooler.wire.messages import Fault, split_cstring

NAMES_MAX: Final = 256
_EXTENDED: Final = b"PBDEC"
_NOTHING = Nothing("")


@dataclass(slots=True)
class Portal:
    """A statement bound: its result once it was described, what is left of it, and the formats asked for."""

    command: Command
    formats: tuple[int, ...]
    result: Result | None = None
    sent: int = 0


class Dialogue:
    """Takes a client's messages in order and sends the answers."""

    def __init__(self, desk: Desk, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._desk = desk
        self._send = send
        self._out: list[bytes] = []
        self._statements: dict[bytes, Command] = {}
        self._portals: dict[bytes, Portal] = {}
        self._skipping = False  # after an error, to the next Sync

    async def take(self, frame: Frame) -> None:
        """One message. Raises ProtocolViolation when it is not one that may come here."""
        if frame.kind == b"Q":
            await self._query(frame.body)
        elif frame.kind == b"S":
            self._skipping = False
            self._portals.clear()
            self._ready()
            await self.flush()
        elif frame.kind == b"H":
            await self.flush()
        elif frame.kind in _EXTENDED:
            if not self._skipping:
                await self._extended(frame)
        else:
            raise ProtocolViolation(f"unexpected message type {frame.kind!r} on the console")

    async def flush(self) -> None:
        """Send what is answered so far."""
        if self._out:
            data = b"".join(self._out)
            self._out.clear()
            await self._send(data)

    # ---- simple

    async def _query(self, body: bytes) -> None:
        text, end = split_cstring(body)
        if end != len(body):
            raise ProtocolViolation("invalid Query message")
        commands = self._desk.manner.parse(messages.shown(text))
        if not commands:
            self._out.append(messages.EMPTY_QUERY_RESPONSE)
        try:
            for command in commands:
                self._whole(await self._desk.run(command))
        except PoolerError as error:
            self._fault(error)
        self._ready()
        await self.flush()

    def _whole(self, result: Result) -> None:
        self._notify(result)
        if result.columns:
            self._out.append(describe_row(result.columns, ()))
            self._out += [encode_row(result.columns, row, ()) for row in result.rows]
        self._out.append(messages.command_complete(result.tag))

    # ---- extended

    async def _extended(self, frame: Frame) -> None:
        try:
            if frame.kind == b"P":
                self._parse(frame.body)
            elif frame.kind == b"B":
                self._bind(frame.body)
            elif frame.kind == b"D":
                await self._describe(frame.body)
            elif frame.kind == b"E":
                await self._execute(frame.body)
            else:
                self._close(frame.body)
        except ProtocolViolation:
            raise
        except PoolerError as error:
            self._skipping = True
            self._fault(error)

    def _parse(self, body: bytes) -> None:
        name, at = split_cstring(body)
        text, _ = split_cstring(body, at)
        commands = self._desk.manner.parse(messages.shown(text))
        if len(commands) > 1:
            raise _refused("cannot insert multiple commands into a prepared statement", "42601")
        if name and name in self._statements:
            raise _refused(f'prepared statement "{messages.shown(name)}" already exists', "42P05")
        if name not in self._statements and len(self._statements) >= NAMES_MAX:
            raise _refused(f"the console keeps {NAMES_MAX} prepared statements", "53400")
        command = commands[0] if commands else _NOTHING
        if isinstance(command, Unknown):
            raise _refused(command.text, command.sqlstate, command.hint)
        self._statements[name] = command
        self._out.append(messages.PARSE_COMPLETE)

    def _bind(self, body: bytes) -> None:
        portal, at = split_cstring(body)
        name, at = split_cstring(body, at)
        command = self._statements.get(name)
        if command is None:
            raise _refused(f'prepared statement "{messages.shown(name)}" does not exist', "26000")
        if len(self._portals) >= NAMES_MAX:
            raise _refused(f"the console keeps {NAMES_MAX} portals", "53400")
        self._portals[portal] = Portal(command, _result_formats(body, at))
        self._out.append(messages.BIND_COMPLETE)

    async def _describe(self, body: bytes) -> None:
        kind, (name, _) = body[:1], split_cstring(body, 1)
        if kind == b"S":
            command = self._statements.get(name)
            if command is None:
                raise _refused(f'prepared statement "{messages.shown(name)}" does not exist', "26000")
            self._out.append(messages.message(b"t", b"\0\0"))
            result = await self._desk.run(command) if isinstance(command, Show | Answer) else None
            self._shape(result, ())
        elif kind == b"P":
            portal = self._portal(name)
            if portal.result is None and isinstance(portal.command, Show | Answer):
                portal.result = await self._desk.run(portal.command)
            self._shape(portal.result, portal.formats)
        else:
            raise ProtocolViolation("invalid Describe message")

    def _shape(self, result: Result | None, formats: tuple[int, ...]) -> None:
        if result is None or not result.columns:
            self._out.append(messages.NO_DATA)
        else:
            self._out.append(describe_row(result.columns, formats))

    async def _execute(self, body: bytes) -> None:
        name, at = split_cstring(body)
        if len(body) != at + 4:
            raise ProtocolViolation("invalid Execute message")
        portal = self._portal(name)
        if portal.command is _NOTHING:
            self._out.append(messages.EMPTY_QUERY_RESPONSE)
            return
        if portal.result is None:
            portal.result = await self._desk.run(portal.command)
        result = portal.result
        if portal.sent == 0:
            self._notify(result)
        rows_max = struct.unpack_from("!i", body, at)[0]
        end = len(result.rows) if rows_max <= 0 else min(len(result.rows), portal.sent + rows_max)
        rows = result.rows[portal.sent : end]
        self._out += [encode_row(result.columns, row, portal.formats) for row in rows]
        portal.sent = end
        suspended = end < len(result.rows)
        self._out.append(messages.message(b"s") if suspended else messages.command_complete(result.tag))

    def _close(self, body: bytes) -> None:
        name, _ = split_cstring(body, 1)
        if body[:1] == b"S":
            self._statements.pop(name, None)
        else:
            self._portals.pop(name, None)
        self._out.append(messages.CLOSE_COMPLETE)

    def _portal(self, name: bytes) -> Portal:
        portal = self._portals.get(name)
        if portal is None:
            raise _refused(f'portal "{messages.shown(name)}" does not exist', "34000")
        return portal

    # ---- answers

    def _notify(self, result: Result) -> None:
        for text in result.notices:
            head, _, detail = text.partition("\n")
            self._out.append(messages.notice_response(Fault("NOTICE", "00000", head, detail)))

    def _fault(self, error: PoolerError) -> None:
        code = getattr(error, "code", error.sqlstate)
        detail, hint = getattr(error, "detail", ""), getattr(error, "hint", "")
        self._out.append(messages.error_response(Fault("ERROR", code, str(error), detail, hint)))

    def _ready(self) -> None:
        self._out.append(messages.ready_for_query(self._desk.status))


def _refused(text: str, code: str, hint: str = "") -> Refused:
    return Refused(text, code=code, hint=hint)


def _result_formats(body: bytes, at: int) -> tuple[int, ...]:
    """The result formats of a Bind whose parameter formats begin at `at`. Raises ProtocolViolation."""
    try:
        (count,) = struct.unpack_from("!h", body, at)
        at += 2 + 2 * count
        (values,) = struct.unpack_from("!h", body, at)
        at += 2
        for _ in range(values):
            (size,) = struct.unpack_from("!i", body, at)
            at += 4 + max(size, 0)
        (formats,) = struct.unpack_from("!h", body, at)
        return struct.unpack_from(f"!{formats}h", body, at + 2)
    except struct.error:
        raise ProtocolViolation("invalid Bind message") from None
