"""Session pooling: after a RESET a client has what it started with, as with a session opened for it alone.

A session is opened with nothing of any client's, so that a RESET brings back the server's own values. What is
set on the session then is asked for, as between two clients, and what the client gave at its start and has
not set otherwise since is set again. In front of whatever it sends next; inside a transaction block, and
behind what was sent along with the RESET, the server's values are seen until the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pooler.relay.answers import IDLE
from pooler.relay.keeping import tell_news, warn
from pooler.wire.session_state import Residue
from pooler.wire.state_question import question, read_answer

if TYPE_CHECKING:
    from pooler.relay.server import ServerConn

RESETS = int(Residue.RESETS)


def regain(server: ServerConn, client: Any) -> None:
    """Something of this client's session was reset, and nothing runs there: see to what it started with."""
    server.residue &= ~RESETS
    client.pause(True)
    server.own_rows = []
    asked = question(server.pool.custom_names, 0)
    server.write(server.run_own([asked], lambda ok: _told(server, client, ok)))


def _told(server: ServerConn, client: Any, ok: bool) -> None:
    rows, server.own_rows = server.own_rows, None
    if client.server is not server:
        return
    if not ok or server.status != IDLE:
        warn(client, "what was set at the start is not there again: " + server.own_fault())
        client.pause(False)
        return
    found = read_answer(rows or [], server.pool.plan.user.encode()).settings
    server.parameters = server.parameters.with_settings(found)
    before, client.parameters = client.parameters, server.parameters.again(
        client.started, server.fresh, found)
    tell_news(client, before)
    fit_again(server, client)


def fit_again(server: ServerConn, client: Any) -> None:
    """The session of a client that keeps it gets what the client has; what it sends next goes on behind."""
    client.pause(True)
    client.fitting = True
    if server.fit(client) and client.server is server:
        client.fitted()
