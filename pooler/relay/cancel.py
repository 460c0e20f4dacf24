"""Cancel requests to a server: sent for a ticket that is still in its transaction, and waited for.

A session with a cancel in flight is not handed on until the server has closed that cancel's connection: only
then can the signal no longer hit whoever comes next. Where that cannot be seen, the session is closed.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import trio

from pooler.net.connect import connect
from pooler.net.handshake import request_tls
from pooler.net.stream import Broken, PeerGone, RawSocket
from pooler.relay.leaving import free
from pooler.wire.messages import cancel_request

if TYPE_CHECKING:
    from pooler.pool.opener import OpenSession
    from pooler.relay.server import ServerConn


class Cancellable(Protocol):
    """What a cancel request needs of a session."""

    @property
    def opened(self) -> OpenSession: ...


async def cancel_for(server: ServerConn, aimed_at: object, timeout_seconds: float) -> None:
    """Cancel what `aimed_at` (a client) runs on this session, if it still does when the connection stands."""
    if server.client is not aimed_at or server.closing:
        return
    server.cancels += 1
    ended = False
    try:
        ended = await _send(server, lambda: server.client is aimed_at and bool(server.owed), timeout_seconds)
    finally:
        server.cancels -= 1
        if not ended and not server.closing:
            server.retire = server.retire or "a cancel request was not seen to end"
        if not server.cancels and server.client is None and not server.own and not server.closing:
            free(server, monotonic())


async def cancel_and_wait(server: Cancellable, timeout_seconds: float) -> bool:
    """Cancel whatever runs on a session that is being closed. False if that was not seen to end."""
    return await _send(server, lambda: True, timeout_seconds)


async def end_without_word(sock: socket.socket, timeout_seconds: float) -> bool:
    """End a session that was sent the beginning of a message: a Terminate would be taken for the message's
    end, and what comes out of that would be run. True if the server's orderly end was read."""
    try:
        sock.shutdown(socket.SHUT_WR)
        with trio.move_on_after(timeout_seconds):
            while True:
                try:
                    if not sock.recv(65_536):
                        return True  # a reset would have been an error: nothing was sent that met it
                except BlockingIOError:
                    await trio.lowlevel.wait_readable(sock)
    except OSError:
        pass
    return False


async def _send(server: Cancellable, still: Callable[[], bool], timeout_seconds: float) -> bool:
    opened = server.opened
    with trio.move_on_after(timeout_seconds or float("inf")):
        try:
            host, _, port = opened.backend.address.rpartition(":")
            raw = RawSocket(await connect(host.strip("[]"), int(port)))
        except Broken:
            return False
        try:
            if opened.tls is not None:  # as its session: the key is as good as a password
                await request_tls(raw, opened.tls, host.strip("[]"))
            if not still():
                return True
            await raw.send_all(cancel_request(opened.pid.to_bytes(4, "big", signed=True) + opened.secret_key))
            await raw.recv()  # the postmaster's child closes when the signal has been sent
            return True
        except (Broken, PeerGone):
            return False
        finally:
            raw.close()
    return False
