"""Bytes passed on unchanged between a client and a session that is its own, with nothing said in between.

Each side is read only when the other has taken what came before, so that what is under way is bounded. Where
messages begin is followed, so that a last word of the pooler's own, or a Terminate, never lands inside one.
"""

from __future__ import annotations

import trio

from pooler.net.stream import Broken, RawSocket

CHUNK_BYTES = 65_536
_HEADER_BYTES = 5


class Boundaries:
    """Where messages begin in a stream that comes in pieces. `last` is the type of the newest begun."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._left = 0
        self.last = b""
        self.seen: set[bytes] = set()  # types begun since `seen` was last emptied

    @property
    def is_between(self) -> bool:
        """Whether the last message that began has come to its end."""
        return not self._left and not self._head

    def take(self, data: bytes) -> None:
        """The next piece."""
        at, size = 0, len(data)
        while at < size:
            if self._left:
                step = min(self._left, size - at)
                self._left -= step
                at += step
                continue
            missing = _HEADER_BYTES - len(self._head)
            self._head += data[at : at + missing]
            at += missing
            if len(self._head) == _HEADER_BYTES:
                self.last = bytes(self._head[:1])
                self.seen.add(self.last)
                self._left = max(0, int.from_bytes(self._head[1:], "big") - 4)
                self._head.clear()


class Passing:
    """One client and its session."""

    def __init__(self, client: RawSocket, server: RawSocket) -> None:
        self._client, self._server = client, server
        self._to_client, self._to_server = Boundaries(), Boundaries()
        self._client_torn = self._server_torn = False
        self._busy = False
        self.streams = False  # COPY both: until one side ends it, either may send at any time
        self.received_bytes = self.sent_bytes = 0
        self.server_ended: bool | None = None  # in order (True), or broken (False); None: not by the server

    @property
    def is_busy(self) -> bool:
        """Whether the client has asked for something that the server has not answered to the end."""
        return self._busy

    @property
    def client_is_whole(self) -> bool:
        """Whether what the client was sent ends where a message ends."""
        return not self._client_torn and self._to_client.is_between

    @property
    def server_is_whole(self) -> bool:
        """Whether what the server was sent ends where a message ends."""
        return not self._server_torn and self._to_server.is_between

    async def run(self, leftover: bytes = b"") -> None:
        """Until one side ends; `leftover` came from the client before. Raises Cancelled only."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._up, leftover, nursery.cancel_scope)
            nursery.start_soon(self._down, nursery.cancel_scope)

    async def _up(self, data: bytes, life: trio.CancelScope) -> None:
        """From the client to the server."""
        try:
            while data or (data := await self._client.recv(CHUNK_BYTES)):
                self.received_bytes += len(data)
                self._busy = True
                self._to_server.take(data)
                self._server_torn = True
                await self._server.send_all(data)
                self._server_torn = False
                data = b""
        except Broken:
            pass  # of the client: it left. Of the server: whoever reads from it sees how it ended
        if not self._server_torn:
            life.cancel()

    async def _down(self, life: trio.CancelScope) -> None:
        """From the server to the client. What it says last is passed on before its end counts."""
        try:
            while data := await self._server.recv(CHUNK_BYTES):
                self.sent_bytes += len(data)
                self._follow(data)
                self._client_torn = True
                try:
                    await self._client.send_all(data)
                except Broken:
                    life.cancel()
                    return
                self._client_torn = False
            self.server_ended = True
        except Broken:
            self.server_ended = False
        life.cancel()

    def _follow(self, data: bytes) -> None:
        down = self._to_client
        down.seen.clear()
        down.take(data)
        if b"W" in down.seen:
            self.streams = True
        if b"Z" in down.seen:
            self.streams = False
        if down.last == b"Z":
            self._busy = False
