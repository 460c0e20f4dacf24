"""`currval` and `lastval` outside the transaction that called `nextval`: an error, never somebody else's.

What sequences gave last is a session's own, and no tag or text tells which transaction has it changed (a
column's default does). So a transaction that begins by asking for it asks a session that remembers nothing,
and is told 55000 as on a session that never called `nextval`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pooler.wire.prepared import bind_names, parse_name_body
from pooler.wire.session_state import Residue

if TYPE_CHECKING:
    from pooler.relay.client import ClientConn
    from pooler.relay.server import ServerConn

SEQUENCES: Final = int(Residue.SEQUENCES)
LEAKS: Final = frozenset({"allow", "warn"})
IDLE, PARSE, BIND = 0x49, 0x50, 0x42


def forget_sequences(client: ClientConn, server: ServerConn, data: bytes, *, begins: bool) -> None:
    """`data` is about to be sent, and asks for what a sequence gave last. `begins`: nothing was sent before
    it in its transaction."""
    server.residue &= ~SEQUENCES
    if not begins or client.holds or server.status != IDLE or client.pool.state_rule in LEAKS:
        return
    unnamed = server.statements.unnamed  # dropped by what is sent now, but prepared behind it by `data`
    prepares = data[0] == PARSE and not parse_name_body(data, 5)[0]
    if data[0] == BIND and not bind_names(data, 5)[1]:
        return  # the statement itself would be dropped
    done = server.own_done
    server.write(server.run_own([b"DISCARD SEQUENCES"], done))
    server.statements.unnamed = unnamed if prepares else None
