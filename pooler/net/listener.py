"""Listening sockets that were inherited, and the loop that accepts from them.

Decides how many logins may be in flight at once and what to do when descriptors run out; who a client is, is
for the login. Sockets may be shared with other processes: each turn takes one connection and goes back to
waiting, so that a burst spreads over all of them.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Awaitable, Callable, Sequence

import trio

from pooler.errors import UsageFault
from pooler.net.proxy_protocol import PeerAddress
from pooler.net.stream import KeepAlive, RawSocket

SHORTAGE_SECONDS_MIN = 0.05
SHORTAGE_SECONDS_MAX = 1.0
_SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# a connection that was gone before we took it, or whose network was (accept(2))
_PASSING = frozenset({
    errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.EINTR, errno.ENETDOWN, errno.ENETUNREACH,
    errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.ETIMEDOUT,
})

Handle = Callable[[RawSocket, PeerAddress], Awaitable[None]]


def adopt(descriptor: int) -> socket.socket:
    """A listening socket inherited by its descriptor. Raises UsageFault if it is none."""
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError as fault:
        raise UsageFault(f"descriptor {descriptor} is not a socket: {fault.strerror}") from fault
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.detach()
        raise UsageFault(f"descriptor {descriptor} is not a listening socket")
    sock.setblocking(False)
    os.set_inheritable(descriptor, False)
    return sock


class Acceptor:
    """Takes connections from its sockets and runs `handle(socket, peer)` for each, at most
    `in_flight_max` at a time; further ones wait in the kernel's backlog.

    `handle` owns the socket and must not raise. Closes the listening sockets when it ends.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        handle: Handle,
        *,
        in_flight_max: int,
        keepalive: KeepAlive | None = None,
    ) -> None:
        self._listeners = list(listeners)
        self._handle = handle
        self._in_flight_max = in_flight_max
        self.keepalive = keepalive  # of the connections from here on
        self._accepting = trio.CancelScope()
        self._room = trio.Event()
        self.in_flight = 0
        self.shortages = 0  # how often descriptors or memory ran out

    @property
    def listening(self) -> list[socket.socket]:
        """The sockets it listens on still."""
        return [each for each in self._listeners if each.fileno() >= 0]

    async def run(self) -> None:
        """Accept until stop(), then wait for what is in flight. Cancelled: that is cancelled too."""
        try:
            async with trio.open_nursery() as logins:
                with self._accepting:
                    async with trio.open_nursery() as loops:
                        for listener in self._listeners:
                            loops.start_soon(self._accept_from, listener, logins)
                self._close()
        finally:
            self._close()

    def stop(self) -> None:
        """Take no more connections. Those in the backlog of a socket shared with others stay there."""
        self._accepting.cancel()

    def _close(self) -> None:
        for listener in self._listeners:
            listener.close()

    async def _accept_from(self, listener: socket.socket, logins: trio.Nursery) -> None:
        pause_seconds = SHORTAGE_SECONDS_MIN
        while True:
            await self._await_room()
            await trio.lowlevel.wait_readable(listener)
            if self.in_flight >= self._in_flight_max:
                continue  # another listener took the room meanwhile
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                continue  # another process took it
            except OSError as fault:
                if fault.errno in _SHORTAGE:
                    pause_seconds = await self._wait_out_shortage(pause_seconds)
                elif fault.errno not in _PASSING:
                    raise
                continue
            pause_seconds = SHORTAGE_SECONDS_MIN
            self._start(sock, address, logins)

    def _start(self, sock: socket.socket, address: object, logins: trio.Nursery) -> None:
        try:
            raw = RawSocket(sock, keepalive=self.keepalive)
        except OSError:
            sock.close()  # reset before we could set an option
            return
        self.in_flight += 1
        logins.start_soon(self._run_one, raw, peer_address(sock, address))

    async def _run_one(self, raw: RawSocket, peer: PeerAddress) -> None:
        try:
            await self._handle(raw, peer)
        finally:
            self.in_flight -= 1
            self._room.set()

    async def _await_room(self) -> None:
        while self.in_flight >= self._in_flight_max:
            self._room = trio.Event()
            await self._room.wait()

    async def _wait_out_shortage(self, seconds: float) -> float:
        """Until a login ends, which frees a descriptor, but not longer than `seconds`; how long next time."""
        self.shortages += 1
        if self._room.is_set():
            self._room = trio.Event()
        with trio.move_on_after(seconds):
            await self._room.wait()
        return min(2 * seconds, SHORTAGE_SECONDS_MAX)


def peer_address(sock: socket.socket, address: object) -> PeerAddress:
    """The address of a connection as accept() gave it."""
    if sock.family == socket.AF_UNIX or not isinstance(address, tuple):
        return PeerAddress("unix", 0)
    return PeerAddress(str(address[0]), int(address[1]))
