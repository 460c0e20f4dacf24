"""Handshakes are calculated beside the loop: whoever is served goes on, however many there are."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pooler.errors import LoginRefused
from pooler.net.handshake import THREADS, HandshakeFailed, HandshakeLeft, accept_tls
from pooler.net.login import refuse
from pooler.net.stream import PeerGone, RawSocket
from pooler.net.tls import TlsSocket
from pooler.net.tls_context import ClientTls
from tests.net.tls_wires import clients, servers
from tests.net.wires import tcp_pair


@dataclass
class Gate:
    """Stops OpenSSL in the middle of a handshake, in whichever thread it is, until it is opened."""

    opened: threading.Event = field(default_factory=threading.Event)
    inside: int = 0
    most: int = 0
    entered: trio.Event = field(default_factory=trio.Event)

    def hold(self, token: trio.lowlevel.TrioToken) -> ClientTls:
        """A context whose handshakes are stopped."""
        tls = clients()

        def stop(_: object, name: str | None, __: object) -> None:
            self.inside += 1
            self.most = max(self.most, self.inside)
            token.run_sync_soon(self.entered.set)
            assert self.opened.wait(20)
            self.inside -= 1

        tls.context.sni_callback = stop
        return tls


@contextmanager
def accepted() -> Iterator[tuple[RawSocket, TlsSocket]]:
    """(our end, a client's end whose first message has been sent)."""
    one, other = tcp_pair()
    raw = RawSocket(one)
    other.setblocking(False)
    client = TlsSocket.over(other, servers().context, server_side=False, server_hostname="db.test")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    try:
        yield raw, client
    finally:
        raw.close()
        client.close()


async def finish(client: TlsSocket) -> None:
    while True:
        try:
            client.do_handshake()
            return
        except ssl.SSLWantReadError:
            await trio.lowlevel.wait_readable(client)


async def test_a_handshake_that_calculates_stops_nobody_else() -> None:
    gate = Gate()
    tls = gate.hold(trio.lowlevel.current_trio_token())
    with accepted() as (raw, client):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept_tls, raw, tls)
            with trio.fail_after(10):
                await gate.entered.wait()  # this task runs on, though OpenSSL stands still
            assert raw.tls is None
            gate.opened.set()
            await finish(client)
        assert raw.tls is not None
        client.send(b"hello")
        assert await raw.recv() == b"hello"


async def test_only_a_few_calculate_at_once() -> None:
    gate = Gate()
    tls = gate.hold(trio.lowlevel.current_trio_token())
    pairs = [accepted() for _ in range(3 * THREADS)]
    entered = [pair.__enter__() for pair in pairs]
    async with trio.open_nursery() as nursery:
        for raw, _ in entered:
            nursery.start_soon(accept_tls, raw, tls)
        await wait_all_tasks_blocked(0.05)
        assert gate.inside == THREADS
        gate.opened.set()
        for _, client in entered:
            await finish(client)
    assert gate.most == THREADS
    for pair in pairs:
        pair.__exit__(None, None, None)


async def test_one_that_is_cancelled_while_it_waits_for_its_turn_is_gone_at_once() -> None:
    gate = Gate()
    tls = gate.hold(trio.lowlevel.current_trio_token())
    busy = [accepted() for _ in range(THREADS)]
    ends = [pair.__enter__() for pair in busy]
    async with trio.open_nursery() as nursery:
        for raw, _ in ends:
            nursery.start_soon(accept_tls, raw, tls)
        await wait_all_tasks_blocked(0.05)
        with accepted() as (raw, _), trio.move_on_after(0.01) as scope:
            await accept_tls(raw, tls)
        assert scope.cancelled_caught
        gate.opened.set()
        for _, client in ends:
            await finish(client)
    for pair in busy:
        pair.__exit__(None, None, None)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b""])
async def test_who_does_not_speak_tls_fails_with_a_reason(sent: bytes) -> None:
    one, other = tcp_pair()
    raw = RawSocket(one)
    other.sendall(sent)
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(HandshakeFailed, match=r"^TLS handshake failed: \w+"):
        await accept_tls(raw, clients())
    raw.close()
    other.close()


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02"])
@pytest.mark.parametrize("reset", [False, True])
async def test_who_goes_away_without_a_word_is_told_from_who_does_it_wrong(sent: bytes, reset: bool) -> None:
    """R48: a probe."""
    one, other = tcp_pair()
    raw = RawSocket(one)
    other.sendall(sent)
    if reset:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    other.close()
    with pytest.raises(HandshakeLeft):
        await accept_tls(raw, clients())
    raw.close()


async def test_a_connection_that_was_reset_before_is_a_failed_handshake() -> None:
    one, other = tcp_pair()
    raw = RawSocket(one)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    other.close()
    with pytest.raises(HandshakeFailed):
        await accept_tls(raw, clients())
    raw.close()


async def test_a_client_whose_handshake_came_to_no_end_is_told_nothing_and_costs_nothing() -> None:
    with accepted() as (raw, _):
        with trio.move_on_after(0.1):
            await accept_tls(raw, clients())
        assert raw.is_shaking_hands
        with trio.fail_after(1):  # less than a farewell may take
            await refuse(raw, LoginRefused("client_login_timeout"))
        with pytest.raises(trio.ClosedResourceError):
            await raw.recv()


async def test_an_end_in_order_and_a_lost_connection_are_told_apart_after_a_handshake() -> None:
    for loses in (False, True):
        with accepted() as (raw, client):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(accept_tls, raw, clients())
                await finish(client)
            if loses:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                client.close_silently()
                with pytest.raises(PeerGone):
                    await raw.recv_some()
            else:
                client.close()
                assert await raw.recv() == b""


async def test_a_peer_learns_the_end_before_the_connection_is_aborted_or_closed() -> None:
    """A close says close_notify; an abort is a reset and nothing else."""
    for end in (RawSocket.close, RawSocket.abort):
        with accepted() as (raw, client):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(accept_tls, raw, clients())
                await finish(client)
            end(raw)
            await trio.lowlevel.wait_readable(client)
            read = partial(client.recv, 100)
            if end is RawSocket.close:
                assert read() == b""
            else:
                with pytest.raises(OSError, match=r"violation|reset"):
                    read()
