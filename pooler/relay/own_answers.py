"""What a session says that no client is to hear: answers to the pooler's own queries, and what it says idle.

A session that says what nobody asked for is out of step, and what comes next from it might be taken for
somebody's answer: it is closed.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from pooler.errors import ProtocolViolation
from pooler.relay.answers import (
    COMPLETE,
    DATA_ROW,
    EMPTY,
    ERROR,
    HELD_BYTES_MAX,
    KINDS,
    MALFORMED,
    NOT_ASKED,
    READY,
    STATUS,
    STATUSES,
    TOO_LONG,
    UNASKED,
)
from pooler.wire.messages import read_data_row, read_fault

if TYPE_CHECKING:
    from pooler.relay.server import ServerConn

ROWS_BYTES_MAX: Final = 4 << 20  # of one answer
_length_at = Struct(">I").unpack_from


def own_answers(server: ServerConn, data: bytes) -> int:
    """Take what is not for a client. → where that ends. Raises ProtocolViolation."""
    at, size = 0, len(data)
    kinds = KINDS if server.own or server.doubtful else UNASKED
    while at < size:
        kind = data[at]
        if kind not in kinds:
            server.give_up(NOT_ASKED if kind in KINDS else MALFORMED)
            return size
        if size - at < 5:
            break
        end: int = at + 1 + _length_at(data, at + 1)[0]
        if end < at + 5:
            raise ProtocolViolation(MALFORMED)
        if end > size:
            break
        _take(server, kind, data[at:end])
        at = end
        if server.closing or (server.client is not None and not server.own):
            return at
        if not server.own and not server.doubtful:
            kinds = UNASKED
    server.held = data[at:]
    if len(server.held) > HELD_BYTES_MAX:
        server.give_up(TOO_LONG)
    return size


def _take(server: ServerConn, kind: int, message: bytes) -> None:
    if kind == STATUS:
        server.reported(message[5:])
    elif kind == ERROR:
        _failed(server, message)
    elif kind == DATA_ROW:
        _row(server, message)
    elif kind == COMPLETE or kind == EMPTY:
        server.own_answered = True
    elif kind == READY:
        if len(message) != 6 or message[5] not in STATUSES:
            raise ProtocolViolation(MALFORMED)
        server.status = message[5]
        if server.own and server.own_answered:  # else it answers a Sync of the last client: see `free`
            server.own_answered = False
            server.own -= 1
            if not server.own:
                _ended(server)


def _row(server: ServerConn, message: bytes) -> None:
    server.own_bytes += len(message)
    if server.own_bytes > ROWS_BYTES_MAX:
        server.give_up(TOO_LONG)
    elif server.own_rows is not None:
        server.own_rows.append(read_data_row(message[5:]))


def _failed(server: ServerConn, message: bytes) -> None:
    """An error in answer to a query of the pooler's own, or the last word of a session that nobody uses."""
    words = read_fault(message[5:]).message
    if server.own:  # then it is not a last word that anybody else has heard
        server.own_answered = True
        server.own_error = message
        return
    server.note_fatal(message)
    if server.fatal:  # nobody gets it before its end was read, and nothing is sent that could meet that
        server.cut = True
        server.pool.sessions_lost += 1
        server.give_up("the server ended it: " + words)
    else:
        server.give_up(NOT_ASKED)


def _ended(server: ServerConn) -> None:
    """The last of them is answered."""
    done, server.own_done = server.own_done, None
    server.own_bytes = 0
    leaver = server.leaver
    try:
        if done is not None:
            done(not server.own_error)
    except ValueError:  # rows that are no answer to what was asked
        server.leaver = leaver
        server.give_up(MALFORMED)
    server.own_error = b""
