"""Parse, Bind, Describe and Close of a client, with statement names turned into the session's own.

A client's name means a text (and parameter types); each session that serves it prepares that text once under
a name of the pooler's. What has to be sent beside the client's own message is put before it, and what the
server will answer is entered in `owed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pooler.relay import owed as o
from pooler.wire.prepared import (
    ALL,
    ALTERS,
    MAY_FORGET,
    STAND_IN,
    STAND_IN_TEXT,
    Statement,
    bind_names,
    close_statement,
    describe_statement,
    describe_target,
    parse_message,
    parse_name_body,
    prepare_stand_in,
    rename_bind,
)
from pooler.wire.state_refusal import UNSERVABLE, refused_kinds

if TYPE_CHECKING:
    from pooler.relay.client import ClientConn
    from pooler.relay.server import ServerConn

PARSE, BIND, DESCRIBE, CLOSE = 0x50, 0x42, 0x44, 0x43
FAILED = 0x45  # the status of a transaction
OWN_NAMES = b"pooler_"
YOUNG_MAX = 1_000  # of more it is looked which of them are answered
WAIT: Final = b"wait"  # compared by identity: not this message now, nor what is behind it


def extended_message(client: ClientConn, server: ServerConn, kind: int, message: bytes) -> bytes | None:
    """What to send instead of `message`, None to send it as it is. Enters what will be answered.

    `message` has its header; a Bind may lack its tail. Raises ProtocolViolation for a malformed one and
    TooManyStatements at the limit.
    """
    if kind == DESCRIBE and message[5:6] == b"P" and message[-1] == 0:  # a portal's name is the client's own
        server.owed.append(o.DESCRIBE)
        return None
    pool = server.pool
    if kind == PARSE:
        return _take_parse(client, server, message)
    if kind == BIND and not pool.passes_names:
        return _bind(client, server, message)
    if pool.passes_names:
        server.owed.append(_AS_IS[kind])
        server.commits = True  # whether it does is not looked into here
        return None
    return _describe(client, server, message) if kind == DESCRIBE else _close(client, server, message)


def _take_parse(client: ClientConn, server: ServerConn, message: bytes) -> bytes | None:
    pool = server.pool
    if server.owed and not server.copy_in and _is_in_doubt(client, server, message):
        return WAIT
    replaced = None
    if pool.refuses:
        replaced = _refuse(server, message)
        message = replaced or message
    if pool.passes_names:
        server.owed.append(o.Parsed(_NOBODY, None, True))
        server.commits = True
        server.owed[-1].refused = replaced is not None
        return replaced
    pool.client_parses += 1  # counted where names are ours, as PgBouncer does
    parse = _parse(client, server, message)
    if replaced is not None and type(server.owed[-1]) is o.Parsed:
        server.owed[-1].refused = True
    return replaced if parse is None else parse


_AS_IS = {BIND: o.BIND, DESCRIBE: o.DESCRIBE, CLOSE: o.CLOSE}
_NOBODY = Statement(b"", b"")


def _refuse(server: ServerConn, message: bytes) -> bytes | None:
    """The Parse to send instead of one that `session_state: reject` does not serve."""
    name, body = parse_name_body(message, 5)
    found = refused_kinds(body.partition(b"\0")[0], server.pool.parts.look)
    if not found:
        return None
    server.refused.append(found)
    return parse_message(Statement(name, UNSERVABLE + b"\0\0\0"))


def _is_in_doubt(client: ClientConn, server: ServerConn, message: bytes) -> bool:
    """Whether the answer to what was sent may free the name of this Parse, or give it back, or drop what its
    text would find on the session."""
    if MAY_FORGET(client.last_sent) is not None:
        return True
    name, _ = parse_name_body(message, 5)
    if not name or client.statements is None:
        return False
    return client.statements.get(name) is not None or is_unsettled(server, name)


def _parse(client: ClientConn, server: ServerConn, message: bytes) -> bytes | None:
    name, body = parse_name_body(message, 5)
    prepared = client.prepared()
    if not name:
        known = prepared.get(b"")
        if known is not None and known.is_again(body, client.parameters.search_path):
            _parse_unnamed(server, known, known)
            return None
    previous = prepared.get(name)
    # behind something that may have changed tables or types, what others prepared is no measure, nor is what
    # this one sees before it is committed a measure for others
    alone = name != b"" and (server.altered or (bool(server.owed) and ALTERS(client.last_sent) is not None))
    statement = prepared.add(name, body, client.parameters.search_path, alone=alone)
    if not name:
        assert statement is not None
        _parse_unnamed(server, statement, previous)
        return None
    if statement is None:  # the name is taken: the server refuses a name in use
        before = stand_in(server)
        server.pool.server_parses += 1
        server.owed.append(o.Parsed(_NOBODY, None, True, taken=name))
        return before + parse_message(Statement(STAND_IN, body))
    _sent(server, name)
    unsettled = is_unsettled(server, None, statement)
    has_it = server.statements.touch(statement)
    if has_it and not unsettled and server.status != FAILED:  # there a server refuses most texts
        before = _instead(server)
        server.owed.append(o.Told(o.PARSE_COMPLETE, name))
        return before
    if has_it or unsettled:
        prepared.close(name)
        statement = prepared.add(name, body, client.parameters.search_path, alone=True)
        assert statement is not None
    before = _make_room(server, statement)
    server.pool.server_parses += 1
    server.owed.append(o.Parsed(statement, name, True))
    return before + parse_message(statement)


def _parse_unnamed(server: ServerConn, statement: Statement, previous: Statement | None) -> None:
    """It is sent as it came. `previous` is what it is to the client if it is skipped."""
    if server.owed:  # else nothing can skip it
        _sent(server, b"")
    server.statements.unnamed = statement
    server.pool.server_parses += 1
    server.owed.append(o.Parsed(statement, b"", True, named=False, before=previous))


def _bind(client: ClientConn, server: ServerConn, message: bytes) -> bytes | None:
    _, name, behind = bind_names(message, 5)
    statement = client.statements.get(name) if client.statements is not None else None
    if server.statements.young and _must_wait(server, name, statement):
        return WAIT
    server.pool.binds += 1
    before = _ready_for(server, name, statement)
    if statement is None:
        client.forgets = None
        server.owed.append(o.BIND)
        if name.startswith(OWN_NAMES):
            # nobody reaches another client's statement by its name
            return rename_bind(message, name, behind, b"_" + name)
        return before + message if before else None
    forgets = client.forgets = statement.forgets
    if statement.residue:
        server.residue |= statement.residue
    if statement.commits:
        server.commits = True
    if statement.alters:
        server.altered = True
    if forgets is not None and forgets != ALL and server.status != FAILED:
        before += _anew(client, server, name, statement)
    server.owed.append(o.BIND)
    if name:
        return before + rename_bind(message, name, behind, statement.server_name)
    return before + message if before else None


def _anew(client: ClientConn, server: ServerConn, name: bytes, statement: Statement) -> bytes:
    """Which text forgets a name as the client means it hangs on whether it has that name by now: so such a
    statement is prepared for every Bind, the stand-in's text for a name of its own."""
    assert client.statements is not None
    assert statement.forgets is not None
    on_session = statement.server_name if name else b""
    text, types = statement.body.split(b"\0", 1)
    before = b""
    if client.statements.get(statement.forgets) is not None:
        text = STAND_IN_TEXT
        before = stand_in(server)
    server.owed.append(o.Closed(statement if name else None))  # not closed if it is skipped
    server.owed.append(o.Parsed(statement, b"", False, named=bool(name)))
    fitting = Statement(on_session, text + b"\0" + types)
    return before + close_statement(on_session) + parse_message(fitting)


