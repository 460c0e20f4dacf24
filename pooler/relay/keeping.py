"""A client that keeps its session while there is state on it, and what clients are told about their state."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from pooler.relay.parting import part
from pooler.wire.messages import Fault, error_response, notice_response, parameter_status

if TYPE_CHECKING:
    from pooler.relay.client import ClientConn
    from pooler.relay.server import ServerConn
    from pooler.wire.parameters import ParameterSet


def pin(client: ClientConn, server: ServerConn) -> None:
    """Give a client the session that it has just given back, until it leaves or its state is gone."""
    now = monotonic()
    client.pool.pinned.add(client)
    client.holds = True
    client.ticket.start(now, float("inf"))
    client.ticket.bind(server)
    client.server, server.client = server, client
    server.started_at = server.last_used = now
    if server.row is not None:
        server.row.busy(client.pool.next_ticket(), client.who, int(now * 1e6))


def unpin(client: ClientConn) -> None:
    """It is a client like any other again."""
    client.pool.pinned.discard(client)
    client.holds = client.pool.holds_session


def refuse_to_pin(client: ClientConn) -> None:
    """No session more may be kept: what the client left on one cannot be, and it has to know."""
    limit = client.pool.plan.settings.max_pinned
    part(client, error_response(Fault(
        "FATAL", "53400", f"{limit} clients keep a session of their own already (max_pinned)",
        hint="Session state lasts beyond a transaction here only while a session can be kept for it.")))


def tell_news(client: ClientConn, before: ParameterSet) -> None:
    """What it was last told of its parameters was `before`: say what is otherwise now."""
    for name, value in client.parameters.items():
        if before.get(name) != value:
            client.deliver(parameter_status(name, value))


def warn(client: ClientConn, text: str) -> None:
    """Something that it has set will not be there."""
    client.deliver(notice_response(Fault("WARNING", "01000", text)))


def warn_of(client: ClientConn, kinds: tuple[str, ...]) -> None:
    """`session_state: warn`: one notice for each kind of state and client."""
    for kind in kinds:
        if kind not in client.warned:
            client.warned = (*client.warned, kind)
            client.deliver(notice_response(Fault(
                "NOTICE", "01000", f"session state ({kind}) stays on the server session, for others too",
                hint="With transaction pooling the next transaction may run on another session.")))


