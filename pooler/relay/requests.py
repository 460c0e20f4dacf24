"""A client's messages on their way to its session: the other hot half of the relay."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

from pooler.errors import MessageTooLong, ProtocolViolation
from pooler.relay import owed as o
from pooler.relay.extended import WAIT, drop_unnamed, extended_message, is_unsettled, stand_in
from pooler.relay.plain_group import take_group
from pooler.relay.refusal import MESSAGE_BYTES_MAX
from pooler.relay.sequences import SEQUENCES, forget_sequences
from pooler.wire.messages import query
from pooler.wire.prepared import ALL, COMMITS, MAY_FORGET, NOTHING, STAND_IN_TEXT, forgotten_name
from pooler.wire.session_state import LONGEST_WORD_BYTES
from pooler.wire.state_refusal import UNSERVABLE, refused_kinds

if TYPE_CHECKING:
    from pooler.relay.client import ClientConn
    from pooler.relay.server import ServerConn

WHOLE_BYTES_MAX = 16 << 20  # a Parse or Describe is taken whole; Query, Bind and COPY data pass in pieces
FORGETTING_BYTES_MAX = 8_192  # a text that may forget statements is taken whole, if it is no longer
HELD_BACK = 1 << 62  # as what is missing of a message: all that comes is kept
BIND_HEAD_BYTES = 1024  # enough of a Bind for its names
_length_at = Struct(">I").unpack_from

QUERY, SYNC, PARSE, BIND, DESCRIBE, EXECUTE, CLOSE = 0x51, 0x53, 0x50, 0x42, 0x44, 0x45, 0x43
FLUSH, TERMINATE, COPY_DATA, COPY_DONE, COPY_FAIL, FUNCTION = 0x48, 0x58, 0x64, 0x63, 0x66, 0x46
FLUSH_MESSAGE = b"H\0\0\0\4"
IDLE = 0x49
KINDS = frozenset(b"QSPBDECHXdcfF")


def pass_requests(client: ClientConn, server: ServerConn, data: bytes) -> None:
    """Send `data` on, rewritten where a name is the pooler's own.

    Raises ProtocolViolation, MessageTooLong, TooManyStatements: then nothing of it was sent.
    """
    size = len(data)
    owed = server.owed
    if not owed:
        server.query_at = client.requested_at
        if server.statements.young:
            server.statements.young.clear()
        if client.holds and server.status == IDLE and not server.unsynced:
            server.started_at = client.requested_at
    if client.skip:
        at = _pass_rest(client, server, data)
        if at < 0:
            return
    elif not owed and not server.skipping and _is_query(data, size):
        _pass_query(client, server, data)
        return
    elif (not owed and size > 20 and (data[0] == BIND or data[0] == PARSE) and not server.unsynced
            and not server.skipping and (group := take_group(client, server, data, size)) is not None):
        _send(client, server, group, begins=True)
        return
    else:
        at = 0
    if server.skipping:
        at = _skip_to_sync(server, data, at)
    _pass_each(client, server, data, at)
    if not owed or type(owed[0]) is o.Told:
        _nothing_to_come(client, server)


def _pass_each(client: ClientConn, server: ServerConn, data: bytes, at: int) -> None:
    size, owed, unsynced, bytes_max = len(data), server.owed, server.unsynced, client.pool.packet_bytes_max
    begins = not (unsynced or owed or at)
    start = 0  # what stands before it has been put into `pieces`
    pieces: list[bytes] | None = None
    while size - at >= 5:
        kind = data[at]
        length = _length_at(data, at + 1)[0]
        end = at + 1 + length
        if not 4 <= length <= bytes_max:
            raise ProtocolViolation(f"message {chr(kind)!r} of length {length}")
        if kind == QUERY:
            if end > size and length <= FORGETTING_BYTES_MAX:
                break
            forgets = end <= size and _forgets(client, data[at + 5 : end])
            if forgets and is_unsettled(server, forgotten_name(data[at + 5 : end])):
                pieces = [*(pieces or ()), data[start:at], _wait(client, server, data[at:])]
                start = size = at
                break
            unsynced, server.doubtful = False, server.doubtful or unsynced
            if forgets:
                pieces = [*(pieces or ()), data[start:at], _forgetting_query(client, server, data[at:end])]
                hold_back(client, data[end:])
                start = at = size = end
                break
            if _enter_query(client, server, data[at + 5 : end], whole=end <= size):
                pieces, start = [*(pieces or ()), data[start:at], query(UNSERVABLE)], end
        elif kind == SYNC:
            if length != 4:
                raise ProtocolViolation(f"a Sync of length {length}")
            if server.copy_in and len(owed) == 1:  # anything else that was sent has ended the copy
                server.syncs_ignored += 1
            else:
                owed.append(o.SYNC)
                server.statements.group += 1
                unsynced = False
        elif kind == BIND or kind == PARSE or kind == DESCRIBE or kind == CLOSE:
            if end > size and (kind != BIND or size - at < BIND_HEAD_BYTES):
                break
            unsynced = True
            message = extended_message(client, server, kind, data[at : end if end < size else size])
            if message is WAIT:
                pieces = [*(pieces or ()), data[start:at], _wait(client, server, data[at:])]
                start = size = at
                break
            if message is not None:
                pieces = pieces or []
                pieces += (data[start:at], message)
                start = end if end < size else size
        elif kind == EXECUTE:
            if end > size:
                break
            owed.append(o.EXECUTE)
            unsynced = True
            if client.forgets is not None:
                pieces = [*(pieces or ()), data[start:end], FLUSH_MESSAGE]
                hold_back(client, data[end:])
                start = at = size = end
                break
        elif not _pass_rarer(client, server, kind, length):
            return
        elif kind == FUNCTION:  # it ends a group, as a query does
            unsynced, server.doubtful = False, server.doubtful or unsynced
        at = end
    server.unsynced = unsynced
    if at != size:
        at = _stop(client, data, at, size)
    if pieces is not None:
        pieces.append(data[start:at])
    _send(client, server, data[:at] if pieces is None else b"".join(pieces), begins=begins)


def _send(client: ClientConn, server: ServerConn, data: bytes, *, begins: bool) -> None:
    """`begins`: it is the first of its transaction."""
    if data:
        if server.residue & SEQUENCES:
            forget_sequences(client, server, data, begins=begins)
        server.write(data)


def _is_query(data: bytes, size: int) -> bool:
    """One simple query, whole, and nothing else: the commonest thing that clients send."""
    return size > 5 and data[0] == QUERY and bool(_length_at(data, 1)[0] == size - 1)


def _pass_query(client: ClientConn, server: ServerConn, data: bytes) -> None:
    """One simple query, whole, with nothing before it unanswered."""
    if server.unsynced:
        server.unsynced, server.doubtful = False, True
    if client.pool.hits(data.lower()):
        if _forgets(client, data):
            data = _forgetting_query(client, server, data)
            hold_back(client, b"")
            server.write(data)
            return
        if client.pool.refuses and _is_refused(client, server, data[5:]):
            _query_sent(client, server, data, o.REFUSED)
            server.write(query(UNSERVABLE))
            return
        server.residue |= client.pool.look(data[5:])
        if server.residue & SEQUENCES:
            forget_sequences(client, server, data, begins=not server.doubtful)
    _query_sent(client, server, data)
    server.write(data)


def _enter_query(client: ClientConn, server: ServerConn, text: bytes, *, whole: bool) -> bool:
    """A simple query among others. True: it is refused, and another is to be sent for it."""
    refused = whole and client.pool.refuses and _is_refused(client, server, text)
    server.residue |= client.pool.look(text) if whole else _look_first(client, text)
    if server.owed and COMMITS.search(client.last_sent):
        server.commits = True
    _query_sent(client, server, text, o.REFUSED if refused else o.QUERY)
    return refused


def _is_refused(client: ClientConn, server: ServerConn, text: bytes) -> bool:
    found = refused_kinds(text, client.pool.parts.look)
    if found:
        server.refused.append(found)
    return bool(found)


def _forgets(client: ClientConn, text: bytes) -> bool:
    """Whether what the client's names mean hangs on how this text is answered (`hits` finds it too)."""
    return MAY_FORGET(text) is not None and not client.pool.passes_names


