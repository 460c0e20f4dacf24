"""A peer that does not read is not written to without end, and holds up nobody else."""

from __future__ import annotations

import socket

import pytest

from pooler.demo.client import SYNC, parse, query
from tests.relay.scripts import COPY_DONE, copy_data, run
from tests.relay.world import World, world

BOUND_BYTES = 4 * 65_536  # what one connection may keep, generously


def test_a_client_that_does_not_read_stops_its_server_and_gets_everything_later() -> None:
    with world() as w:
        client = w.client()
        client.stopped = True
        w.send(client, query("rows 400 50000"))  # 20 MB
        w.settle()
        assert len(client.conn.out or b"") < BOUND_BYTES
        assert w.sessions[0].unsent, "the server still has most of it"
        client.stopped = False
        w.settle()
        assert client.kinds == "T" + " D" * 400 + " C:SELECT 400 Z:I"
        w.check_idle()


def test_a_session_is_handed_on_though_its_last_client_has_not_read_everything() -> None:
    """What is left is the client's own affair: the next client's answers must be read."""
    with world() as w:
        slow, other = w.client(buffer_bytes=4096), w.client()
        slow.stopped = True
        w.send(slow, query("rows 1 60000"))
        w.settle()
        assert slow.conn.out
        assert w.say(other, query("select 2")) == "T D:2 C:SELECT 1 Z:I"
        slow.stopped = False
        w.settle()
        assert slow.kinds == "T D C:SELECT 1 Z:I"
        assert w.say(slow, query("select 3")) == "T D:3 C:SELECT 1 Z:I"


def test_a_client_that_asks_on_and_never_reads_is_not_heard() -> None:
    with world() as w:
        client = w.client(buffer_bytes=4096)
        client.stopped = True
        for _ in range(300):
            w.send(client, query("rows 1 60000"))
            w.settle()
        assert len(client.conn.out or b"") < BOUND_BYTES
        client.stopped = False
        w.settle()
        assert client.kinds == " ".join(["T D C:SELECT 1 Z:I"] * 300)


def test_a_client_in_a_transaction_that_never_reads_is_not_heard_either() -> None:
    with world() as w:
        client = w.client(buffer_bytes=4096)
        w.say(client, query("begin"))
        client.stopped = True
        for _ in range(300):
            w.send(client, query("rows 1 60000"))
            w.settle()
        assert len(client.conn.out or b"") < BOUND_BYTES
        client.stopped = False
        w.settle()
        assert client.kinds == " ".join(["T D C:SELECT 1 Z:T"] * 300)


@pytest.mark.parametrize("what", ["copy", "bind", "query", "parse"])
def test_a_server_that_does_not_read_stops_its_client(what: str) -> None:
    big = "x" * 8_000_000
    with world() as w:
        client = w.client()
        if what == "copy":
            w.say(client, query("copy in"))
        if what == "bind":
            w.say(client, parse("select $1", "s") + SYNC)
        w.sessions[0].stopped = True
        messages = {
            "copy": copy_data(big) + COPY_DONE, "bind": run("s", big), "query": query("select " + big),
            "parse": parse("select 1" + " " * 8_000_000, "p") + SYNC}
        w.send(client, messages[what])
        w.settle()
        if what != "parse":  # which is taken whole
            assert len(w.sessions[0].conn.out) < BOUND_BYTES
            assert client.unsent
        w.sessions[0].stopped = False
        w.settle()
        expected = {"copy": "C:COPY 8000000 Z:I", "bind": "2 D:8000000 C:SELECT 1 Z:I",
                    "query": "T D C:SELECT 1 Z:I", "parse": "1 Z:I"}
        assert client.kinds == expected[what]
        w.check_idle()


def stop_in_copy(w: World) -> None:
    """A client whose COPY fails while much of it is still on its way to a server that reads slowly."""
    client = w.client()
    w.say(client, query("copy in"))
    session = w.sessions[0]
    session.stopped = True
    w.send(client, copy_data("bad" + "x" * 10) + copy_data("y" * 700_000) + COPY_DONE)
    w.settle()
    assert session.conn.out
    assert client.conn._paused


def test_a_client_whose_copy_failed_goes_on_when_the_server_has_taken_the_rest() -> None:
    with world() as w:
        stop_in_copy(w)
        client = w.clients[0]
        session = w.sessions[0]
        piece = session.far.recv(200)  # the bad row: the server answers before it reads on
        session.unsent.append(session.mini.feed(piece))
        w.settle()
        assert client.kinds == "E:22P04 Z:I"
        session.stopped = False
        w.settle()
        assert client.unsent == b""
        assert w.say(client, query("select 1")) == "T D:1 C:SELECT 1 Z:I"
        w.check_idle()


def test_others_are_served_while_one_reads_nothing() -> None:
    with world(2) as w:
        slow, other = w.client(), w.client()
        slow.stopped = True
        w.send(slow, query("rows 400 50000"))
        w.settle()
        for n in range(20):
            assert w.say(other, query(f"select {n}")) == f"T D:{n} C:SELECT 1 Z:I"


def test_a_client_that_leaves_in_a_big_answer_is_noticed_though_nothing_is_read_from_it() -> None:
    with world() as w:
        client = w.client()
        client.stopped = True
        w.send(client, query("rows 400 50000"))
        w.settle()
        client.leave()
        w.settle()
        assert client.conn.closing
        assert w.sessions[0].conn.closing


def test_a_server_that_ends_while_it_is_not_read_does_not_keep_the_reactor_busy() -> None:
    with world() as w:
        client = w.client()
        client.stopped = True
        w.send(client, query("rows 400 50000"))
        w.settle()
        w.sessions[0].unsent.clear()
        w.sessions[0].far.shutdown(1)
        before = w.reactor.turns
        w.reactor._turn()
        assert w.reactor.turns == before
        client.stopped = False
        w.settle()
        assert client.closed


def test_what_is_held_back_for_an_answer_is_not_read_without_end() -> None:
    """Neither when the server takes the rest of what came before, which makes others go on."""
    with world() as w:
        client, session = w.client(), w.sessions[0]
        w.say(client, parse("select 1", "a") + SYNC)
        session.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        session.mini.mute = session.stopped = True
        w.send(client, query("select " + "1" * 60_000) + query("DEALLOCATE ALL"))
        w.settle()
        assert session.conn.out
        w.send(client, query("select 2") * 500_000)
        session.stopped = False
        w.settle()
        assert not session.conn.out
        assert sum(map(len, client.conn.chunks or ())) < BOUND_BYTES
