"""The entrance: what a client that is no client of this worker gets."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from pooler.errors import FleetUnreachable
from pooler.net.gate import GateRules
from pooler.net.login import Door
from pooler.net.proxy_protocol import PeerAddress
from pooler.net.stream import RawSocket
from pooler.serve.entrance import Entrance
from pooler.wire.auth import AuthType
from pooler.wire.messages import cancel_request


async def _nobody(*_: Any) -> Any:
    return None


DOOR = Door(GateRules(AuthType("trust"), _nobody, b"k" * 32), database_exists=lambda _: False)


def _entrance(cancel: Callable[[bytes], Awaitable[None]]) -> Entrance:
    registry: Any = SimpleNamespace(settings=SimpleNamespace(
        pool=SimpleNamespace(client_login_timeout_seconds=5.0)))
    parts: Any = None
    return Entrance(registry, parts, cancel, _nobody, parts)


async def test_a_cancel_request_for_a_worker_out_of_reach_is_closed_without_a_word_and_ends_nothing() -> None:
    async def out_of_reach(key: bytes) -> None:
        raise FleetUnreachable("cancel: no worker here has ordinal 700")

    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(cancel_request(b"\x01\x00\x00\x01abcd"))
        handle = _entrance(out_of_reach).handler(None, lambda _: DOOR)
        await handle(RawSocket(ours), PeerAddress("127.0.0.1", 1))
        assert theirs.recv(100) == b""


async def test_a_cancel_request_that_nobody_answers_goes_when_a_login_would(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def silent(key: bytes) -> None:
        await trio.sleep_forever()

    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(cancel_request(b"\x01\x00\x00\x01abcd"))
        await _entrance(silent).handler(None, lambda _: DOOR)(RawSocket(ours), PeerAddress("127.0.0.1", 1))
        assert theirs.recv(100) == b""
    assert trio.current_time() == pytest.approx(5.0, abs=0.1)


async def test_nothing_that_a_login_meets_ends_the_worker() -> None:
    """The acceptor's other clients hang on it that nothing is raised, whatever it is and whenever."""
    for fault in (trio.ClosedResourceError("closed"), FleetUnreachable("away"), RuntimeError("unforeseen")):
        async def failing(key: bytes, fault: Exception = fault) -> None:
            raise fault

        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(cancel_request(b"\x01\x00\x00\x01abcd"))
            await _entrance(failing).handler(None, lambda _: DOOR)(
                RawSocket(ours), PeerAddress("127.0.0.1", 1))
            assert theirs.recv(100) == b""