def _forgetting_query(client: ClientConn, server: ServerConn, message: bytes) -> bytes:
    """What to send for a query of which `_forgets` is true."""
    text = message[5:]
    name = client.forgets = forgotten_name(text) or ALL
    before = b""
    if name != ALL and client.statements is not None and client.statements.get(name) is not None:
        before = stand_in(server)
        message = query(STAND_IN_TEXT)
    if _enter_query(client, server, text, whole=True):
        return before + query(UNSERVABLE)
    server.owed[-1] = o.FUNCTION  # the same, and looked at closely: `go_on` follows it
    return before + message


def _query_sent(client: ClientConn, server: ServerConn, text: bytes, entry: int = o.QUERY) -> None:
    drop_unnamed(client, server)  # as every simple query does
    server.owed.append(entry)
    client.last_sent = text


def _nothing_to_come(client: ClientConn, server: ServerConn) -> None:
    """What was sent has no answer from the server, or its answer is known here."""
    owed = server.owed
    while owed and type(owed[0]) is o.Told and client.server is server:
        client.deliver(owed.popleft().answer)
    if client.forgets is not None and not owed:
        client.go_on()
    if not owed and not server.unsynced and not server.own:
        server.unasked(client)


def _skip_to_sync(server: ServerConn, data: bytes, at: int) -> int:
    """The server ignores what comes before the next Sync. → where that is, or what is after `data`."""
    size = len(data)
    while size - at >= 5:
        kind = data[at]
        length = _length_at(data, at + 1)[0]
        if not 4 <= length <= MESSAGE_BYTES_MAX or kind not in KINDS:
            raise ProtocolViolation(f"message type {kind} of length {length}")
        if kind == SYNC or kind == TERMINATE:
            server.skipping = False
            break
        at += 1 + length
    return at