def _must_wait(server: ServerConn, name: bytes, statement: Statement | None) -> bool:
    """Whether what a Bind of this name does hangs on what is not answered yet."""
    if is_unsettled(server, name, statement):
        return True
    forgets = statement.forgets if statement is not None else None
    return forgets is not None and is_unsettled(server, forgets)


def is_unsettled(server: ServerConn, name: bytes | None, statement: Statement | None = None) -> bool:
    """Whether what makes or closes this name of the client's, or this statement of the session, belongs to a
    group that may yet fail, not to the one being sent."""
    young, group = server.statements.young, server.statements.group
    if (name not in young and statement not in young) or server.copy_in:
        return False
    if young.get(name) == group or young.get(statement) == group:
        return False
    ended = False
    for entry in reversed(server.owed):
        if type(entry) is int:
            ended = ended or entry == o.SYNC
        elif entry.is_about(name, statement):
            return ended
    young.pop(name, None)  # it is answered
    young.pop(statement, None)
    return False


def _sent(server: ServerConn, which: Statement | bytes) -> None:
    """A message that is put on its way makes or closes it. Who never lets everything be answered is
    remembered no more of than what is not."""
    young, owed = server.statements.young, server.owed
    young[which] = server.statements.group
    if len(young) > YOUNG_MAX and len(young) > 4 * len(owed):
        unanswered: set[Statement | bytes | None] = {which}
        for entry in owed:
            if type(entry) is not int:
                unanswered.update((getattr(entry, "name", None), getattr(entry, "statement", None)))
        for each in young.keys() - unanswered:
            del young[each]


