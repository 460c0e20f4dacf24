"""SET, RESET and SHOW of the pooler's own parameters, answered here, in order with what the server answers.

One waits until everything before it is answered. Then its answer is known; what ends a query or a group is
left to the server (a Sync), and so is an error inside a transaction, which a text that fails takes there (as
of `session_state: reject`): the transaction's state is the server's alone.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import TYPE_CHECKING, Final

from pooler.relay import owed as o
from pooler.relay.asking import OwnNames
from pooler.relay.extended import drop_unnamed
from pooler.relay.refusal import READY_IDLE, error_message, refuse_unsent
from pooler.wire.messages import (
    BIND_COMPLETE,
    CLOSE_COMPLETE,
    NO_DATA,
    PARSE_COMPLETE,
    SYNC,
    command_complete,
    data_row,
    message,
    query,
    row_description,
    text_column,
)
from pooler.wire.own_parameters import PREFIX, Own, OwnFault, read_own
from pooler.wire.prepared import Statement, bind_names, describe_target, parse_message, parse_name_body
from pooler.wire.state_refusal import UNSERVABLE

if TYPE_CHECKING:
    from pooler.relay.client import ClientConn
    from pooler.relay.server import ServerConn

QUERY, PARSE, BIND, DESCRIBE, EXECUTE, CLOSE, SYNC_KIND = 0x51, 0x50, 0x42, 0x44, 0x45, 0x43, 0x53
IDLE = 0x49
HELD_BACK = 1 << 61  # as of requests: more of it is missing
NO_NAME: Final = b"\0"  # as the name of an answer that is about no statement: no client has it
LOOK_BYTES: Final = 4_096  # what is longer is looked at once it has a session
OWN_NAMES_MAX: Final = 1_000
_NO_PARAMETERS: Final = message(b"t", b"\0\0")
_NOBODY: Final = Statement(b"", b"")
_length_at = Struct(">I").unpack_from

Plain = Callable[["ClientConn", "ServerConn", bytes, int], None]
Wait = Callable[["ClientConn", "ServerConn", bytes], bytes]


# ---- which messages are ours


def answer_own(client: ClientConn, data: bytes) -> bytes | None:
    """Answer what of a client without a session is ours, from the beginning of `data`. → the rest; None if
    that begins with something else."""
    end = _own_end(client, data, 0)
    if not end:
        return None
    return _answer_idle(client, data, end)


def pass_among(
    client: ClientConn, server: ServerConn, data: bytes, at: int, plain: Plain, wait: Wait
) -> None:
    """Pass `data` on (`at`: where its first message begins), and answer what of it is ours."""
    while True:
        begin = _first_own(client, data, at)
        if begin < 0:
            plain(client, server, data, at)
            return
        if begin:
            plain(client, server, data[:begin], at)
            data, at = data[begin:], 0
            if client.closing:
                return
            if client.missing > HELD_BACK:
                assert client.chunks is not None
                client.chunks.append(data)
                return
            if client.server is not server:
                break
        if any(type(entry) is not o.Told for entry in server.owed) and not server.copy_in:
            server.write(wait(client, server, data))
            return
        end = _own_end(client, data, 0)
        if server.copy_in or server.skipping:  # none of it is carried out
            plain(client, server, data[:end], 0)
            data = data[end:]
        elif server.status == IDLE and not server.unsynced and not server.owed:
            data = _answer_idle(client, data, end)
        else:
            _answer_inside(client, server, data[:end])
            data = data[end:]
        if not data or client.closing or client.server is not server:
            break
    if not client.closing and client.server is server and not server.owed and not server.unsynced:
        server.unasked(client)
    if data and not client.closing:
        client.buffer = data
        client.resume_elsewhere()


def _first_own(client: ClientConn, data: bytes, at: int) -> int:
    """Where the first message that is ours begins; -1 if there is none."""
    size = len(data)
    while size - at >= 5:
        length = _length_at(data, at + 1)[0]
        if length < 4:
            return -1  # a malformed one: whoever passes it on sees that
        if _own_end(client, data, at):
            return at
        at += 1 + length
    return -1


def _own_end(client: ClientConn, data: bytes, at: int) -> int:
    """Where the message at `at` ends if it is whole, and ours; else 0, and what it takes away from ours."""
    if len(data) - at < 5:
        return 0
    kind = data[at]
    end: int = at + 1 + _length_at(data, at + 1)[0]
    if end > len(data) or end < at + 5:
        return 0
    names = client.own
    if kind == QUERY:
        return end if read_own(data[at + 5 : end]) is not None else 0
    if kind == PARSE:
        name, body = parse_name_body(data[at:end], 5)
        if read_own(body.partition(b"\0")[0]) is not None:
            return end
        if names is not None:
            names.statements.pop(name, None)
            client.own = names if names.statements or names.portals else None
        return 0
    if names is None:
        return 0
    return end if _is_named(names, kind, data[at:end]) else 0


def _is_named(names: OwnNames, kind: int, said: bytes) -> bool:
    """Whether a message is about a statement or a portal of ours."""
    if kind == BIND:
        portal, name, _ = bind_names(said, 5)
        if name in names.statements:
            return True
        names.portals.pop(portal, None)
    elif kind == EXECUTE:
        return said[5 : said.find(b"\0", 5)] in names.portals
    elif kind == DESCRIBE or kind == CLOSE:
        what, name = describe_target(said, 5)
        return name in (names.statements if what == b"S" else names.portals)
    elif kind == SYNC_KIND:
        names.portals.clear()
    return False


# ---- the answers


def _answer_idle(client: ClientConn, data: bytes, end: int) -> bytes:
    """Nothing is open and nothing unanswered. → what is still to be served."""
    try:
        answer = _carried_out(client, data[:end])
    except OwnFault as fault:
        return refuse_unsent(client, fault, data)
    client.deliver(answer + READY_IDLE if data[0] == QUERY else answer)
    return data[end:]


def _answer_inside(client: ClientConn, server: ServerConn, said: bytes) -> None:
    """In a transaction, or behind what no Sync has ended."""
    is_query = said[0] == QUERY
    answer, words = b"", b""
    if server.status == 0x45:  # failed: the server says so itself
        words = b"E"
    else:
        try:
            answer = _carried_out(client, said)
        except OwnFault as fault:
            words = error_message(fault)
    if words:
        server.refused.append(words)
        if is_query:
            drop_unnamed(client, server)
            server.doubtful = server.doubtful or server.unsynced
            server.owed.append(o.REFUSED)
            server.write(query(UNSERVABLE))
        else:
            parsed = o.Parsed(_NOBODY, None, True, named=False)
            parsed.refused = True
            server.owed.append(parsed)
            server.statements.unnamed = None
            server.write(parse_message(Statement(b"", UNSERVABLE + b"\0\0\0")))
    elif not is_query:
        client.deliver(answer)
    elif not server.unsynced:
        client.deliver(answer + READY_IDLE[:-1] + bytes((server.status,)))
    else:  # it ends the group, as any query does
        client.deliver(answer)
        server.owed.append(o.SYNC)
        server.statements.group += 1
        server.write(SYNC)
    server.unsynced = not is_query


def _carried_out(client: ClientConn, said: bytes) -> bytes:
    """Do what one message says. → its answer, without ReadyForQuery. Raises OwnFault."""
    kind = said[0]
    if kind == QUERY:
        return _run(client, _read(said[5:]), describes=True)
    if client.own is None:
        client.own = OwnNames()
    names = client.own
    if kind == PARSE:
        name, body = parse_name_body(said, 5)
        own = _read(body.partition(b"\0")[0])
        if (name and name in names.statements) or (client.statements is not None and (
                name and client.statements.get(name) is not None)):
            raise OwnFault(f'prepared statement "{name.decode(errors="replace")}" already exists', "42P05")
        if len(names.statements) >= OWN_NAMES_MAX:
            raise OwnFault("too many prepared statements about the pooler's parameters", "53400")
        names.statements[name] = own
        return PARSE_COMPLETE
    if kind == BIND:
        portal, name, _ = bind_names(said, 5)
        if len(names.portals) >= OWN_NAMES_MAX:
            raise OwnFault("too many portals about the pooler's parameters", "53400")
        names.portals[portal] = names.statements[name]
        return BIND_COMPLETE
    if kind == EXECUTE:
        return _run(client, names.portals[said[5 : said.find(b"\0", 5)]], describes=False)
    what, name = describe_target(said, 5)
    table = names.statements if what == b"S" else names.portals
    if kind == CLOSE:
        del table[name]
        return CLOSE_COMPLETE
    return (_NO_PARAMETERS if what == b"S" else b"") + _described(table[name])


def _read(text: bytes) -> Own:
    own = read_own(text)
    if isinstance(own, OwnFault):
        raise own
    assert own is not None
    return own


def _described(own: Own) -> bytes:
    return row_description([text_column(PREFIX + own.name)]) if own.verb == "SHOW" else NO_DATA


def _run(client: ClientConn, own: Own, *, describes: bool) -> bytes:
    if own.verb == "SHOW":
        rows = data_row([client.get_asked(own.name)]) + command_complete("SHOW")
        return _described(own) + rows if describes else rows
    client.set_asked(own.name, own.value)
    return command_complete(own.verb)
