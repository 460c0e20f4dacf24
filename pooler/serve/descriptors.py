"""SHOW FDS: the sockets this worker has open, by their descriptors.

PgBouncer's online restart reads passwords and cancel keys from there; ours hands sockets over by itself, so
that none is shown to anybody.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from typing import Any

from pooler.relay.client import ClientConn
from pooler.relay.server import ServerConn
from pooler.serve.registry import Registry

Row = dict[str, Any]
_PARAMETERS = {"client_encoding": b"client_encoding", "std_strings": b"standard_conforming_strings",
               "datestyle": b"DateStyle", "timezone": b"TimeZone"}


def descriptor_rows(registry: Registry, listening: Iterable[socket.socket]) -> Iterator[Row]:
    """Listening sockets (`pooler`), then clients and sessions; `link` is the descriptor of the other end."""
    for sock in listening:
        name = sock.getsockname()
        host, port = name[:2] if isinstance(name, tuple) else ("unix", _port_of(str(name)))
        yield {"fd": sock.fileno(), "task": "pooler", "addr": host, "port": port, "cancel": 0, "link": 0}
    for pool in registry.pools.values():
        for client in pool.clients:
            linked = client.server
            yield _row(client, "client", 0 if linked is None else linked.fd, client.address)
    for server in registry.parts.servers:
        if not server.closing:
            linked_to = server.client.fd if isinstance(server.client, ClientConn) else 0
            yield _row(server, "server", linked_to, server.opened.backend.address)


def _row(end: ClientConn | ServerConn, task: str, link: int, address: str) -> Row:
    host, _, port = address.rpartition(":")
    said = {column: end.parameters.get(name) for column, name in _PARAMETERS.items()}
    return {
        "fd": end.fd, "task": task, "user": end.pool.plan.user, "database": end.pool.plan.name,
        "addr": host, "port": int(port or 0), "cancel": 0, "link": link,
        **{column: None if value is None else value.decode(errors="replace")
           for column, value in said.items()}}


def _port_of(path: str) -> int:
    port = path.rpartition(".")[2]
    return int(port) if port.isdigit() else 0
