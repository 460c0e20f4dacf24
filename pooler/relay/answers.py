"""A server's answers on their way to a client: the hot half of the relay.

Whole and partial messages pass as they came; what answers the pooler's own doing is left out, what the pooler
answers itself is put in, and ReadyForQuery with nothing owed ends the use of the session.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from pooler.relay import owed as o
from pooler.relay.parting import go
from pooler.relay.settling import copying, errored, refusal, renamed, reworded, skipped, tagged
from pooler.wire.prepared import SERVER_NAME_PREFIX

if TYPE_CHECKING:
    from pooler.relay.served import Served
    from pooler.relay.server import ServerConn

HELD_BYTES_MAX = 1 << 20  # a message that must be seen whole is never this long from an honest server
_length_at = Struct(">I").unpack_from

DATA_ROW, COPY_DATA = 0x44, 0x64
IDLE = 0x49  # ReadyForQuery's I
COMPLETE, READY, ERROR, STATUS = 0x43, 0x5A, 0x45, 0x53
BIND_DONE, PARSE_DONE, CLOSE_DONE, NO_DATA, ROW_DESCRIPTION = 0x32, 0x31, 0x33, 0x6E, 0x54
SUSPENDED, EMPTY, COPY_IN, COPY_BOTH, FUNCTION_DONE = 0x73, 0x49, 0x47, 0x57, 0x56
COMMON_TAGS = frozenset((b"SEL", b"INS", b"UPD", b"DEL", b"BEG", b"COM", b"ROL", b"COP", b"FET"))
PASSING = frozenset(b"DdtENAV")  # may pass in pieces: their beginning says all we need
PLAIN_BYTES_MAX = 4_096  # what is longer is not looked at twice
ERROR_HEAD_BYTES = 128  # of an ErrorResponse: enough for its severity
ERROR_WHOLE_BYTES = 2_048  # one that is no longer than this may name a statement, and is taken whole
STATUSES = frozenset(b"ITE")
KINDS = frozenset(b"123ACDEGHINSTVWZcdnst")  # what a session that is logged in may say at all
UNASKED = frozenset(b"ANSE")  # what it may say at any time
MALFORMED: Final = "the server sent a malformed message"
NOT_ASKED: Final = "the server said what nobody had asked for"
TOO_LONG: Final = "the server sent an over-long message"


def pass_answers(server: ServerConn, data: bytes, client: Served) -> None:
    """Give `data` (from a message's beginning, or inside one that passes in pieces) to the client."""
    size = len(data)
    owed = server.owed
    at = server.skip
    if at:
        if at > size:
            server.skip = at - size
            client.deliver(data)
            return
        server.skip = 0
        if client.last_word:
            client.deliver(data[:at])
            go(client, client.last_word)
            return
    elif size <= PLAIN_BYTES_MAX and owed:
        if len(owed) == 1 and owed[0] == o.QUERY:
            status = _plain_status(data, size)
        elif owed[-1] == o.SYNC and client.forgets is None:
            status = _group_status(owed, data, size)
        else:
            status = 0
        if status:
            owed.clear()
            server.answered = False
            server.fatal = b""  # as in _settle
            server.status = status
            server.pool.queries += 1
            client.deliver(data)
            server.ready(client)
            return
    _pass_each(server, data, at, client)


def _pass_each(server: ServerConn, data: bytes, at: int, client: Served) -> None:
    size = len(data)
    owed = server.owed
    start, first = 0, at  # what stands before `start` has been put into `pieces`
    pieces: list[bytes] | None = None
    ready = False
    fault = ""
    while size - at >= 5:
        kind = data[at]
        end = at + 1 + _length_at(data, at + 1)[0]
        if kind == DATA_ROW or kind == COPY_DATA:
            at = end  # of a length below 4: then the next kind is one that there is not
            continue
        if end < at + 5 or kind not in KINDS:
            fault = MALFORMED
            break
        if end > size and (kind not in PASSING or (
                kind == ERROR and (end - at <= ERROR_WHOLE_BYTES or size - at < ERROR_HEAD_BYTES))):
            break
        if kind == COMPLETE:
            server.answered = True
            if data[at + 5 : at + 8] not in COMMON_TAGS:
                tagged(server, data[at + 5 : end - 1])
            if owed and owed[0] == o.EXECUTE:
                owed.popleft()
                if owed and owed[0] != o.SYNC:
                    server.next_query()
        elif kind == READY:
            fault = _fault_of_ready(server, data, at, end)
            if fault:
                break
            ready = True
            _settle(server, data[at + 5])
            if not owed and end < size and _is_unasked(server, client, data[end:]):
                at, fault = end, NOT_ASKED
                break
        elif kind == ROW_DESCRIPTION or kind == NO_DATA or kind == BIND_DONE:
            if owed and owed[0] == (o.BIND if kind == BIND_DONE else o.DESCRIBE):
                owed.popleft()
        elif _is_own(server, kind, data, at, end):
            pieces = _take(pieces, data, start, at)
            start = end
        elif kind == ERROR and end <= size and SERVER_NAME_PREFIX in data[at:end]:
            pieces = _take(pieces, data, start, at)
            pieces.append(renamed(server, data[at:end]))
            start = end
        at = end
        if owed and type(owed[0]) is o.Told:
            pieces = _take(pieces, data, start, at)
            start = _tell(owed, pieces, at)
    if fault or at != size:
        at, fault = _stop(server, data, max(start, first), at, fault)
    if pieces is not None:
        pieces.append(data[start:at])
        data = b"".join(pieces)
    elif at != size:
        data = data[:at]
    if data:
        client.deliver(data)
    if fault:
        _broken_off(server, client, fault, answered=ready and not owed)
        return
    # looked at before `ready`: behind that the session, and what it owes, may be the next client's already
    in_step = not server.held and not server.skip
    goes_on = client.forgets is not None and in_step and (not owed or server.copy_in)
    if ready and not owed and in_step and not server.unsynced:
        server.ready(client)
    if goes_on and server.leaver is not client:
        client.go_on()


def _plain_status(data: bytes, size: int) -> int:
    """The commonest answer: one query's rows, tag and ReadyForQuery, whole, with nothing in it to be noted.
    → the transaction's status, 0 if it is any other."""
    at = 0
    done = False
    while size - at >= 6:
        kind = data[at]
        end: int = at + 1 + _length_at(data, at + 1)[0]
        if kind == READY:
            return data[at + 5] if done and end == size == at + 6 and data[at + 5] in STATUSES else 0
        if kind == COMPLETE:
            if data[at + 5 : at + 8] not in COMMON_TAGS:
                return 0
            done = True
        elif kind != DATA_ROW and kind != ROW_DESCRIPTION:
            return 0
        at = end
    return 0


def _group_status(owed: o.Owed, data: bytes, size: int) -> int:
    """The same of one group's answers, of one Execute with its Sync and what a driver sends before it."""
    at = step = 0
    last = len(owed) - 1
    while size - at >= 6:
        kind = data[at]
        end: int = at + 1 + _length_at(data, at + 1)[0]
        if kind == READY:
            return data[at + 5] if step == last and end == size == at + 6 and data[at + 5] in STATUSES else 0
        if kind != DATA_ROW:
            if step == last:
                return 0
            entry = owed[step]
            step += 1
            if kind == COMPLETE:
                if entry != o.EXECUTE or step != last or data[at + 5 : at + 8] not in COMMON_TAGS:
                    return 0
            elif kind == ROW_DESCRIPTION or kind == NO_DATA:
                if entry != o.DESCRIBE:
                    return 0
            elif kind == BIND_DONE:
                if entry != o.BIND:
                    return 0
            elif kind != PARSE_DONE or type(entry) is not o.Parsed or not entry.forward:
                return 0
        at = end
    return 0


def _sound_end(data: bytes, at: int, end: int) -> int:
    """Where the messages from `at` to `end` stop to be sound: rows are not looked at as they pass."""
    while at < end:
        following: int = at + 1 + _length_at(data, at + 1)[0]
        if not at + 5 <= following <= end:
            break
        at = following
    return at


def _fault_of_ready(server: ServerConn, data: bytes, at: int, end: int) -> str:
    """Why a ReadyForQuery shows that the server is out of step, empty if it does not."""
    if end != at + 6 or data[at + 5] not in STATUSES:
        return MALFORMED
    for entry in server.owed:
        if type(entry) is int and entry <= o.FUNCTION:
            return NOT_ASKED if entry != o.SYNC and not server.answered else ""
        if entry is not o.COPY_ENDED:
            break  # it is not answered yet
    return "" if server.doubtful else NOT_ASKED


def _settle(server: ServerConn, status: int) -> None:
    """A ReadyForQuery has answered everything up to and with the Sync, or the query, that it belongs to."""
    owed = server.owed
    server.answered = False
    server.fatal = b""  # it said that it ends, and goes on: when it does end, nobody has been told
    server.status = status
    server.pool.queries += 1
    if owed and type(owed[0]) is int and owed[0] <= o.FUNCTION:
        owed.popleft()
    else:
        skipped(server, o.settle_ready(owed))
    if owed:
        server.next_query()


def _is_unasked(server: ServerConn, client: Served, rest: bytes) -> bool:
    """Whether what stands behind the last answer is nobody's. A last word is a client's that keeps its
    session; any other hears nothing of the end of a session that it has no more use for."""
    if server.doubtful:
        return False
    if rest[0] != ERROR or server.status != IDLE or client.holds:
        return rest[0] not in UNASKED
    server.note_fatal(rest)
    server.cut = bool(server.fatal)  # its end is waited for without a word of ours that could meet it
    return True


def _broken_off(server: ServerConn, client: Served, fault: str, *, answered: bool) -> None:
    """What the server says cannot be followed. `answered`: its client has had all that it asked for."""
    if answered and server.status == IDLE:
        server.retire = fault
        server.ready(client)
        if server.leaver is not client:
            client.go_on()
    if not server.closing and server.client is client:
        server.give_up(fault)


def _is_own(server: ServerConn, kind: int, data: bytes, at: int, end: int) -> bool:
    """The rarer messages. True: this one answers the pooler's own doing and is not for the client."""
    owed = server.owed
    if kind == PARSE_DONE:
        return bool(owed) and type(owed[0]) is o.Parsed and not owed.popleft().forward
    if kind == CLOSE_DONE:
        asked = owed[0] if owed else None  # a server out of step may say it where a query is to be answered
        return (type(asked) is o.Closed or asked == o.CLOSE) and type(owed.popleft()) is o.Closed
    if kind == ERROR:
        server.answered = True
        refused = refusal(server) if server.refused else ()
        errored(server, data[at:end])
        if refused:
            return reworded(server, data[at:end], refused)
    elif kind == STATUS:
        return server.reported(data[at + 5 : end])
    elif kind == SUSPENDED or kind == EMPTY:
        server.answered = True
        if owed and owed[0] == o.EXECUTE:
            owed.popleft()
    elif kind == FUNCTION_DONE:
        server.answered = True
    elif kind == COPY_IN or kind == COPY_BOTH:
        copying(server)
    return False


def _tell(owed: o.Owed, pieces: list[bytes], at: int) -> int:
    """The pooler's own answers that are next. → where the server's go on."""
    while owed and type(owed[0]) is o.Told:
        pieces.append(owed.popleft().answer)
    return at


def _take(pieces: list[bytes] | None, data: bytes, start: int, at: int) -> list[bytes]:
    """What stands between `start` and `at` is for the client; the caller goes on after what is left out."""
    if pieces is None:
        pieces = []
    if at > start:
        pieces.append(data[start:at])
    return pieces


def _stop(server: ServerConn, data: bytes, begin: int, at: int, fault: str) -> tuple[int, str]:
    """The data ends inside a message: it goes on passing, or its beginning is held. Or there is a fault at
    `at`. `begin`: where a message begins that was not passed on yet. → how far to pass, and the fault."""
    size = len(data)
    if not fault and at < size and data[at] not in KINDS:
        fault = MALFORMED
    if fault:
        return _sound_end(data, begin, at), fault
    if at <= size:
        server.held = data[at:]
        return at, TOO_LONG if size - at > HELD_BYTES_MAX else ""
    if at - size > server.pool.packet_bytes_max:
        return _sound_end(data, begin, size), TOO_LONG  # not a byte of it
    server.skip = at - size
    return size, ""
