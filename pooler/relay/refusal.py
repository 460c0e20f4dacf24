"""What a client is answered when its messages cannot be served: an error, and in step again.

A logged-in client stays connected. A simple query gets the error and one ReadyForQuery; a pipeline gets the
error, and everything up to its Sync is dropped, as a server would.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

from pooler.admission.refusals import delay_ms, hint
from pooler.errors import PoolerError
from pooler.relay import owed as o
from pooler.wire.messages import Fault, error_response

if TYPE_CHECKING:
    from pooler.relay.client import ClientConn
    from pooler.relay.server import ServerConn

_length_at = Struct(">I").unpack_from
SYNC, TERMINATE = 0x53, 0x58
WITHOUT_SESSION = frozenset(b"SXHdcf")
EMPTY = frozenset(b"SH")  # they hold nothing
MESSAGE_BYTES_MAX = 1 << 30  # as PostgreSQL's own limit
READY_IDLE = b"Z\x00\x00\x00\x05I"


def error_message(error: Exception, severity: str = "ERROR", hint: str = "") -> bytes:
    """The ErrorResponse for an outcome; a server's own words pass unchanged."""
    own: bytes = getattr(error, "server_error", b"")
    if own:
        return b"E" + (len(own) + 4).to_bytes(4, "big") + own
    code = getattr(error, "code", "") or getattr(error, "sqlstate", "58000")
    return error_response(Fault(severity, code, str(error), hint=hint or getattr(error, "hint", "")))


def hint_for(client: ClientConn, error: Exception) -> str:
    """The HINT of a refusal (admission.refusals); empty for what is none, and as PgBouncer."""
    situation: str = getattr(error, "situation", "")
    own: bytes = getattr(error, "server_error", b"")
    pool = client.pool
    if not situation or pool.parts.as_pgbouncer or own:
        return ""
    known: int = getattr(error, "after_ms", 0)  # to the moment; else it depends on the queue
    after_ms = known or delay_ms(len(pool.core.waiting), pool.parts.random.random())
    return hint(situation, after_ms, client.ticket_id)


def _refusal(client: ClientConn, error: Exception) -> bytes:
    return error_message(error, hint=hint_for(client, error))


def answer_alone(client: ClientConn, data: bytes) -> bytes:
    """Messages of a client that has no session, for which none is needed. → what needs one.

    A Sync has its answer here, as nothing is open; a server ignores a Flush then, and what is left of a COPY
    that it has refused.
    """
    at, size, syncs = 0, len(data), 0
    while size - at >= 5 and data[at] in WITHOUT_SESSION:
        length = _length_at(data, at + 1)[0]
        if data[at] == TERMINATE:
            client.left()
            return b""
        if not 4 <= length <= MESSAGE_BYTES_MAX or (data[at] in EMPTY and length != 4):
            client.break_off("08P01", f"message {chr(data[at])!r} of length {length}")
            return b""
        syncs += data[at] == SYNC
        at += 1 + length
    if at > size:
        client.skip = at - size
        client.dropping = True
    if syncs:
        client.deliver(READY_IDLE * syncs)
    return b"" if client.closing else data[at:]


def refuse_unsent(client: ClientConn, error: Exception, unsent: bytes) -> bytes:
    """Answer `unsent`, of which nothing reached a server. → what stands behind it, still to be served."""
    length = _length_at(unsent, 1)[0]
    if length < 4:
        client.break_off("08P01", f"message {chr(unsent[0])!r} of length {length}")
        return b""
    if unsent[:1] in (b"Q", b"F"):
        client.deliver(_refusal(client, error) + READY_IDLE)
        end = 1 + length
        if end > len(unsent):
            client.skip = end - len(unsent)  # the rest of it is still to come, and to be dropped
            client.dropping = True
        return unsent[end:]
    client.deliver(_refusal(client, error))
    client.dropping = client.skip_to_sync = True
    return drop(client, unsent)


def refuse_waited(client: ClientConn, error: Exception, data: bytes) -> bytes:
    """What stands behind an expired request came before its wait began (a client that waits is not read), so
    it has waited as long. → less than a header, still to be served."""
    while len(data) >= 5 and not client.closing:
        alone = data[0] in WITHOUT_SESSION
        data = answer_alone(client, data) if alone else refuse_unsent(client, error, data)
    return data


def refuse_owed(client: ClientConn, error: PoolerError, server: ServerConn) -> None:
    """The session went away outside a transaction block: answer what it still owed this client."""
    said = _refusal(client, error)
    client.skip_to_sync = server.unsynced
    client.dropping = client.skip_to_sync or client.skip > 0
    client.tail = None
    client.deliver((said + READY_IDLE) * o.readies_owed(server.owed) + (said if server.unsynced else b""))


def drop(client: ClientConn, data: bytes) -> bytes:
    """Drop the rest of a message that was refused, and messages up to Sync. → what is to be served.

    As after a server's error: a simple query before the Sync is dropped too.
    """
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
        length = _length_at(data, at + 1)[0]
        if kind == TERMINATE:
            client.left()
            return b""
        if not 4 <= length <= MESSAGE_BYTES_MAX:
            client.break_off("08P01", f"message {chr(kind)!r} of length {length}")
            return b""
        at += 1 + length
        if kind == SYNC:
            client.dropping = client.skip_to_sync = False
            client.deliver(READY_IDLE)
            return data[at:]
    if at > size:
        client.skip = at - size
    else:
        client.buffer = data[at:]
    return b""