def _pass_rest(client: ClientConn, server: ServerConn, data: bytes) -> int:
    """The next part of a message that passes in pieces. → where it ends, or -1: all of `data` is of it, and
    was sent."""
    at = client.skip
    if client.tail is not None:  # of a query, whose text is to be looked at
        seen = client.tail + data[:at]
        server.residue |= client.pool.look_at_piece(seen)
        client.tail = None if at <= len(data) else seen[-LONGEST_WORD_BYTES:]
    client.skip = max(0, at - len(data))
    if at <= len(data):
        return at
    server.write(data)
    return -1


def _look_first(client: ClientConn, text: bytes) -> int:
    """What the beginning of a query that passes in pieces may leave behind."""
    if client.statements:
        client.forgets = ALL  # if it does: too long a text to be looked at for that
    client.tail = text[-LONGEST_WORD_BYTES:]
    return client.pool.look_at_piece(text)


def _pass_rarer(client: ClientConn, server: ServerConn, kind: int, length: int) -> bool:
    """False: the client is done. Raises ProtocolViolation for a kind that clients do not send, and a Flush
    that holds something: the server skips what comes behind it, up to a Sync, whoever sends it."""
    if kind == COPY_DONE or kind == COPY_FAIL:
        if not server.copy_in and server.owed:
            server.owed.append(o.COPY_ENDED)
        server.copy_in = False
    elif kind == FUNCTION:
        server.residue |= client.pool.function_residue
        server.owed.append(o.FUNCTION)
    elif kind == TERMINATE:
        client.left()
        return False
    elif kind == FLUSH:
        if length != 4:
            raise ProtocolViolation(f"a Flush of length {length}")
    elif kind != COPY_DATA:
        raise ProtocolViolation(f"unknown message type {kind}")
    return True


def _stop(client: ClientConn, data: bytes, at: int, size: int) -> int:
    """The data ends inside a message: it goes on passing, or is kept until it is whole. → how far to pass."""
    if at > size:
        client.skip = at - size
        return size
    if size - at < 5:
        client.buffer = data[at:]
        return at
    length = _length_at(data, at + 1)[0]
    needed = 1 + length
    if length < 4:
        raise ProtocolViolation(f"message {chr(data[at])!r} of length {length}")
    if data[at] == BIND:
        needed = min(needed, BIND_HEAD_BYTES)
    elif length > WHOLE_BYTES_MAX:
        raise MessageTooLong(f"message {chr(data[at])!r} of {length} bytes is too long to be pooled")
    client.chunks = [data[at:]]
    client.missing = needed - (size - at)
    return at


def _wait(client: ClientConn, server: ServerConn, rest: bytes) -> bytes:
    """What comes next hangs on what is not answered yet. → what to send to have the answer."""
    client.forgets = client.forgets or NOTHING
    if server.owed[-1] == o.QUERY:
        server.owed[-1] = o.FUNCTION  # the same, and looked at closely: `go_on` follows it
    hold_back(client, rest)
    return FLUSH_MESSAGE


def hold_back(client: ClientConn, rest: bytes) -> None:
    """What names mean from here on hangs on the answer to what was sent: `go_on` follows it."""
    client.chunks, client.missing = [rest] if rest else [], HELD_BACK
    client.pause(True)
