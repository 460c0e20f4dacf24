"""What a client is answered when its messages cannot be served: an error, and in step again.

A logged-in client stays connected. A simple query gets the error and one ReadyForQuery; a pipeline gets the
error, and everything up to its Sync is dropped, as a server would.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

from pooler.errors import PoolerError
from pooler.relay import owed as o
from pooler.wire.messages import Fault, error_response

if TYPE_CHECKING:
    from pooler.relay.client import ClientConn
    from pooler.relay.server import ServerConn

_length_at = Struct(">I").unpack_from
QUERY, SYNC, TERMINATE, FUNCTION = 0x51, 0x53, 0x58, 0x46
READY_IDLE = b"Z\x00\x00\x00\x05I"


def error_message(error: Exception, severity: str = "ERROR") -> bytes:
    """The ErrorResponse for an outcome; a server's own words pass unchanged."""
    own: bytes = getattr(error, "server_error", b"")
    if own:
        return b"E" + (len(own) + 4).to_bytes(4, "big") + own
    code = getattr(error, "code", "") or getattr(error, "sqlstate", "58000")
    return error_response(Fault(severity, code, str(error), hint=getattr(error, "hint", "")))


def refuse_unsent(client: ClientConn, error: Exception, unsent: bytes) -> bytes:
    """Answer `unsent`, of which nothing reached a server. → what stands behind it, still to be served."""
    client.deliver(error_message(error))
    if unsent[:1] in (b"Q", b"F"):
        client.deliver(READY_IDLE)
        end = 1 + _length_at(unsent, 1)[0]
        if end > len(unsent):
            client.skip = end - len(unsent)  # the rest of it is still to come, and to be dropped
            client.dropping = True
        return unsent[end:]
    client.dropping = client.skip_to_sync = True
    return drop(client, unsent)


def refuse_owed(client: ClientConn, error: PoolerError, server: ServerConn) -> None:
    """The session went away: answer what it still owed this client."""
    owed = o.readies_owed(server.owed)
    client.deliver(error_message(error) + READY_IDLE * owed)
    client.skip_to_sync = owed == 0
    client.dropping = client.skip_to_sync or client.skip > 0
    client.buffer, client.chunks, client.missing = b"", None, 0


def drop(client: ClientConn, data: bytes) -> bytes:
    """Drop the rest of a message that was refused, and messages up to Sync. → what is to be served."""
    if client.skip:
        dropped = min(client.skip, len(data))
        client.skip -= dropped
        data = data[dropped:]
        if client.skip:
            return b""
    if not client.skip_to_sync:
        client.dropping = False
        return data
    at, size = 0, len(data)
    while size - at >= 5:
        kind = data[at]
        end = at + 1 + _length_at(data, at + 1)[0]
        if kind == TERMINATE:
            client.left()
            return b""
        if kind == QUERY or kind == FUNCTION or kind == SYNC:
            client.dropping = client.skip_to_sync = False
            if kind != SYNC:
                return data[at:]  # it answers for itself
            client.deliver(READY_IDLE)
            return data[end:]
        at = end
    if at > size:
        client.skip = at - size
    else:
        client.buffer = data[at:]
    return b""
