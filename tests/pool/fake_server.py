"""A PostgreSQL server as far as opening and closing a session goes, on a unix socket, in this process.

It knows which birth tags are alive: from the whole startup packet until it has closed the connection.
"""

from __future__ import annotations

import socket
from pathlib import Path

import trio
import trio.testing

PORT = 5432
SYSTEM_IDENTIFIER = "7300000000000000001"


def message(kind: bytes, body: bytes) -> bytes:
    """One message of the server."""
    return kind + (len(body) + 4).to_bytes(4, "big") + body


class FakeServer:
    """`behaviour`: "normal"; "silent" after the startup packet; "fatal"; "mute" (no answer to a query);
    "stubborn" (no end after Terminate); "refusing" (an error to the first query); "other_pid"."""

    def __init__(self, directory: Path) -> None:
        self.address = f"{directory}:{PORT}"
        self.behaviour = "normal"
        self.in_recovery = False
        self.lag_ms: str | None = "0"  # what it says to the question how far it is behind
        self.lag_asked = 0
        self.logins_open: trio.Event | None = None  # until then nobody is let in
        self.at_the_door = self.at_the_door_max = 0
        self.alive: dict[str, int] = {}  # birth tag -> pid
        self.born = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{directory}/.s.PGSQL.{PORT}")
        self._listener.listen(64)

    async def run(self) -> None:
        """Serve until cancelled. The socket listens from the start."""
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._listener))
        await trio.serve_listeners(self._serve, [listener])

    async def ended(self) -> None:
        """Wait until no session is left (the clients' ends are closed)."""
        while self.alive:
            await trio.testing.wait_all_tasks_blocked()

    async def _serve(self, stream: trio.SocketStream) -> None:
        tag = ""
        try:
            startup = await _packet(stream, typed=False)
            if startup is None:
                return
            words = startup[4:].split(b"\0")
            tag = words[words.index(b"application_name") + 1].decode()
            self.born += 1
            self.alive[tag] = 10_000 + self.born
            await self._let_in()
            await self._session(stream, self.alive[tag])
        except trio.BrokenResourceError:
            pass
        finally:
            self.alive.pop(tag, None)
            await stream.aclose()

    async def _let_in(self) -> None:
        if self.logins_open is not None:
            self.at_the_door += 1
            self.at_the_door_max = max(self.at_the_door_max, self.at_the_door)
            await self.logins_open.wait()
            self.at_the_door -= 1

    async def _session(self, stream: trio.SocketStream, pid: int) -> None:
        if self.behaviour == "silent":
            await _packet(stream)
            return
        if self.behaviour == "fatal":
            await stream.send_all(message(b"E", b"SFATAL\0VFATAL\0C28P01\0Mno\0\0"))
            return
        told = pid + 1 if self.behaviour == "other_pid" else pid
        await stream.send_all(
            message(b"R", bytes(4)) + message(b"S", b"server_version\x0015.0\0")
            + message(b"K", told.to_bytes(4, "big") + b"key!") + message(b"Z", b"I"))
        while (body := await _packet(stream)) is not None:
            if body[:1] == b"X":
                if self.behaviour == "stubborn":
                    await _packet(stream)
                return
            if self.behaviour != "mute":
                await stream.send_all(self._answer(pid, body))

    def _answer(self, pid: int, asked: bytes) -> bytes:
        if self.behaviour == "refusing":
            return message(b"E", b"SERROR\0VERROR\0C42501\0Mno\0\0") + message(b"Z", b"I")
        values = [str(pid), "1790000000000000", SYSTEM_IDENTIFIER, "1", "1780000000000000",
                  "t" if self.in_recovery else "f", None, None, None, None, None]
        if b"pg_last_wal_replay_lsn" in asked:
            self.lag_asked += 1
            values = [self.lag_ms]
        row = len(values).to_bytes(2, "big") + b"".join(
            b"\xff\xff\xff\xff" if v is None else len(v).to_bytes(4, "big") + v.encode() for v in values)
        return message(b"D", row) + message(b"C", b"SELECT 1\0") + message(b"Z", b"I")


async def _packet(stream: trio.SocketStream, typed: bool = True) -> bytes | None:
    """The next message, with its type; None at the end."""
    head = await _exactly(stream, 5 if typed else 4)
    if head is None:
        return None
    body = await _exactly(stream, int.from_bytes(head[-4:], "big") - 4)
    return None if body is None else head[:-4] + body


async def _exactly(stream: trio.SocketStream, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        more = await stream.receive_some(size - len(data))
        if not more:
            return None
        data += more
    return data
