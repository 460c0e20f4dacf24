"""How replication connections look in SHOW CLIENTS and SHOW SERVERS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pooler.net.tls import tls_text
from pooler.observe import snapshot as s
from pooler.serve.replication import ReplicationClient
from pooler.wire.startup import Replication

if TYPE_CHECKING:
    import socket

    from pooler.serve.registry import Registry

KINDS = {Replication.PHYSICAL: "physical", Replication.LOGICAL: "logical"}  # as PgBouncer shows them
ClockUs = Callable[[float], int]
"""Seconds of the monotonic clock as microseconds since 1970."""


def client_rows(registry: Registry, clock_us: ClockUs) -> Iterator[s.ClientRow]:
    """Each client."""
    for each in registry.replications.values():
        host, _, port = each.address.rpartition(":")
        sock = each.client.plain
        yield s.ClientRow(
            user=each.plan.user, database=each.plan.name, state="active", address=host, port=int(port or 0),
            **_ends(sock), connected_at_us=clock_us(each.connected_at),
            requested_at_us=clock_us(each.connected_at), pointer=f"{id(each):#x}",
            link=f"{id(each.server):#x}", tls=tls_text(sock), replication=KINDS[each.kind],
            application_name=each.application_name, id=registry.numbers.number(each))


def server_rows(registry: Registry, clock_us: ClockUs) -> Iterator[s.ServerRow]:
    """Each session."""
    for each in registry.replications.values():
        host, _, port = each.opened.backend.address.rpartition(":")
        sock = each.opened.sock
        yield s.ServerRow(
            user=each.plan.user, database=each.plan.name, state="active", address=host, port=int(port or 0),
            **_ends(sock), connected_at_us=clock_us(each.connected_at), pointer=f"{id(each.server):#x}",
            link=f"{id(each):#x}", remote_pid=each.opened.pid, tls=tls_text(sock),
            replication=KINDS[each.kind], application_name=shown_name(each), permit=str(each.permit),
            epoch=each.opened.epoch, id=id(each.server) & 0x7FFFFFFF)


def shown_name(client: ReplicationClient) -> str:
    """The `application_name` that the server was told at the login."""
    return client.opened.parameters.get(b"application_name", b"").decode(errors="replace")


def _ends(sock: socket.socket) -> dict[str, Any]:
    name = sock.getsockname() if sock.fileno() >= 0 else ("", 0)
    host, port = name[:2] if isinstance(name, tuple) else ("unix", 0)
    return {"local_address": str(host), "local_port": int(port)}
