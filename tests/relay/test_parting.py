"""A client that is to go hears so behind what it is being sent, and is not waited for without end."""

from __future__ import annotations

import socket
from time import monotonic

import pytest

from pooler.demo.client import SYNC, bind, describe, execute, message, parse, query
from pooler.pool import janitor
from pooler.relay.parting import PARTING_SECONDS_MAX
from tests.relay import world as relay_world
from tests.relay.words import columns, error, row
from tests.relay.world import Client, World, whole, world

BIG = row(b"x" * 50_000)
ROW_END = 30_000
BREACH = message(b"m")


def half_a_row(w: World, client: Client) -> None:
    """Its answer has come as far as the middle of a row."""
    w.sessions[0].mini.mute = True
    w.say(client, query("begin; select big"))
    says(w, columns(b"a"), BIG[:ROW_END])
    assert client.kinds == "T"


def says(w: World, *words: bytes) -> None:
    w.sessions[0].unsent += words
    w.settle()


def time_passes(w: World, seconds: float) -> None:
    janitor.end_late_partings(w.pool, monotonic() + seconds)
    w.settle()


def is_made_to_go(w: World, client: Client, how: str) -> None:
    if how == "a limit":
        client.conn.break_off("57014", "query_timeout")
    elif how == "an administrator":
        client.conn.break_off("57P01", "connection ended by an administrator")
    else:
        w.send(client, BREACH)
    w.settle()


HOWS = {"a breach": "E:08P01", "a limit": "E:57014", "an administrator": "E:57P01"}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("rest", [b"", message(b"C", b"SELECT 1\0"), BIG, BIG[:100]])
def test_in_the_middle_of_a_row_the_last_word_follows_the_row(how: str, rest: bytes) -> None:
    with world() as w:
        client = w.client()
        half_a_row(w, client)
        is_made_to_go(w, client, how)
        assert (client.kinds, client.closed) == ("", False)
        says(w, BIG[ROW_END:-1])
        assert not client.closed
        says(w, BIG[-1:] + rest)
        assert client.kinds == f"D {HOWS[how]}"
        assert client.closed
        assert w.sessions[0].conn.closing


@pytest.mark.parametrize("how", HOWS)
def test_a_row_that_never_ends_keeps_nobody_for_longer_than_the_limit(how: str) -> None:
    with world() as w:
        client = w.client()
        half_a_row(w, client)
        is_made_to_go(w, client, how)
        time_passes(w, PARTING_SECONDS_MAX - 1)
        assert not client.closed
        time_passes(w, PARTING_SECONDS_MAX + 1)
        assert client.closed
        assert client.kinds == "", "it would be taken for the rest of the row"
        assert w.sessions[0].conn.closing


def test_who_waits_for_its_last_word_is_not_heard_any_more() -> None:
    with world() as w:
        client, session = w.client(), w.sessions[0]
        half_a_row(w, client)
        is_made_to_go(w, client, "a breach")
        received = session.received
        w.say(client, query("drop table a"))
        session.conn._flush()  # the session can take more again
        w.say(client, query("drop table b"))
        is_made_to_go(w, client, "an administrator")
        assert session.received == received
        says(w, BIG[ROW_END:])
        assert client.kinds == "D E:08P01"


def test_a_client_that_leaves_in_between_takes_its_session_along() -> None:
    with world() as w:
        client = w.client()
        half_a_row(w, client)
        is_made_to_go(w, client, "a breach")
        client.leave()
        w.settle()
        assert client.conn.closing
        assert w.sessions[0].conn.closing
        assert client.conn not in w.pool.clients


@pytest.mark.parametrize("how", ["its server ends", "a last word of its server", "an administrator"])
def test_who_reads_slowly_hears_the_last_word_behind_everything_else(how: str) -> None:
    with world() as w:
        client, session = w.client(buffer_bytes=4096), w.sessions[0]
        session.mini.mute = client.stopped = True
        w.send(client, query("begin; select big"))
        w.settle()
        says(w, columns(b"a") + BIG + (error("57P01", "bye", "FATAL") if how.startswith("a last") else b""))
        assert client.conn.out
        if how == "an administrator":
            is_made_to_go(w, client, how)
        else:
            session.conn.lost(orderly=True)
        w.settle()
        assert session.conn.closing
        assert client.conn.server is None
        client.stopped = False
        w.settle()
        assert client.kinds in ("T D E:57P01", "T D E:08006", "T D E:08007 Z:I")
        assert client.closed or client.conn in w.pool.clients
        assert client.closed == (client.conn not in w.pool.clients)