def _instead(server: ServerConn) -> bytes:
    """What to send for a message that the pooler answers itself: nothing, but where COPY IN may have begun.
    That is broken off by any other message, and so it was where one has been answered so."""
    for entry in reversed(server.owed):
        if entry == o.EXECUTE or entry == o.QUERY or entry == o.FUNCTION:
            server.owed.append(o.Closed(None))
            return close_statement(STAND_IN)
        if entry != o.SYNC and (type(entry) is not o.Told or entry.answer or entry is o.COPY_ENDED):
            break
    return b""


def drop_unnamed(client: ClientConn, server: ServerConn) -> None:
    """What is sent next drops the unnamed statement. If it is skipped after an error, that is there still."""
    server.statements.unnamed = None
    if client.statements is not None:
        if server.owed:  # what there is then to be dropped may yet be another
            if (closed := client.statements.get(b"")) is not None:
                _sent(server, b"")
            server.owed.append(o.Told(b"", b"", closed))
        client.statements.close(b"")


def stand_in(server: ServerConn) -> bytes:
    """What to send in front of what is about the stand-in: a statement that is there under its own name."""
    server.owed.append(o.Closed(None))
    server.owed.append(o.Parsed(_NOBODY, b"", False, named=False))
    return prepare_stand_in()


def _describe(client: ClientConn, server: ServerConn, message: bytes) -> bytes | None:
    what, name = describe_target(message, 5)
    if what == b"P":
        server.owed.append(o.DESCRIBE)
        return None
    statement = client.statements.get(name) if client.statements is not None else None
    if server.statements.young and is_unsettled(server, name, statement):
        return WAIT
    before = _ready_for(server, name, statement)
    server.owed.append(o.DESCRIBE)
    if statement is not None and name:
        return before + describe_statement(statement.server_name)
    if name.startswith(OWN_NAMES):
        return describe_statement(b"_" + name)
    return before + message if before else None


def _close(client: ClientConn, server: ServerConn, message: bytes) -> bytes | None:
    what, name = describe_target(message, 5)
    if what == b"S" and name:
        if is_unsettled(server, name):
            return WAIT
        statement = client.statements.get(name) if client.statements is not None else None
        if statement is not None:
            client.prepared().close(name)
        if statement is not None or name.startswith(OWN_NAMES):
            before = _instead(server)
            _sent(server, name)
            server.owed.append(o.Told(o.CLOSE_COMPLETE, name, statement))
            return before
    elif what == b"S":
        drop_unnamed(client, server)
    server.owed.append(o.CLOSE)
    return None


def _ready_for(server: ServerConn, name: bytes, statement: Statement | None) -> bytes:
    """What to send first so that the session has what `name` means to the client."""
    if name:
        return b"" if statement is None else _ensure(server, statement)
    if statement is server.statements.unnamed:
        return b""
    server.statements.unnamed = statement
    if statement is None:  # somebody else's unnamed statement is there: it must not be found
        server.owed.append(o.Closed(None))
        return close_statement(b"")
    server.pool.server_parses += 1
    _sent(server, statement)
    server.owed.append(o.Parsed(statement, b"", False, named=False))
    return parse_message(statement, b"")


def _ensure(server: ServerConn, statement: Statement) -> bytes:
    if server.statements.touch(statement):
        return b""
    before = _make_room(server, statement)
    server.pool.server_parses += 1
    server.owed.append(o.Parsed(statement, b"", False))
    return before + parse_message(statement)


def _make_room(server: ServerConn, statement: Statement) -> bytes:
    evicted = server.statements.add(statement)
    server.owed.extend(o.Closed(old) for old in evicted)
    return b"".join(close_statement(old.server_name) for old in evicted)
