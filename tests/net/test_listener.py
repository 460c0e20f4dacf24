"""Listening sockets, and an accept loop that is bounded and survives a shortage."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pooler.errors import UsageFault
from pooler.net.listener import Acceptor, adopt
from pooler.net.proxy_protocol import PeerAddress
from pooler.net.stream import RawSocket


class Logins:
    """Holds every connection until it is let go."""

    def __init__(self) -> None:
        self.peers: list[PeerAddress] = []
        self.arrived = trio.Event()
        self.go = trio.Event()

    async def handle(self, raw: RawSocket, peer: PeerAddress) -> None:
        self.peers.append(peer)
        self.arrived.set()
        try:
            await self.go.wait()
        finally:
            raw.close()


def listening(path: Path | None = None) -> socket.socket:
    """A listening TCP socket, or a unix one at `path`."""
    sock = socket.socket(socket.AF_INET if path is None else socket.AF_UNIX)
    sock.bind(("127.0.0.1", 0) if path is None else str(path))
    sock.listen()
    sock.setblocking(False)
    return sock


def connect_to(listener: socket.socket) -> socket.socket:
    sock = socket.socket(listener.family)
    sock.setblocking(False)
    sock.connect_ex(listener.getsockname())
    return sock


async def test_connections_are_handed_over_with_their_address(tmp_path: Path) -> None:
    tcp, unix = listening(), listening(tmp_path / "s")
    logins = Logins()
    acceptor = Acceptor([tcp, unix], logins.handle, in_flight_max=10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(acceptor.run)
        with connect_to(tcp) as one, connect_to(unix):
            await wait_all_tasks_blocked(0.01)
            assert sorted(logins.peers) == sorted([PeerAddress(*one.getsockname()), PeerAddress("unix", 0)])
            nursery.cancel_scope.cancel()
    assert acceptor.in_flight == 0
    assert tcp.fileno() == unix.fileno() == -1


async def test_no_more_logins_than_allowed_are_in_flight() -> None:
    listener, logins = listening(), Logins()
    acceptor = Acceptor([listener], logins.handle, in_flight_max=2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(acceptor.run)
        clients = [connect_to(listener) for _ in range(5)]
        await wait_all_tasks_blocked(0.01)
        assert (acceptor.in_flight, len(logins.peers)) == (2, 2)
        logins.go.set()
        await wait_all_tasks_blocked(0.01)
        assert (acceptor.in_flight, len(logins.peers)) == (0, 5)
        acceptor.stop()
        for client in clients:
            client.close()


async def test_stopping_takes_no_more_and_lets_what_is_in_flight_finish() -> None:
    listener, logins = listening(), Logins()
    acceptor = Acceptor([listener], logins.handle, in_flight_max=2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(acceptor.run)
        with connect_to(listener) as client:
            await wait_all_tasks_blocked(0.01)
            acceptor.stop()
            await wait_all_tasks_blocked(0.01)
            assert listener.fileno() == -1
            assert acceptor.in_flight == 1
            logins.go.set()
            await trio.lowlevel.wait_readable(client)


class Short(socket.socket):
    """A listening socket that has no descriptors left for a while."""

    failures = 3
    code = errno.EMFILE

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            self.failures -= 1
            raise OSError(self.code, os.strerror(self.code))
        return super().accept()


def short_listener(code: int) -> Short:
    sock = Short(socket.AF_INET, socket.SOCK_STREAM)
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    sock.setblocking(False)
    sock.code = code
    return sock


@pytest.mark.parametrize(("code", "shortages"), [
    (errno.EMFILE, 3), (errno.ENFILE, 3), (errno.ENOMEM, 3), (errno.ECONNABORTED, 0), (errno.EAGAIN, 0)])
async def test_a_shortage_is_waited_out_and_a_passing_fault_is_not(
    code: int, shortages: int, autojump_clock: trio.testing.MockClock
) -> None:
    listener, logins = short_listener(code), Logins()
    acceptor = Acceptor([listener], logins.handle, in_flight_max=2)
    started = trio.current_time()
    async with trio.open_nursery() as nursery:
        with connect_to(listener):
            nursery.start_soon(acceptor.run)
            with trio.fail_after(30):
                await logins.arrived.wait()
            nursery.cancel_scope.cancel()
    assert acceptor.shortages == shortages
    assert trio.current_time() - started == pytest.approx(0.05 + 0.1 + 0.2 if shortages else 0, abs=0.001)


async def test_a_fault_that_will_not_pass_is_raised() -> None:
    listener = short_listener(errno.EBADF)
    acceptor = Acceptor([listener], Logins().handle, in_flight_max=2)
    with connect_to(listener), pytest.raises(ExceptionGroup):
        await acceptor.run()
    assert listener.fileno() == -1


def test_an_inherited_descriptor_is_adopted_and_no_longer_inheritable() -> None:
    original = listening()
    descriptor = os.dup(original.fileno())
    os.set_inheritable(descriptor, True)
    with original, adopt(descriptor) as adopted:
        assert adopted.getsockname() == original.getsockname()
        assert not os.get_inheritable(descriptor)
        assert not adopted.getblocking()


def test_what_is_no_listening_socket_is_not_adopted(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, pytest.raises(UsageFault, match="not a socket"):
        adopt(file.fileno())
    with socket.socket() as plain, pytest.raises(UsageFault, match="not a listening socket"):
        adopt(plain.fileno())
    with pytest.raises(UsageFault):
        adopt(10_000)
