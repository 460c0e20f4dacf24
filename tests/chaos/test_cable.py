"""A cable passes everything on, and can be cut, fall silent and be whole again."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from chaos.cable import Cable

WAIT_SECONDS = 10.0


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_SECONDS)
        yield listener


@pytest.fixture
def cable(server: socket.socket) -> Iterator[Cable]:
    made = Cable(server.getsockname()[1])
    yield made
    made.close()


def joined(cable: Cable, server: socket.socket) -> tuple[socket.socket, socket.socket]:
    near = socket.create_connection(("127.0.0.1", cable.port), WAIT_SECONDS)
    far, _ = server.accept()
    far.settimeout(WAIT_SECONDS)
    return near, far


def test_what_is_sent_while_it_is_silent_arrives_when_it_is_whole(
    cable: Cable, server: socket.socket
) -> None:
    near, far = joined(cable, server)
    with near, far:
        near.sendall(b"one")
        assert far.recv(10) == b"one"
        cable.silence()
        near.sendall(b"two")
        far.settimeout(0.2)
        with pytest.raises(TimeoutError):
            far.recv(10)
        far.settimeout(WAIT_SECONDS)
        cable.heal()
        assert far.recv(10) == b"two"


def test_a_cut_ends_both_sides_and_lets_nobody_in_until_it_is_healed(
    cable: Cable, server: socket.socket
) -> None:
    near, far = joined(cable, server)
    with near, far:
        cable.cut()
        assert far.recv(10) == b""
        assert near.recv(10) == b""
    with suppress(ConnectionResetError), socket.create_connection(
            ("127.0.0.1", cable.port), WAIT_SECONDS) as refused:
        assert refused.recv(10) == b""
    cable.heal()
    near, far = joined(cable, server)
    with near, far:
        far.sendall(b"again")
        assert near.recv(10) == b"again"


def test_who_is_reset_hears_it_alone(cable: Cable, server: socket.socket) -> None:
    near, far = joined(cable, server)
    with near, far:
        near.sendall(b"one")
        assert far.recv(10) == b"one"
        cable.reset_callers()
        with pytest.raises(ConnectionResetError):
            near.recv(10)
        far.settimeout(0.2)
        with pytest.raises(TimeoutError):
            far.recv(10)
        far.settimeout(WAIT_SECONDS)
        cable.heal()
        assert far.recv(10) == b""
