"""What the reactor puts off to the end of a batch comes in order, once, and holds nobody up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from pooler.demo.client import SYNC, query
from pooler.relay import reactor as module
from pooler.relay.reactor import Reactor
from tests.relay.words import error
from tests.relay.world import world


@pytest.fixture
def pipes() -> Iterator[list[tuple[int, int]]]:
    """Three pipes, each with a byte to be read."""
    made = [os.pipe() for _ in range(3)]
    for _, write in made:
        os.write(write, b"x")
    yield made
    for ends in made:
        for fd in ends:
            os.close(fd)


@pytest.fixture
def reactor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reactor]:
    monkeypatch.setattr(module, "LINGER_SECONDS", 0.0)
    made = Reactor()
    yield made
    made._epoll.close()


def test_what_is_put_off_comes_behind_every_event_of_the_batch(
    reactor: Reactor, pipes: list[tuple[int, int]]
) -> None:
    order: list[str] = []

    def on(fd: int) -> None:
        os.read(fd, 1)
        order.append("event")
        reactor.at_end(lambda: order.append("end"))

    for read, _ in pipes:
        reactor.add(read, lambda mask, fd=read: on(fd))  # type: ignore[misc]
    reactor._turn()
    assert order == ["event"] * 3 + ["end"] * 3
    reactor.at_end(lambda: order.append("at once"))
    assert order[-1] == "at once", "no batch is being handled: nothing would call it later"


class Owner:
    """A connection with a bug."""

    def __init__(self) -> None:
        self.ended = 0

    def broken(self) -> None:
        raise RuntimeError("a bug")

    def fault(self) -> None:
        self.ended += 1


def test_a_bug_in_what_was_put_off_ends_its_own_connection_alone(
    reactor: Reactor, pipes: list[tuple[int, int]]
) -> None:
    owner, reached = Owner(), []
    read = pipes[0][0]

    def on(mask: int) -> None:
        os.read(read, 1)
        reactor.at_end(owner.broken)
        reactor.at_end(lambda: reached.append(True))

    reactor.add(read, on)
    reactor._turn()
    assert (owner.ended, reached, reactor.faults) == (1, [True], 1)


def test_the_next_in_the_queue_has_the_session_before_the_last_one_has_its_answer() -> None:
    """Sessions first: their servers work while the answers go out."""
    with world() as w:
        one, two = w.client(), w.client()
        order: list[str] = []
        session = w.sessions[0].conn

        def watch(name: str, conn: Any) -> None:
            def send(data: bytes) -> int:
                order.append(name)
                return int(conn.sock.send(data))

            conn.send = send

        for name, conn in (("to one", one.conn), ("to two", two.conn), ("to server", session)):
            watch(name, conn)
        w.send(one, query("select 1"))
        w.send(two, query("select 2"))
        w.settle()
        assert order == ["to server", "to server", "to one", "to two"]
        assert (one.kinds, two.kinds) == ("T D:1 C:SELECT 1 Z:I", "T D:2 C:SELECT 1 Z:I")


def test_an_answer_of_the_server_and_one_of_our_own_in_one_batch_keep_their_order() -> None:
    with world() as w:
        client = w.client()
        w.send(client, query("select 1"))
        w._push(client)
        w.reactor._turn()
        w.sessions[0].move(w.chop)  # the answer is there to be read
        client.near.send(SYNC)  # and so is a message that we answer ourselves
        w.settle()
        assert client.kinds == "T D:1 C:SELECT 1 Z:I Z:I"


def test_a_client_that_is_closed_in_the_batch_of_its_last_answer_has_that_answer() -> None:
    with world() as w:
        client = w.client()
        w.say(client, query("begin"))
        session = w.sessions[0]
        session.unsent.append(error("57P01", "terminating connection", "FATAL"))
        session.mini.ended = True
        w.settle()
        assert (client.kinds, client.closed) == ("E:57P01", True)


def test_a_bug_of_ours_in_a_session_ends_its_client_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """What of the answer went out is not known: without an end the client would wait for ever."""

    def fail(*args: object) -> None:
        raise RuntimeError("a bug")

    with world() as w:
        client = w.client()
        monkeypatch.setattr("pooler.relay.server.pass_answers", fail)
        w.send(client, query("select 1"))
        w._push(client)
        w.reactor._turn()
        w.sessions[0].move(w.chop)
        w.reactor._turn()
        client.read()
        client.read()
        assert (client.kinds, client.closed) == ("E:XX000", True)
        assert w.sessions[0].conn.closing
        assert not w.pool.core.active
