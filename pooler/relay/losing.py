"""What a client hears when its session goes away under it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pooler.errors import BackendLost, OutcomeUnknown, PoolerError
from pooler.relay.answers import IDLE
from pooler.relay.owed import COPY_ENDED
from pooler.relay.parting import go, part
from pooler.relay.refusal import hint_for, refuse_owed
from pooler.wire.prepared import COMMITS

if TYPE_CHECKING:
    from pooler.relay.client import ClientConn
    from pooler.relay.server import ServerConn

REFITS_MAX = 3


def session_lost(client: ClientConn, server: ServerConn, fatal: bytes) -> None:
    """`fatal`: the server's last word, which was passed on."""
    client.server = None
    client.ticket.release()
    client.pause(False)
    is_used = client.holds and client.proven  # it is fitted again behind a RESET, and had this client's state
    if client.fitting and not is_used:  # it has seen nothing of it: another session will do, but not for ever
        client.fitting, client.refits = False, client.refits + 1
        if client.refits <= REFITS_MAX:
            client.ticket.is_prepaid = True
            client.resume_elsewhere()
        else:
            client.break_off("08006", "session after session ended as it was given this client's settings")
        return
    if server.skip:  # half a message was passed on: whatever were said now would be taken for the rest of it
        go(client, b"")
        return
    if fatal:  # the server's own last word was passed on: end as it would have ended
        part(client, b"")
        return
    ends = _may_end(client, server)
    error: PoolerError
    if is_outcome_unknown(client, server):
        error = OutcomeUnknown("the server went away before it answered: look the outcome up")
    else:
        error = BackendLost(
            "the server went away during the transaction, which is rolled back", in_transaction=True)
    if client.holds or (server.status != IDLE and not ends):
        # what the client sends next belongs to a transaction, or to a session's state, that is gone: it must
        # not run without it
        client.break_off(error.sqlstate, str(error), hint_for(client, error))
    else:
        for entry in reversed(server.owed):
            if type(entry) is not int and entry is not COPY_ENDED:
                client.did_not_happen(entry)
        refuse_owed(client, error, server)
        client.go_on()


def _may_end(client: ClientConn, server: ServerConn) -> bool:
    """Whether what is unanswered may end a transaction."""
    return bool(server.owed) and (server.commits or COMMITS.search(client.last_sent) is not None)


def is_outcome_unknown(client: ClientConn, server: ServerConn) -> bool:
    """Whether what the session was asked, and did not answer, may be committed."""
    return (server.status == IDLE and bool(server.owed)) or _may_end(client, server)
