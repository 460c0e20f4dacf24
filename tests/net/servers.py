"""Scripted servers: each way of letting a client in, as a script for one connection."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from pooler.net.dial import Target
from pooler.wire import messages
from pooler.wire.auth import ServerSecret, md5_answer, md5_secret
from pooler.wire.messages import Fault
from pooler.wire.scram import ServerExchange, Verifier
from tests.net.wires import Peer

VERIFIER = Verifier.derive(b"pw", b"saltsaltsalt")
GREETING = b"".join([
    messages.AUTHENTICATION_OK,
    messages.notice_response(Fault("NOTICE", "00000", "hello")),
    messages.parameter_status("server_version", "18.1"),
    messages.backend_key_data(b"\0\0\x01\0" + b"k" * 32),
    messages.ready_for_query(),
])
FULL = messages.error_response(Fault("FATAL", "53300", "sorry, too many clients already"))

Script = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def server_doing(script: Script) -> AsyncIterator[Target]:
    """A server on loopback that does `script` for each connection and then closes it."""
    with socket.create_server(("127.0.0.1", 0)) as plain:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(plain))

        async def serve(stream: trio.SocketStream) -> None:
            try:
                await script(Peer(stream))
            except (trio.BrokenResourceError, AssertionError):
                return  # the other side went away, as some tests want

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, serve, [listener])
            port = plain.getsockname()[1]
            yield Target("127.0.0.1", port, "ann", "db", "pooler:tag:m1.2", ServerSecret(plain=b"pw"))
            nursery.cancel_scope.cancel()


async def trusting(peer: Peer) -> None:
    await peer.read_packet()
    await peer.send(GREETING)
    await peer.stream.receive_some()


async def asking_md5(peer: Peer) -> None:
    await peer.read_packet()
    await peer.send(messages.parameter_status("early", "1") + messages.authentication_md5(b"salt"))
    assert (await peer.frame()).body == md5_answer(md5_secret(b"pw", "ann"), b"salt") + b"\0"
    await peer.send(GREETING)
    await peer.stream.receive_some()


async def asking_cleartext(peer: Peer) -> None:
    await peer.read_packet()
    await peer.send(messages.AUTHENTICATION_CLEARTEXT)
    assert (await peer.frame()).body == b"pw\0"
    await peer.send(GREETING)
    await peer.stream.receive_some()


async def asking_scram(peer: Peer) -> None:
    await peer.read_packet()
    await peer.send(messages.authentication_sasl(["SCRAM-SHA-256-PLUS", "SCRAM-SHA-256"]))
    exchange = ServerExchange(nonce="servernonce", salt=VERIFIER.salt, iterations=VERIFIER.iterations)
    first = (await peer.frame()).body.split(b"\0", 1)[1][4:]
    await peer.send(messages.authentication_sasl_continue(exchange.first(first)))
    proven = exchange.final((await peer.frame()).body, VERIFIER)
    assert proven is not None
    await peer.send(messages.authentication_sasl_final(proven[0]) + GREETING)
    await peer.stream.receive_some()


WAYS = [trusting, asking_md5, asking_cleartext, asking_scram]
