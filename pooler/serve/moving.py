"""Clients on their way from a worker that leaves to its successor: one connection, a client a message.

A message is a length, with the client's descriptor beside it, and what the client is. The successor answers
each with one byte: seated or not; one that it cannot seat is closed there.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

import structlog
import trio

from pooler.errors import PoolerError
from pooler.net.client_count import ClientCount
from pooler.observe.events import Event
from pooler.pool.pool import IDLE
from pooler.relay.asking import Asked
from pooler.relay.client import ClientConn
from pooler.relay.moving import Moved, is_encrypted, may_move, parameters_of, put_in, take_out
from pooler.serve.drain import end_streams
from pooler.serve.registry import Registry
from pooler.wire.parameters import TrackedParameters

LENGTH = struct.Struct("!I")
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
LOOK_SECONDS = 0.05
SEATED, REFUSED = b"s", b"r"
ENCRYPTED = "the pooler restarts, and an encrypted connection cannot move to the new process: connect again"

log = structlog.get_logger()


async def move_clients(registry: Registry, to: Path) -> None:
    """Send every client over as soon as it may move; returns when none is left. One that is encrypted cannot:
    its keys are in this process, and it is told to connect again. Raises OSError when the successor is not
    there: then those that are left stay."""
    with trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM) as stream:
        await stream.connect(str(to))
        while registry.clients:
            for client in list(registry.clients.values()):
                if may_move(client):
                    await _send(stream, client, registry)
                elif is_encrypted(client) and _is_between(client):
                    client.break_off("57P01", ENCRYPTED)
            end_streams(registry)
            await trio.sleep(LOOK_SECONDS)  # noqa: TID251 - transactions end in the reactor, unheard


def _is_between(client: ClientConn) -> bool:
    """Two transactions, whether it holds a session meanwhile or not."""
    server = client.server
    busy = server is not None and (server.owed or server.unsynced or server.status != IDLE)
    return not (busy or client.ticket.waiting or client.buffer or client.missing)


async def _send(stream: trio.socket.SocketType, client: ClientConn, registry: Registry) -> None:
    user = next((key.user for key, pool in registry.pools.items() if pool is client.pool), "")
    sock = client.sock
    body = take_out(client, user).encode()
    try:
        await stream.sendmsg(
            [LENGTH.pack(len(body))],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", sock.fileno()))])
        sent = 0
        while sent < len(body):
            sent += await stream.send(body[sent:])
        if not await stream.recv(1):
            raise ConnectionResetError("the successor left")
    finally:
        sock.close()


class Arrivals:
    """Takes the clients of a predecessor in."""

    def __init__(
        self, registry: Registry, count: ClientCount, tracked: TrackedParameters, path: Path
    ) -> None:
        self._registry = registry
        self._count = count
        self._tracked = tracked
        self._path = path

    async def serve(self) -> None:
        """Until cancelled. Only this user can reach the run directory."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with suppress(FileNotFoundError):
            self._path.unlink()
        listener.bind(str(self._path))
        os.chmod(self._path, 0o600)
        listener.listen(4)
        accepting = trio.socket.from_stdlib_socket(listener)
        async with trio.open_nursery() as nursery:
            while True:
                stream, _ = await accepting.accept()
                nursery.start_soon(self._take_all, stream)

    async def _take_all(self, stream: trio.socket.SocketType) -> None:
        with stream, suppress(OSError):
            while (found := await _receive(stream)) is not None:
                descriptor, body = found
                await stream.send(SEATED if self._seat(socket.socket(fileno=descriptor), body) else REFUSED)

    def _seat(self, sock: socket.socket, body: bytes) -> bool:
        """Whatever max_client_conn says: it was let in."""
        try:
            moved = Moved.decode(body)
            registry = self._registry
            pool = registry.pool(moved.name, moved.user, None, moved.secret)
            sock.setblocking(False)
            client = ClientConn(
                registry.parts.reactor, pool, sock, moved.address, moved.cancel_key,
                parameters_of(moved.parameters, self._tracked), moved.application_name,
                Asked(*moved.asked[:4], frozenset(moved.asked[4])))
        except (PoolerError, ValueError, KeyError, TypeError) as fault:
            log.error(Event.SOMETHING_FAILED, what="a client could not be taken over", why=str(fault))
            sock.close()
            return False
        self._count.enter_always()
        registry.admit_always(moved.name, moved.user)
        pool.clients.add(client)
        registry.entered(client)
        put_in(client, moved, self._tracked)
        return True


async def _receive(stream: trio.socket.SocketType) -> tuple[int, bytes] | None:
    head, ancillary, _, _ = await stream.recvmsg(LENGTH.size, socket.CMSG_SPACE(4))
    if not head:
        return None
    descriptors = [struct.unpack("i", data[:4])[0] for level, kind, data in ancillary
                   if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)]
    (size,) = LENGTH.unpack(head)
    if len(descriptors) != 1 or size > MESSAGE_BYTES_MAX:
        raise OSError("not a client")
    body = bytearray()
    while len(body) < size:
        more = await stream.recv(size - len(body))
        if not more:
            os.close(descriptors[0])
            return None
        body += more
    return descriptors[0], bytes(body)


def arrivals_path(run_dir: Path, index: int) -> Path:
    """Where worker `index` of a fleet takes clients in."""
    return run_dir / f"moving-{index}.sock"
