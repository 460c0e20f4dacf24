"""A non-blocking socket, plain or TLS, awaited through trio, which can be given away again.

Logins and dials use it; then `release()` hands the socket to the relay's reactor and nothing here will read,
write or close it any more. Cancelled calls: `recv` has then taken nothing; `send_all` may have sent a part.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

import trio

from pooler.net.tls import TlsFacts, TlsSocket

RECEIVE_BYTES = 16_384
_LINGER_ZERO = struct.pack("ii", 1, 0)
_CLOSE_WAIT = 8  # tcp_states.h: the peer has ended in order, and we have not


class Broken(Exception):
    """The connection ended without an orderly end: reset, timed out, or unreachable."""


class PeerGone(Exception):
    """The peer left before it had said what was expected. Not a fault: load balancers do it all day."""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """How a peer that vanished is noticed (tcp(7)): seconds of silence before the first probe, seconds
    between probes, probes without an answer, and how long what was sent may stay unacknowledged. 0: the
    system's own value. `is_probing` false: no probes."""

    idle_seconds: int = 60
    interval_seconds: int = 10
    probes: int = 6
    user_timeout_ms: int = 0
    is_probing: bool = True


class RawSocket:
    """One connected stream socket. Takes the socket over: it closes it unless it is released. `tls` is what
    is known of the peer once a handshake is done."""

    def __init__(self, sock: socket.socket, *, keepalive: KeepAlive | None = None) -> None:
        sock.setblocking(False)
        self._socket: socket.socket | None = sock
        self._sending_ended = False
        self.tls: TlsFacts | None = None
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if keepalive is not None:
                _set_keepalive(sock, keepalive)

    @property
    def is_shaking_hands(self) -> bool:
        """Whether a handshake was begun and is not done: nothing can be said to the peer."""
        return self.tls is None and isinstance(self._socket, TlsSocket)

    @property
    def is_local(self) -> bool:
        """Whether it is a unix socket."""
        return self.plain.family == socket.AF_UNIX

    @property
    def plain(self) -> socket.socket:
        """The socket. Raises trio.ClosedResourceError after close or release."""
        if self._socket is None:
            raise trio.ClosedResourceError("this socket was closed or given away")
        return self._socket

    async def recv(self, bytes_max: int = RECEIVE_BYTES) -> bytes:
        """What has arrived, at least one byte; b"" is the peer's orderly end. Raises Broken."""
        await trio.lowlevel.checkpoint()
        sock = self.plain
        while True:
            try:
                data = sock.recv(bytes_max)
                if not data and not self._sending_ended and not ended_in_order(sock):
                    raise Broken("the connection was reset before")
                return data
            except BlockingIOError:
                await trio.lowlevel.wait_readable(sock)
            except OSError as fault:
                raise Broken(_reason(fault)) from fault

    async def peek(self, bytes_max: int = RECEIVE_BYTES) -> bytes:
        """As recv(), but what has arrived stays to be read. Not for TLS. Raises Broken."""
        await trio.lowlevel.checkpoint()
        while True:
            try:
                return self.plain.recv(bytes_max, socket.MSG_PEEK)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self.plain)
            except OSError as fault:
                raise Broken(_reason(fault)) from fault

    async def recv_some(self, bytes_max: int = RECEIVE_BYTES) -> bytes:
        """As recv(), where an end of any kind is the peer's leaving. Raises PeerGone."""
        try:
            data = await self.recv(bytes_max)
        except Broken as broken:
            raise PeerGone(str(broken)) from broken
        if not data:
            raise PeerGone("end of file")
        return data

    async def send_all(self, data: bytes) -> None:
        """Send all of it. Raises Broken."""
        await trio.lowlevel.checkpoint()
        left = memoryview(data)
        while left:
            left = left[await self.send_some(left) :]

    async def send_some(self, data: bytes | memoryview) -> int:
        """Hand the kernel what it takes now, waiting until that is something; how much it was. There is no
        checkpoint after the bytes were taken. Raises Broken."""
        sock = self.plain
        while True:
            try:
                return sock.send(data)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(sock)
            except OSError as fault:
                raise Broken(_reason(fault)) from fault

    def has_ended(self) -> bool:
        """Whether the peer's orderly end is already here with nothing unread before it. Under TLS what is
        unread is lost: this is asked by who is about to close."""
        if isinstance(self.plain, TlsSocket):
            return self.plain.has_ended() and ended_in_order(self.plain)
        try:
            return not self.plain.recv(1, socket.MSG_PEEK) and ended_in_order(self.plain)
        except OSError:
            return False

    def end_sending(self) -> None:
        """Tell the peer that nothing more comes (FIN); it may still send."""
        self._sending_ended = True
        try:
            self.plain.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it is gone already, and reading will show it

    def encrypt(self, wrap: Callable[[socket.socket], TlsSocket]) -> TlsSocket:
        """Go on over the connection as `wrap` makes it of the socket, which it owns or has closed."""
        wrapped = wrap(self.release())
        self._socket = wrapped
        return wrapped

    def release(self) -> socket.socket:
        """Give the socket away, open and non-blocking."""
        sock = self.plain
        self._socket = None
        return sock

    def close(self) -> None:
        """Close it, if it is still ours. Tasks that wait on it get trio.ClosedResourceError."""
        if self._socket is not None:
            sock = self.release()
            trio.lowlevel.notify_closing(sock)
            sock.close()

    def abort(self) -> None:
        """Close it with a reset: whatever the peer has not read yet is not to be relied on."""
        if self._socket is not None:
            sock = self.release()
            trio.lowlevel.notify_closing(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
            if isinstance(sock, TlsSocket):
                sock.close_silently()
            else:
                sock.close()


def ended_in_order(sock: socket.socket) -> bool:
    """Whether an end of file just read from this socket was the peer's own (FIN).

    A reset is reported once, to whichever call meets it first, a send too; after that the kernel says "end of
    file" as well. Only the state of the connection still tells the two apart, and only as long as we have not
    ended our own side. Over a unix socket the peer's end is always its own.
    """
    if sock.family == socket.AF_UNIX:
        return True
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSE_WAIT


def _set_keepalive(sock: socket.socket, keepalive: KeepAlive) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, keepalive.is_probing)
    for option, value in (
        (socket.TCP_KEEPIDLE, keepalive.idle_seconds), (socket.TCP_KEEPINTVL, keepalive.interval_seconds),
        (socket.TCP_KEEPCNT, keepalive.probes), (socket.TCP_USER_TIMEOUT, keepalive.user_timeout_ms),
    ):
        if value:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _reason(fault: OSError) -> str:
    return (fault.strerror or type(fault).__name__).lower()