def test_who_takes_nothing_goes_without_it_after_the_limit() -> None:
    with world() as w:
        client = w.client(buffer_bytes=4096)
        client.stopped = True
        w.send(client, query("rows 1 60000"))
        w.settle()
        is_made_to_go(w, client, "an administrator")
        time_passes(w, PARTING_SECONDS_MAX - 1)
        assert client.conn in w.pool.clients
        time_passes(w, PARTING_SECONDS_MAX + 1)
        assert client.conn not in w.pool.clients
        client.stopped = False
        w.settle()
        assert client.closed


def test_who_takes_nothing_more_and_leaves_is_forgotten_at_once() -> None:
    with world() as w:
        client = w.client(buffer_bytes=4096)
        client.stopped = True
        w.send(client, query("rows 1 60000"))
        w.settle()
        is_made_to_go(w, client, "an administrator")
        client.leave()
        w.settle()
        assert client.conn not in w.pool.clients


def sends_on(w: World, client: Client) -> None:
    """Made to go while it has sent more than anybody has read."""
    half_a_row(w, client)
    is_made_to_go(w, client, "a breach")
    client.near.send(query("select 1") * 1_000)
    says(w, BIG[ROW_END:])
    assert client.kinds == "D E:08P01"


def test_a_connection_is_not_reset_under_what_the_client_has_not_read() -> None:
    with world() as w:
        client = w.client()
        sends_on(w, client)
        assert client.closed, "it has read to the end"
        assert w.sessions[0].conn.closing
        client.near.send(query("select 1") * 1_000)  # a reset would be heard here
        w.settle()
        assert client.conn in w.pool.clients
        client.leave()
        w.settle()
        assert client.conn not in w.pool.clients


def in_tcp() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, of which `near` takes little at a time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.socket()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        near.connect(listener.getsockname())
        far, _ = listener.accept()
    near.settimeout(5.0)
    far.setblocking(False)
    return near, far


def test_what_the_kernel_has_not_sent_yet_is_not_lost_to_what_comes_in_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only TCP resets a connection for that."""
    with world() as w:
        monkeypatch.setattr(relay_world, "joined", in_tcp)
        client, session = w.client(), w.sessions[0]
        client.stopped = session.mini.mute = True
        w.send(client, query("begin; select big"))
        w.settle()
        while not client.conn.out:
            says(w, BIG)
        is_made_to_go(w, client, "an administrator")
        while client.conn.out:
            assert client.near.recv(4_096)
            session.move(whole)
            w.reactor._turn()
        assert client.conn.server is None
        client.near.send(query("select 1"))  # if the socket is closed, a reset follows it
        w.reactor._turn()
        heard = b""
        while data := client.near.recv(65_536):
            heard = heard[-1_000:] + data
            w.reactor._turn()
        assert b"57P01" in heard
        client.leave()
        w.settle()
        assert client.conn not in w.pool.clients


def test_who_sends_on_without_end_is_not_read_for_longer_than_the_limit() -> None:
    with world() as w:
        client = w.client()
        sends_on(w, client)
        time_passes(w, PARTING_SECONDS_MAX - 1)
        assert client.conn in w.pool.clients
        time_passes(w, PARTING_SECONDS_MAX + 1)
        assert client.conn not in w.pool.clients


# ---- whose last word it was


GROUP = parse("select 1") + bind() + describe() + execute() + SYNC


@pytest.mark.parametrize("rest", [message(b"Z", b"I"), message(b"C", b"SELECT 1\0") + message(b"Z", b"I")])
@pytest.mark.parametrize("asked", [query("select 1"), GROUP])
def test_a_fatal_that_another_client_heard_is_no_word_to_the_next(asked: bytes, rest: bytes) -> None:
    """The server says that it ends, goes on, and ends later."""
    with world() as w:
        first, second = w.client(), w.client()
        w.sessions[0].mini.mute = True
        w.say(first, query("select 1"))
        says(w, error("57P01", "bye", "FATAL"))
        says(w, rest)
        w.say(second, asked)
        w.sessions[0].mini.ended = True
        w.settle()
        assert second.kinds == "E:08007 Z:I"


@pytest.mark.parametrize("asked", [query("select 1"), GROUP])
def test_a_fatal_in_answer_to_the_poolers_own_query_is_no_word_to_the_client(asked: bytes) -> None:
    with world() as w:
        client, session = w.client(application_name="x"), w.sessions[0]
        assert w.say(client, query("select 1")) == "T D:1 C:SELECT 1 Z:I"
        other = w.client()
        assert w.say(other, query("select 2")) == "T D:2 C:SELECT 1 Z:I"
        session.mini.mute = True
        w.say(client, asked)
        assert session.conn.own
        assert session.conn.owed, "what is asked goes out behind the client's settings"
        says(w, error("57P01", "bye", "FATAL"))
        session.mini.ended = True
        w.settle()
        assert client.kinds == "E:08007 Z:I"
