"""Bytes passed on as they are: whole, in order, bounded, and where messages end is known at any split."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from pooler.net.stream import RawSocket
from pooler.relay.passing import Boundaries, Passing


def message(kind: bytes, body: bytes = b"") -> bytes:
    return kind + (len(body) + 4).to_bytes(4, "big") + body


MESSAGES = st.lists(st.tuples(st.sampled_from([b"Q", b"d", b"Z", b"W"]), st.binary(max_size=20)), max_size=8)


@given(MESSAGES, st.data())
def test_where_messages_begin_does_not_depend_on_how_they_are_split(
    messages: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(message(kind, body) for kind, body in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    ends, at = {0}, 0
    for kind, body in messages:
        at += len(message(kind, body))
        ends.add(at)
    boundaries = Boundaries()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        boundaries.take(stream[start:end])
        assert boundaries.is_between is (end in ends)
    assert boundaries.seen == {kind for kind, _ in messages}
    assert boundaries.last == (messages[-1][0] if messages else b"")


class Wire:
    """A Passing between two pairs of sockets; `client` and `server` are the far ends."""

    def __init__(self) -> None:
        near_client, client = socket.socketpair()
        near_server, server = socket.socketpair()
        self.client, self.server = RawSocket(client), RawSocket(server)
        near = RawSocket(near_client), RawSocket(near_server)
        self.passing = Passing(*near)
        self.all = (self.client, self.server, *near)


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    made = Wire()
    yield made
    for each in made.all:
        each.close()


async def test_both_ways_pass_at_once_and_what_came_with_the_login_comes_first(
    wire: Wire, nursery: trio.Nursery
) -> None:
    nursery.start_soon(wire.passing.run, message(b"Q", b"first"))
    await wire.client.send_all(message(b"d", b"second"))
    await wire.server.send_all(message(b"W", b"\0\0\0"))
    sent = message(b"Q", b"first") + message(b"d", b"second")
    heard = b""
    while len(heard) < len(sent):
        heard += await wire.server.recv()
    assert heard == sent
    assert await wire.client.recv() == message(b"W", b"\0\0\0")
    assert wire.passing.streams
    assert wire.passing.is_busy
    await wire.server.send_all(message(b"Z", b"I"))
    assert await wire.client.recv() == message(b"Z", b"I")
    assert not wire.passing.streams
    assert not wire.passing.is_busy
    nursery.cancel_scope.cancel()


async def test_the_servers_last_word_is_passed_on_before_its_end_counts(wire: Wire) -> None:
    await wire.server.send_all(message(b"E", b"fatal"))
    wire.server.end_sending()
    await wire.passing.run()
    assert await wire.client.recv() == message(b"E", b"fatal")
    assert wire.passing.server_ended is True
    assert wire.passing.client_is_whole


async def test_a_client_that_leaves_in_the_middle_of_a_message_is_known_to(wire: Wire) -> None:
    await wire.client.send_all(message(b"Q", b"select")[:7])
    wire.client.close()
    await wire.passing.run()
    assert wire.passing.server_ended is None
    assert not wire.passing.server_is_whole


async def test_a_client_that_does_not_read_stops_the_server_too(wire: Wire, nursery: trio.Nursery) -> None:
    nursery.start_soon(wire.passing.run)
    sent = 0

    async def pour() -> None:
        nonlocal sent
        while True:
            sent += await wire.server.send_some(message(b"d", bytes(60_000)))

    nursery.start_soon(pour)
    await wait_all_tasks_blocked(0.05)
    assert 60_000 < sent < 4_000_000
    nursery.cancel_scope.cancel()
