"""`currval` and `lastval` outside the transaction that called `nextval`: an error, never somebody else's.

What sequences gave last is a session's own, and no tag or text tells which transaction has it changed (a
column's default does). So a transaction that begins by asking for it asks a session that remembers nothing,
and is told 55000 as on a session that never called `nextval`.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from pooler.relay import owed as o
from pooler.wire.prepared import Statement, bind_names, describe_target, parse_message, parse_name_body
from pooler.wire.session_state import Residue

if TYPE_CHECKING:
    from pooler.relay.client import ClientConn
    from pooler.relay.server import ServerConn

SEQUENCES: Final = int(Residue.SEQUENCES)
LEAKS: Final = frozenset({"allow", "warn"})
IDLE, QUERY, PARSE, BIND, DESCRIBE, CLOSE = 0x49, 0x51, 0x50, 0x42, 0x44, 0x43
_length_at = Struct(">I").unpack_from


def forget_sequences(client: ClientConn, server: ServerConn, data: bytes, *, begins: bool) -> None:
    """`data` is about to be sent, and asks for what a sequence gave last. `begins`: nothing was sent before
    it in its transaction."""
    server.residue &= ~SEQUENCES
    if not begins or client.holds or server.status != IDLE or client.pool.state_rule in LEAKS:
        return
    unnamed, first, again = server.statements.unnamed, _first_of_unnamed(data), b""
    if first == BIND or first == DESCRIBE:
        found = _as_found(server)
        if found is not None:
            server.owed.appendleft(o.Parsed(found, b"", False, named=False))
            again = parse_message(found, b"")
    server.write(server.run_own([b"DISCARD SEQUENCES"], server.own_done) + again)
    server.statements.unnamed = unnamed if first else None


def _first_of_unnamed(data: bytes) -> int:
    """The kind of the first message that uses, replaces or drops the unnamed statement; 0 if none does."""
    at, size = 0, len(data)
    while size - at >= 5:
        kind = data[at]
        name = b"portal"
        if kind == PARSE:
            name = parse_name_body(data, at + 5)[0]
        elif kind == BIND:
            name = bind_names(data, at + 5)[1]
        elif kind == DESCRIBE or kind == CLOSE:
            what, target = describe_target(data, at + 5)
            name = target if what == b"S" else name
        if kind == QUERY or not name:
            return kind
        at += 1 + _length_at(data, at + 1)[0]
    return 0


def _as_found(server: ServerConn) -> Statement | None:
    """The unnamed statement that the session had before what is about to be sent."""
    for entry in server.owed:
        if type(entry) is o.Parsed and entry.forward and not entry.named:
            return entry.before
        if type(entry) is o.Told and entry.drops_unnamed:
            return entry.closed
    return server.statements.unnamed
