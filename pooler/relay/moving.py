"""A client between two transactions, taken out of one process and put into another with all that it is.

Its socket goes by SCM_RIGHTS; what it has set and prepared, how it may log in to servers and its cancel key
go as bytes. A client that holds a session, waits, has half a message here or is encrypted stays where it is.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack

from pooler.relay.client import ClientConn
from pooler.wire.auth import ServerSecret
from pooler.wire.parameters import ParameterSet, TrackedParameters
from pooler.wire.scram import Keys

if TYPE_CHECKING:
    from pooler.pool.pool import Pool

Values = tuple[tuple[bytes | None, ...], int, tuple[tuple[bytes, bytes], ...]]


@dataclass(frozen=True, slots=True)
class Moved:
    """What a client is, its socket apart. `name` and `user` as it asked; secrets are in no repr."""

    name: str
    user: str
    address: str
    cancel_key: bytes = field(repr=False)
    secret: ServerSecret = field(repr=False)
    parameters: Values
    started: Values
    asked: tuple[str, str, float, str, tuple[str, ...]]
    asks: tuple[str, str, float, str]
    application_name: str
    statements: tuple[tuple[bytes, bytes, bytes | None], ...] = field(repr=False)

    def encode(self) -> bytes:
        """For the socket between the two."""
        keys = self.secret.keys
        packed: bytes = msgpack.packb([
            self.name, self.user, self.address, self.cancel_key, self.secret.plain, self.secret.md5,
            None if keys is None else [keys.client_key, keys.server_key], self.parameters, self.started,
            self.asked, self.asks, self.application_name, self.statements])
        return packed

    @classmethod
    def decode(cls, raw: bytes) -> Moved:
        """The inverse. Raises ValueError for anything else."""
        (name, user, address, key, plain, md5, keys, parameters, started, asked, asks, application_name,
         statements) = msgpack.unpackb(raw, use_list=False)
        secret = ServerSecret(plain, md5, None if keys is None else Keys(*keys))
        return cls(name, user, address, key, secret, parameters, started, asked, asks, application_name,
                   statements)


def may_move(client: ClientConn) -> bool:
    """Whether nothing of it is under way here."""
    busy: tuple[Any, ...] = (
        client.server, client.ticket.waiting, client.buffer, client.missing, client.unsent, client.out,
        client.dropping, client.skip, client.skip_to_sync, client.fitting, client.tail, client.closing,
        client.own, client.named)
    return not is_encrypted(client) and not any(busy)


def is_encrypted(client: ClientConn) -> bool:
    """Whether its socket is more than what the kernel has of it."""
    return type(client.sock) is not socket.socket


def take_out(client: ClientConn, user: str) -> Moved:
    """The reactor and the pool forget it; its socket is the caller's, open."""
    statements = client.statements
    moved = Moved(
        client.pool.plan.name, user, client.address, client.cancel_key, client.pool.plan.secret,
        _values(client.parameters), _values(client.started),
        (*client.asked[:4], tuple(client.asked.fixed)),
        (client.tenant, client.klass, client.deadline_seconds, client.ticket_id), client.application_name,
        () if statements is None else tuple(statements.all()))
    client.closing = True
    client.reactor.remove(client.fd)
    client.fd = -1
    if statements is not None:
        statements.clear()
    client.pool.client_closed(client)
    return moved


def put_in(client: ClientConn, moved: Moved, tracked: TrackedParameters) -> None:
    """Give a client that was just made what it had, and let it go on."""
    client.parameters = parameters_of(moved.parameters, tracked)
    client.started = parameters_of(moved.started, tracked)
    client.tenant, client.klass, client.deadline_seconds, client.ticket_id = moved.asks
    client.identify()
    for name, body, path in moved.statements:
        client.prepared().add(name, body, path)
    client.start(b"")


def parameters_of(values: Values, tracked: TrackedParameters) -> ParameterSet:
    """The set of these values; with other names tracked than there, what both know."""
    if len(values[0]) != len(tracked.names):
        return tracked.empty
    return tracked.intern(*values)


def _values(parameters: ParameterSet) -> Values:
    return parameters.values, parameters.told, parameters.extra


def change_pool(client: ClientConn, new: Pool) -> bool:
    """Serve a client from another pool of the same database and user from now on; False while it holds a
    session of the old one. A wait goes on, in the new pool's queue."""
    old = client.pool
    if client.server is not None or client.closing:
        return False
    waits = old.withdraw(client.ticket)
    old.promises.forget(client.ticket)
    old.clients.discard(client)
    old.pinned.discard(client)
    client.pool, client.holds = new, new.holds_session
    client.identify()
    new.clients.add(client)
    if waits:
        data, client.buffer = client.buffer, b""
        client.pause(False)
        client._resume(data)  # as if it had just asked
    return True
