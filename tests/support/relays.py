"""A TCP relay on loopback that splits bytes, cuts connections, and says for the server what none says."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from pooler.demo.client import CANCEL_CODE, SSL_CODE, Inbox, Message

Answers = Callable[[Message], bytes]
"""What a client is told instead of a server's message; raises Cut to end the connection there."""

GSS_CODE = 80_877_104
_RECV_BYTES = 65_536


class Cut(Exception):
    """The connection ends here."""


def as_sent(said: Message) -> bytes:
    """A message as it was."""
    return said.type.encode("latin-1") + struct.pack("!i", len(said.body) + 4) + said.body


class Relay:
    """In front of `port`. `piece_bytes` is the size of each send (0: as it comes); `answers` sees every
    message of the server. Both may be changed while it runs."""

    def __init__(self, port: int, *, piece_bytes: int = 0, answers: Answers | None = None) -> None:
        self.target = port
        self.piece_bytes = piece_bytes
        self.answers = answers
        self.connections = 0
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def typed(self) -> Typed:
        """What looks at the bytes of one connection."""
        return Typed(self)

    def cut(self) -> None:
        """End every connection, both ways."""
        with self._lock:
            for sock in self._open:
                _shut(sock)

    def close(self) -> None:
        """End it all."""
        _shut(self._listener)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)
        for sock in self._open:
            sock.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:  # the server is down
                    near.close()
                    continue
                self.connections += 1
                for sock in (near, far):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._open |= {near, far}
                answers = self.typed()
                self._start(near, far, answers.asked)
                self._start(far, near, answers.said)

    def _start(self, source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
        thread = threading.Thread(target=self._pump, args=(source, target, change), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _pump(self, source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
        with suppress(OSError, Cut):
            while data := source.recv(_RECV_BYTES):
                data = change(data)
                step = self.piece_bytes or len(data) or 1
                for at in range(0, len(data), step):
                    target.sendall(data[at : at + step])
        _shut(source)
        _shut(target)


class Typed:
    """One connection's messages of the server, told from the single byte that answers an SSLRequest."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._inbox = Inbox()
        self._bare = 0
        self._first = b""

    def asked(self, data: bytes) -> bytes:
        """What the client sends, unchanged."""
        if len(self._first) < 8:
            self._first += data[:8]
            code = int.from_bytes(self._first[4:8])
            if len(self._first) >= 8 and code in (SSL_CODE, GSS_CODE, CANCEL_CODE):
                self._bare += 1
                self._first = b""
        return data

    def said(self, data: bytes) -> bytes:
        """What the client is to hear."""
        out = b""
        if self._bare:
            self._bare, out, data = self._bare - 1, data[:1], data[1:]
        self._inbox.feed(data)
        while (said := self._inbox.next()) is not None:
            out += (self._relay.answers or as_sent)(said)
        return out


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


RunRelay = Callable[..., Relay]


@pytest.fixture(scope="module")
def run_relay() -> Iterator[RunRelay]:
    """run_relay(port, piece_bytes=0, answers=None) → a relay, ended with the module."""
    with ExitStack() as running:

        def run(port: int, *, piece_bytes: int = 0, answers: Answers | None = None) -> Relay:
            relay = Relay(port, piece_bytes=piece_bytes, answers=answers)
            running.callback(relay.close)
            return relay

        yield run
