"""How a client is told its last word: behind whatever it is being sent, since nothing can be said inside a
message, and for a bounded time, since nobody has to take it.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from pooler.relay.reactor import QUIET, WRITE

if TYPE_CHECKING:
    from pooler.relay.client import ClientConn

PARTING_SECONDS_MAX = 5.0


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
    if client.closing or not client.out:
        client.close()
        return
    client.closing, client.parting_since = True, monotonic()
    client.reactor.change(client.fd, QUIET | WRITE)


def end_if_late(client: ClientConn, now: float) -> None:
    """A client that has not taken its last word in time, or could not be told it, is closed."""
    if client.parting_since and now - client.parting_since > PARTING_SECONDS_MAX:
        client.left()
