"""How a client is told its last word: behind whatever it is being sent, since nothing can be said inside a
message, and for a bounded time, since nobody has to take it.

A socket that is closed while something that came in is unread, or to which something comes later, is reset,
and what the kernel has not sent yet is lost with it (RFC 2525, 2.17). So where there is either, what the
client sends on is read, and dropped, until it has ended.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from fcntl import ioctl
from time import monotonic
from typing import TYPE_CHECKING, Any

from pooler.relay.reactor import GONE, QUIET, READ, WRITE

if TYPE_CHECKING:
    from pooler.relay.client import ClientConn

PARTING_SECONDS_MAX = 5.0
RECV_BYTES = 65_536
SIOCOUTQNSD = 0x894B  # <linux/sockios.h>


def part(client: ClientConn, word: bytes) -> None:
    """`word` is the last that the client hears; empty if that has been said.

    While a message of its session's is half way, the session is kept until the rest of it has come, and
    `go` is called then. Nothing can be said if it never comes. The client is heard no more in any case.
    """
    if client.closing or client.parting_since:
        return
    server = client.server
    if server is None or not server.skip:
        go(client, word)
    elif server.closing:
        client.left()
    else:
        client.last_word, client.parting_since = word, monotonic()
        client.buffer, client.chunks, client.missing = b"", None, 0
        client.pause(True)


def go(client: Any, word: bytes) -> None:
    """Say it, give up the session, and close when the client (never a task) has taken everything."""
    client.last_word = b""
    if word:
        client.deliver(word)
    client.give_up_session()
    if client.unsent:
        client.send_unsent()
    if client.closing:
        return
    client.closing, client.parting_since = True, monotonic()
    client.pause(True)
    if client.out:
        client.reactor.change(client.fd, QUIET | WRITE)
    else:
        end(client)


def end(client: ClientConn) -> None:
    """The kernel has everything: close, at once if a reset can destroy nothing of it."""
    if _is_unread(client) or _is_unsent(client.sock):
        with suppress(OSError):
            client.sock.shutdown(socket.SHUT_WR)
            client.reactor.change(client.fd, READ)
            return
    client.close()


def on_event(client: ClientConn, mask: int) -> None:
    """What is ready of a client that has been told its last word."""
    if client.out:
        if mask & GONE:
            client.left()
    elif mask & ~WRITE and not _is_unread(client, or_may_be=True):
        client.close()


def _is_unread(client: ClientConn, *, or_may_be: bool = False) -> bool:
    """Whether something came in, which is dropped, encrypted or not. `or_may_be`: or may still come."""
    try:
        return bool(socket.socket.recv(client.sock, RECV_BYTES))
    except (BlockingIOError, InterruptedError):
        return or_may_be
    except OSError:
        return False


def _is_unsent(sock: socket.socket) -> bool:
    """Whether the kernel has something that it has not sent, since the peer takes no more now."""
    try:
        return ioctl(sock.fileno(), SIOCOUTQNSD, bytes(4)) != bytes(4)
    except OSError:  # no TCP: its peer can read on when it is closed
        return False


def end_if_late(client: ClientConn, now: float) -> None:
    """A client that has not taken its last word in time, or could not be told it, is closed."""
    if client.parting_since and now - client.parting_since > PARTING_SECONDS_MAX:
        client.left()
