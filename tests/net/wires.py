"""Two ends of a local connection: one as the code under test has it, one to script a peer with."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from pooler.net.stream import RawSocket
from pooler.wire.frames import Frame, FrameReader

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Peer:
    """The scripted end."""

    stream: trio.SocketStream
    reader: FrameReader = field(default_factory=FrameReader)

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def read(self, size: int) -> bytes:
        """Exactly `size` untyped bytes; fewer only at the end of the stream."""
        data = self.reader.take_rest()
        while len(data) < size and (more := await self.stream.receive_some()):
            data += more
        self.reader.feed(data[size:])
        return data[:size]

    async def read_packet(self) -> bytes:
        """A startup packet with its length."""
        size = await self.read(4)
        return size + await self.read(int.from_bytes(size, "big") - 4)

    async def frame(self) -> Frame:
        while (frame := self.reader.next()) is None:
            data = await self.stream.receive_some()
            assert data, "the other side closed"
            self.reader.feed(data)
        return frame

    async def at_end(self) -> bool:
        """Whether nothing is left to read and the other side has closed in an orderly way."""
        return not self.reader.buffered and not await self.stream.receive_some()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected TCP sockets on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


@contextmanager
def connected(
    make_pair: Callable[[], tuple[socket.socket, socket.socket]] = socket.socketpair,
) -> Iterator[tuple[RawSocket, Peer]]:
    """(our end, the scripted end); both are closed afterwards."""
    ours, theirs = make_pair()
    raw = RawSocket(ours)
    peer = Peer(trio.SocketStream(trio.socket.from_stdlib_socket(theirs)))
    try:
        yield raw, peer
    finally:
        raw.close()
        peer.stream.socket.close()
