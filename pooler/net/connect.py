"""A connected socket to a server, over TCP or a unix socket.

Tries the addresses of a name in the resolver's order. No timeout of its own.
"""

from __future__ import annotations

import os
import socket

import trio

from pooler.net.names import addresses_of
from pooler.net.stream import Broken


async def connect(host: str, port: int) -> socket.socket:
    """A connected, non-blocking socket to the first address that answers; a `host` that begins with a slash
    is the directory of a unix socket. Raises Broken with the reason of the last address tried."""
    if host.startswith("/"):
        return await _connect_one(socket.AF_UNIX, f"{host}/.s.PGSQL.{port}")
    failed = Broken("the name has no address")
    for family, address in await addresses_of(host, port):
        try:
            return await _connect_one(family, address)
        except Broken as broken:
            failed = broken
    raise failed


async def _connect_one(family: int, address: object) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await _finish_connect(sock, address)
    except OSError as fault:
        sock.close()
        raise Broken(f"cannot connect: {(fault.strerror or str(fault)).lower()}") from fault
    except BaseException:
        sock.close()
        raise
    return sock


async def _finish_connect(sock: socket.socket, address: object) -> None:
    try:
        sock.connect(address)  # type: ignore[arg-type]
    except BlockingIOError:
        if sock.family == socket.AF_UNIX:
            raise  # the server's backlog is full, and nothing tells when it no longer is
        await trio.lowlevel.wait_writable(sock)
        fault = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if fault:
            raise OSError(fault, os.strerror(fault)) from None
    await trio.lowlevel.checkpoint()
    if sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
        # the kernel chose the port dialled as our own: nobody listens there, we would talk to ourselves
        raise OSError("the socket is connected to itself")
