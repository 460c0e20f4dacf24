"""A cancel hits what it was aimed at or nothing, and nobody gets the session before it is over."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pooler.demo.client import query
from pooler.relay.cancel import cancel_and_wait, cancel_for, end_without_word
from tests.relay.world import Client, World, world


@dataclass
class Postmaster:
    """Takes cancel requests; each connection stays open until `close` is set."""

    port: int = 0
    received: list[bytes] = field(default_factory=list)
    close: trio.Event = field(default_factory=trio.Event)
    accept: trio.Event = field(default_factory=trio.Event)

    async def serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            data = await stream.receive_some(100)
            if data:
                self.received.append(data)
                await self.close.wait()


@pytest.fixture
def one() -> Iterator[World]:
    with world(cancel_wait_timeout="5s") as made:
        yield made


@asynccontextmanager
async def postmaster(w: World) -> AsyncIterator[Postmaster]:
    """A postmaster that the world's sessions belong to."""
    made = Postmaster()
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, made.serve, 0, host="127.0.0.1"))
        made.port = listeners[0].socket.getsockname()[1]
        aim(w, made)
        yield made
        nursery.cancel_scope.cancel()


def aim(w: World, server: Postmaster) -> None:
    """Cancels go there from now on."""
    for session in w.sessions:
        backend = replace(session.conn.opened.backend, address=f"127.0.0.1:{server.port}")
        session.conn.opened = replace(session.conn.opened, backend=backend)


def running(w: World) -> Client:
    """A client whose query is not answered yet."""
    client = w.client()
    w.sessions[0].mini.mute = True
    w.say(client, query("select 1"))
    return client


def answer(w: World) -> None:
    mini = w.sessions[0].mini
    mini.mute = False
    w.sessions[0].unsent.append(mini.feed(b""))
    w.settle()


async def test_a_running_query_is_cancelled_with_its_sessions_key(one: World) -> None:
    client = running(one)
    async with postmaster(one) as server, trio.open_nursery() as nursery:
        nursery.start_soon(cancel_for, one.sessions[0].conn, client.conn, 5.0)
        await wait_all_tasks_blocked()
        assert server.received == [b"\0\0\0\x0f\x04\xd2\x16\x2e\0\0\0\x01key"]
        server.close.set()


async def test_the_session_is_handed_on_only_when_the_cancels_connection_has_ended(one: World) -> None:
    client, other = running(one), one.client()
    one.say(other, query("select 2"))
    async with postmaster(one) as server, trio.open_nursery() as nursery:
        nursery.start_soon(cancel_for, one.sessions[0].conn, client.conn, 5.0)
        await wait_all_tasks_blocked()
        answer(one)
        assert client.kinds == "T D:1 C:SELECT 1 Z:I"
        assert other.kinds == "", "the signal may still be on its way"
        server.close.set()
        await wait_all_tasks_blocked()
        one.settle()
        assert other.kinds == "T D:2 C:SELECT 1 Z:I"
    one.check_idle()


async def test_clean_up_waits_for_the_cancel_too(one: World) -> None:
    client = one.client()
    one.say(client, query("begin"))
    one.say(client, query("do"))
    one.sessions[0].mini.mute = True
    one.say(client, query("commit"))
    async with postmaster(one) as server, trio.open_nursery() as nursery:
        nursery.start_soon(cancel_for, one.sessions[0].conn, client.conn, 5.0)
        await wait_all_tasks_blocked()
        answer(one)
        assert one.sessions[0].mini.ran[-1] == "commit"
        server.close.set()
        await wait_all_tasks_blocked()
        one.settle()
    assert one.sessions[0].mini.ran[-1] == "DISCARD ALL"
    one.check_idle()


async def test_two_cancels_are_both_waited_for(one: World) -> None:
    client, other = running(one), one.client()
    one.say(other, query("select 2"))
    async with postmaster(one) as first, postmaster(one) as second, trio.open_nursery() as nursery:
        server = one.sessions[0].conn
        aim(one, first)
        nursery.start_soon(cancel_for, server, client.conn, 5.0)
        await wait_all_tasks_blocked()
        aim(one, second)
        nursery.start_soon(cancel_for, server, client.conn, 5.0)
        await wait_all_tasks_blocked()
        answer(one)
        assert server.cancels == 2
        first.close.set()
        await wait_all_tasks_blocked()
        one.settle()
        assert other.kinds == ""
        second.close.set()
        await wait_all_tasks_blocked()
        one.settle()
        assert other.kinds == "T D:2 C:SELECT 1 Z:I"


async def test_a_cancel_that_comes_after_the_end_is_not_sent(one: World) -> None:
    client = running(one)
    answer(one)
    async with postmaster(one) as server:
        await cancel_for(one.sessions[0].conn, client.conn, 5.0)
        assert server.received == []
    one.check_idle()


async def test_a_cancel_for_one_who_sits_idle_in_a_transaction_is_not_sent(one: World) -> None:
    client = one.client()
    one.say(client, query("begin"))
    async with postmaster(one) as server:
        await cancel_for(one.sessions[0].conn, client.conn, 5.0)
        assert server.received == []
    assert one.say(client, query("commit")) == "C:COMMIT Z:I"


async def test_a_session_whose_cancel_was_not_seen_to_end_is_closed(
    one: World, autojump_clock: trio.testing.MockClock
) -> None:
    client, other = running(one), one.client()
    one.say(other, query("select 2"))
    async with postmaster(one):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_for, one.sessions[0].conn, client.conn, 5.0)
            await wait_all_tasks_blocked()
            answer(one)
        one.settle()
    assert one.sessions[0].conn.closing
    assert other.kinds == ""


async def test_a_session_whose_postmaster_takes_no_cancel_is_closed_after_its_transaction(one: World) -> None:
    client = running(one)
    await cancel_for(one.sessions[0].conn, client.conn, 5.0)  # port 1: refused
    answer(one)
    assert client.kinds == "T D:1 C:SELECT 1 Z:I"
    assert one.sessions[0].conn.closing


async def test_a_session_that_died_under_its_cancel_is_not_freed_again(one: World) -> None:
    client = running(one)
    async with postmaster(one) as server, trio.open_nursery() as nursery:
        nursery.start_soon(cancel_for, one.sessions[0].conn, client.conn, 5.0)
        await wait_all_tasks_blocked()
        one.sessions[0].mini.ended = True
        one.settle()
        server.close.set()
    assert one.pool.core.count().idle == 0
    assert one.sessions[0].conn.closing


async def test_a_cancel_that_is_itself_cancelled_leaves_nothing_in_the_pool_unproven(one: World) -> None:
    client = running(one)
    async with postmaster(one), trio.open_nursery() as nursery:
        nursery.start_soon(cancel_for, one.sessions[0].conn, client.conn, 5.0)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    answer(one)
    assert one.sessions[0].conn.closing


async def test_a_session_that_is_closed_while_it_works_is_cancelled_first(one: World) -> None:
    client = running(one)
    client.leave()
    one.settle()
    async with postmaster(one) as server:
        server.close.set()
        assert await cancel_and_wait(one.sessions[0].conn, 5.0)
        assert len(server.received) == 1


@pytest.mark.parametrize("orderly", [True, False])
async def test_an_end_without_a_word_is_proven_by_the_servers_end(
    one: World, orderly: bool, autojump_clock: trio.testing.MockClock
) -> None:
    session = one.sessions[0]
    if orderly:
        session.far.send(b"the last words")
        session.far.close()
    assert await end_without_word(session.near, 5.0) is orderly
    if not orderly:
        assert session.far.recv(10) == b"", "the server sees our end, and no Terminate"
