"""A raw socket: what it reads and writes, how it ends, and that a released one is left alone."""

from __future__ import annotations

import socket
import struct

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pooler.net.stream import Broken, KeepAlive, PeerGone, RawSocket
from tests.net.wires import connected, tcp_pair


async def test_bytes_go_both_ways_and_the_end_is_empty() -> None:
    with connected() as (raw, peer):
        await raw.send_all(b"hello")
        assert await peer.read(5) == b"hello"
        await peer.send(b"world")
        assert await raw.recv() == b"world"
        assert not raw.has_ended()
        await peer.stream.send_eof()
        assert raw.has_ended()
        assert await raw.recv() == b""


async def test_more_than_the_kernel_holds_is_sent_whole() -> None:
    data = bytes(range(256)) * 8_192
    with connected() as (raw, peer):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raw.send_all, data)
            assert await peer.read(len(data)) == data


async def test_a_cancelled_recv_takes_nothing() -> None:
    with connected() as (raw, peer):
        with trio.CancelScope() as scope:
            scope.cancel()
            await raw.recv()
        await peer.send(b"kept")
        assert await raw.recv() == b"kept"


async def test_a_reset_is_not_an_orderly_end() -> None:
    with connected(tcp_pair) as (raw, peer):
        peer.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.stream.socket.close()
        with pytest.raises(Broken):
            await raw.recv()
        assert not raw.has_ended()
        with pytest.raises(Broken):  # the kernel reports a reset once and then an end of file
            await raw.recv()
    with connected() as (raw, peer):
        peer.stream.socket.close()
        with pytest.raises(PeerGone):
            await raw.recv_some()


async def test_a_reset_that_a_send_swallowed_is_not_an_orderly_end() -> None:
    with connected(tcp_pair) as (raw, peer):
        peer.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.stream.socket.close()
        with pytest.raises(Broken):
            await raw.send_all(b"x")
        with pytest.raises(Broken):
            await RawSocket(raw.plain).recv()


async def test_an_end_that_a_late_send_turned_into_a_reset_is_not_an_orderly_one() -> None:
    with connected(tcp_pair) as (raw, peer):
        peer.stream.socket.close()
        assert raw.has_ended()
        await raw.send_all(b"x")
        await trio.lowlevel.wait_readable(raw.plain)
        with pytest.raises(Broken):
            await raw.recv()


async def test_abort_resets() -> None:
    with connected(tcp_pair) as (raw, peer):
        raw.abort()
        with pytest.raises(trio.BrokenResourceError):
            await peer.stream.receive_some()


async def test_a_released_socket_is_open_and_no_longer_ours() -> None:
    with connected() as (raw, peer):
        plain = raw.release()
        raw.close()
        raw.abort()
        with plain:
            assert not plain.getblocking()
            plain.send(b"still open")
            assert await peer.read(10) == b"still open"
        with pytest.raises(trio.ClosedResourceError):
            await raw.recv()
        with pytest.raises(trio.ClosedResourceError):
            raw.release()


async def test_close_wakes_who_waits() -> None:
    with connected() as (raw, _):
        async with trio.open_nursery() as nursery:
            @nursery.start_soon
            async def waiter() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await raw.recv()
            await wait_all_tasks_blocked()
            raw.close()


def test_tcp_is_set_up_to_answer_at_once_and_to_notice_a_dead_peer() -> None:
    ours, theirs = tcp_pair()
    with ours, theirs:
        RawSocket(ours, keepalive=KeepAlive(idle_seconds=7, interval_seconds=3, probes=2))
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert [ours.getsockopt(socket.IPPROTO_TCP, option) for option in (
            socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)] == [7, 3, 2]
