"""The monitor's login gives its password away to nobody: whoever answers at an address may be anybody."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from psycopg import pq

from coordinator import looks
from coordinator.looks import AUTH_LOOPBACK, AUTH_UNVERIFIED, Door, Looker, LookFailed, auth_allowed
from coordinator.spec import Monitor

WORD = "hunter2"
SSL_REQUEST = struct.pack(">ii", 8, 80877103)
CLEARTEXT = struct.pack(">cii", b"R", 8, 3)
MD5 = struct.pack(">cii", b"R", 12, 5) + b"salt"
TIMEOUT_SECONDS = 10


@asynccontextmanager
async def thief(asks: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that is none: asks for a password and notes what it is told after that."""
    told: list[bytes] = []

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            said = bytes(await stream.receive_some())
            if said == SSL_REQUEST:
                await stream.send_all(b"N")
                await stream.receive_some()
            await stream.send_all(asks)
            async for more in stream:
                told.append(bytes(more))

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield f"127.0.0.1:{listener.socket.getsockname()[1]}", told
        nursery.cancel_scope.cancel()


async def look(address: str) -> str:
    """What a look there fails with."""
    looker = Looker(lambda _: Door(Monitor("m", WORD), "d", "x"))
    with trio.fail_after(TIMEOUT_SECONDS), pytest.raises(LookFailed) as failed:
        await looker.look(address)
    await looker.close()
    return str(failed.value)


@pytest.mark.parametrize(("asks", "allowed"), [
    (CLEARTEXT, AUTH_LOOPBACK), (CLEARTEXT, AUTH_UNVERIFIED), (MD5, AUTH_UNVERIFIED)])
async def test_who_asks_for_the_password_or_a_hash_of_it_hears_nothing(
    monkeypatch: pytest.MonkeyPatch, asks: bytes, allowed: str
) -> None:
    monkeypatch.setattr(looks, "auth_allowed", lambda host, tls: allowed)
    async with thief(asks) as (address, told):
        why = await look(address)
        assert "authentication" in why
        assert WORD not in why
        assert told == []


@pytest.mark.parametrize(("host", "tls", "expected"), [
    ("10.0.0.11", {}, AUTH_UNVERIFIED),
    ("db1.example", {"sslmode": "require"}, AUTH_UNVERIFIED),
    ("localhost.example", {"sslmode": "prefer"}, AUTH_UNVERIFIED),
    ("127.0.0.2", {}, AUTH_LOOPBACK),
    ("::1", {}, AUTH_LOOPBACK),
    ("localhost", {}, AUTH_LOOPBACK),
    ("10.0.0.11", {"sslmode": "verify-full"}, ""),
    ("10.0.0.11", {"sslmode": "verify-ca"}, ""),
    ("/var/run/postgresql", {}, ""),
])
def test_what_a_server_may_ask_for_depends_on_whether_it_is_known(
    host: str, tls: dict[str, str], expected: str
) -> None:
    assert auth_allowed(host, tls) == expected


async def test_a_libpq_that_cannot_refuse_is_not_used_where_nothing_verifies_the_server(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pq, "version", lambda: 150_010)
    async with thief(CLEARTEXT) as (address, told):
        assert "libpq before 16" in await look(address)
        assert told == []
