"""A server that says what no server should: its client hears a clear error or its whole answer, nobody else
hears a byte of it, and the session serves nobody any more."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from pooler.demo.client import SYNC, bind, execute, message, parse, query
from pooler.errors import ProtocolViolation
from tests.relay.scripts import group
from tests.relay.words import Failed, columns, error, row
from tests.relay.world import Client, World, world

READY = message(b"Z", b"I")
DONE = message(b"C", b"SELECT 1\0")
ANSWER = columns(b"a") + row(b"STRANGE") + DONE + READY
GROUP = parse("select 1") + bind() + execute() + SYNC


def reasons(w: World) -> list[str]:
    """Why sessions were closed."""
    return [task[2] for task in w.tasks.started if task[0].__name__ == "_close"]


def says(w: World, *words: bytes, which: int = 0) -> None:
    """The server's next bytes, each a segment of its own."""
    w.sessions[which].mini.mute = True
    w.sessions[which].unsent += words
    w.settle()


def check_nobody_else_hears(w: World, of: Client) -> None:
    """The session is closed, and another client is served by another one."""
    assert w.sessions[0].conn.closing
    w.open_session()
    other = w.client()
    assert w.say(other, query("select 2")) == "T D:2 C:SELECT 1 Z:I"
    if not of.closed:
        assert w.say(of, query("select 3")).endswith("T D:3 C:SELECT 1 Z:I")


MALFORMED = {
    "a length of 0": b"C\0\0\0\0",
    "a length of 3": b"D\0\0\0\3",
    "a row of length 0": b"D\0\0\0\0\0\0\0",
    "a row of length 2": b"D\0\0\0\2" + b"\0" * 5,
    "a negative length": b"C\xff\xff\xff\xffSELECT 1\0",
    "a type that there is not": message(b"?", b"x"),
    "a type of a client": message(b"Q", b"select 1\0"),
    "a type that there is not, of a great length": b"\0\x3f\xff\xff\xff" + b"x" * 100,
    "a ready for query without a status": DONE + message(b"Z") + b"\0",
    "a ready for query with two": DONE + message(b"Z", b"II"),
    "a status that there is not": DONE + message(b"Z", b"X"),
    "a parameter status without an end": message(b"S", b"DateStyle\0ISO"),
    "a parameter status with a third part": message(b"S", b"DateStyle\0ISO\0DMY\0"),
    "a new login": message(b"R", b"\0\0\0\0"),
    "another cancel key": message(b"K", b"\0\0\0\7key!"),
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("sent", [query("select 1"), GROUP, query("select 1") * 2], ids=["Q", "PBES", "QQ"])
def test_what_cannot_be_followed_ends_the_session_with_one_clear_error(name: str, sent: bytes) -> None:
    with world() as w:
        client = w.client()
        w.sessions[0].mini.mute = True
        w.say(client, sent)
        says(w, MALFORMED[name] + b"\0" * 8)
        if name == "a negative length":  # it may be a message of 4 GiB, of which little has come
            assert not w.sessions[0].conn.closing
            says(w, b"x" * (1 << 20), b"x" * 10)
        heard = client.kinds.split()
        assert next(each for each in heard if each[0] == "E") == "E:08007", heard
        assert heard[-1] == "Z:I"
        assert reasons(w)[0].startswith("the server sent a"), reasons(w)
        check_nobody_else_hears(w, client)


@pytest.mark.parametrize("name", MALFORMED)
def test_while_idle_too(name: str) -> None:
    with world() as w:
        client = w.client()
        says(w, MALFORMED[name] + b"\0" * 8)
        assert client.kinds == ""
        check_nobody_else_hears(w, client)


UNASKED = {
    "an answer": ANSWER, "a ready for query": READY, "a row": row(b"STRANGE"), "a tag": DONE,
    "half a row": row(b"STRANGE")[:8], "a type byte": b"D", "a copy": message(b"G", b"\0\0\0"),
    "copy data": message(b"d", b"STRANGE"), "a parse complete": b"1\0\0\0\4",
    "an error that ends nothing": error("22012", "no"),
}


@pytest.mark.parametrize("name", UNASKED)
def test_an_idle_session_that_says_what_nobody_asked_for_is_given_to_nobody(name: str) -> None:
    with world() as w:
        client = w.client()
        w.say(client, query("select 1"))
        client.take()
        says(w, UNASKED[name])
        assert client.kinds == ""
        check_nobody_else_hears(w, client)


@pytest.mark.parametrize("name", UNASKED)
def test_what_stands_behind_an_answer_is_heard_by_nobody(name: str) -> None:
    with world() as w:
        client = w.client()
        w.sessions[0].mini.mute = True
        w.say(client, query("select 1"))
        says(w, columns(b"a") + row(b"1") + DONE + READY + UNASKED[name])
        assert client.kinds == "T D:1 C:SELECT 1 Z:I"
        check_nobody_else_hears(w, client)


@pytest.mark.parametrize("name", [each for each in UNASKED if each != "an error that ends nothing"])
def test_in_a_transaction_its_client_hears_that_the_server_is_lost(name: str) -> None:
    with world() as w:
        client = w.client()
        w.sessions[0].mini.mute = True
        w.say(client, query("begin"))
        says(w, message(b"C", b"BEGIN\0") + message(b"Z", b"T") + UNASKED[name])
        assert client.kinds == "C:BEGIN Z:T E:08006"
        assert client.closed
        check_nobody_else_hears(w, client)


def test_a_ready_for_query_before_the_answer_gives_the_answer_to_nobody_else() -> None:
    with world() as w:
        client = w.client()
        w.sessions[0].mini.mute = True
        w.say(client, query("select 1"))
        says(w, READY, columns(b"a") + row(b"STRANGE"), DONE + READY)
        assert client.kinds == "E:08007 Z:I"
        check_nobody_else_hears(w, client)


def test_a_ready_for_query_in_the_middle_of_a_group_gives_the_rest_to_nobody_else() -> None:
    with world() as w:
        client = w.client()
        w.sessions[0].mini.mute = True
        w.say(client, GROUP)
        says(w, b"1\0\0\0\4" + READY, b"2\0\0\0\4" + row(b"STRANGE"), DONE + READY)
        assert client.kinds == "1 E:08007 Z:I"
        check_nobody_else_hears(w, client)


@pytest.mark.parametrize("pieces", [[columns(b"a") + row(b"1"), READY], [columns(b"a") + row(b"1") + READY]])
def test_an_answer_without_a_tag_is_none(pieces: list[bytes]) -> None:
    with world() as w:
        client = w.client()
        w.sessions[0].mini.mute = True
        w.say(client, query("select 1"))
        says(w, *pieces)
        assert client.kinds == "T D:1 E:08007 Z:I"
        check_nobody_else_hears(w, client)


def test_what_answers_one_query_in_pieces_is_no_answer_to_the_next() -> None:
    with world() as w:
        client, conn = w.client(), w.sessions[0].conn
        w.sessions[0].mini.mute = True
        w.say(client, query("select 1; select 2"))
        done = message(b"C", b"SELECT 1\0")
        says(w, done, done + message(b"Z", b"I"))
        assert client.kinds == "C:SELECT 1 C:SELECT 1 Z:I"
        w.say(client, query("select 3"))
        says(w, message(b"Z", b"I"))
        assert conn.closing
        check_nobody_else_hears(w, client)


def test_the_error_stands_behind_what_came_before_it() -> None:
    """An over-long message, too: what came before it is the client's first."""
    with world() as w:
        client = w.client()
        w.sessions[0].mini.mute = True
        w.say(client, query("select 1"))
        says(w, columns(b"a") + row(b"1") + b"C" + (1 << 30).to_bytes(4, "big") + b"x" * 60_000,
             *[b"x" * 60_000] * 20)
        assert client.kinds == "T D:1 E:08007 Z:I"
        check_nobody_else_hears(w, client)


@pytest.mark.parametrize("ahead", [b"", columns(b"a") + row(b"1")])
def test_of_a_message_beyond_the_limit_not_a_byte_is_passed_on(ahead: bytes) -> None:
    with world() as w:
        client = w.client()
        w.sessions[0].mini.mute = True
        w.say(client, query("select 1"))
        says(w, ahead + b"D\x80\0\0\0\0\1\0\0\0\1x")
        assert client.kinds == ("T D:1 " if ahead else "") + "E:08007 Z:I"
        check_nobody_else_hears(w, client)


def test_what_is_pushed_legally_ends_nothing() -> None:
    with world() as w:
        client = w.client()
        notice, status = b"SNOTICE\0VNOTICE\0C00000\0Mhi\0\0", b"TimeZone\0Asia/Tokyo\0"
        said = message(b"N", notice) + message(b"A", b"\0\0\0\1ch\0\0") + message(b"S", status)
        w.sessions[0].unsent += [said, said[:7], said[7:]]
        w.settle()
        assert not w.sessions[0].conn.closing
        assert w.say(client, query("select 1")) == "T D:1 C:SELECT 1 Z:I"


def test_a_last_word_behind_an_answer_is_not_its_clients_and_the_session_is_given_to_nobody() -> None:
    with world() as w:
        client = w.client()
        w.sessions[0].mini.mute = True
        w.say(client, query("select 1"))
        says(w, columns(b"a") + row(b"1") + DONE + READY + error("57P01", "terminating", "FATAL"))
        assert client.kinds == "T D:1 C:SELECT 1 Z:I"
        assert w.sessions[0].conn.cut
        check_nobody_else_hears(w, client)


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_a_last_word_in_a_transaction_is_its_clients(mode: str) -> None:
    with world(mode=mode) as w:
        client = w.client()
        w.sessions[0].mini.mute = True
        w.say(client, query("begin"))
        status = b"T" if mode == "transaction" else b"I"
        says(w, message(b"C", b"BEGIN\0") + message(b"Z", status) + error("57P01", "terminating", "FATAL"))
        assert client.kinds == f"C:BEGIN Z:{status.decode()} E:57P01"
        w.sessions[0].mini.ended = True
        w.settle()
        assert client.kinds == ""
        assert client.closed


def test_a_last_word_while_idle_is_waited_out_without_a_word_of_ours() -> None:
    """Its end proves the session gone; a Terminate that meets it would turn it into a reset."""
    with world() as w:
        before = w.sessions[0].received
        says(w, error("57P01", "terminating connection", "FATAL"))
        assert reasons(w) == ["the server ended it: terminating connection"]
        assert w.sessions[0].conn.cut
        assert w.sessions[0].received == before
        assert w.pool.core.total == 1  # its permit is not free before its end was seen


OWN = {
    "rows that are none": row(b"a", b"b", b"c") + DONE + READY,
    "a row cut short": message(b"D", b"\0\2\0\0\0\1a\0\0") + DONE + READY,
    "a kind that is no number": row(b"?x", b"1") + DONE + READY,
    "a name that is null": message(b"D", b"\0\2\xff\xff\xff\xff\xff\xff\xff\xff") + DONE + READY,
    "an error without fields": message(b"E", b"x") + READY,
    "rows without end": row(b"work_mem", b"x" * 60_000) * 100,
}


@pytest.mark.parametrize("name", OWN)
def test_a_wrong_answer_to_what_the_pooler_asks_is_told_to_who_needs_it(name: str) -> None:
    """A client's settings could not be read: it is told so, and never goes on without them."""
    with world() as w:
        client = w.client()
        w.sessions[0].mini.mute = True
        w.say(client, query("set work_mem = '9MB'"))
        says(w, message(b"C", b"SET\0") + READY)
        assert client.kinds == "C:SET Z:I"
        says(w, OWN[name])
        assert client.kinds == "E:08006"
        assert client.closed
        check_nobody_else_hears(w, client)


async def test_rows_without_end_end_a_tasks_query_and_its_session() -> None:
    async def ask(w: World) -> None:
        async with w.pool.checkout() as session:
            with pytest.raises(ProtocolViolation):
                await session.query("select 1")

    with world() as w:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, w)
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(8):
                says(w, *[row(b"x" * 60_000)] * 10)
                await trio.testing.wait_all_tasks_blocked()
        assert w.sessions[0].conn.closing


@pytest.mark.parametrize("refused", [1, 2])
def test_a_group_that_a_query_ended_costs_no_session_where_the_server_refuses_what_comes_next(
    refused: int, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """18 does so once, and undoes what the group had set."""
    left = refused
    with world() as w:
        client, other = w.client(), w.client()
        mini = w.sessions[0].mini
        runs = mini._run

        def refuse(text: str) -> None:
            nonlocal left
            if text == "SELECT 1" and left:
                left -= 1
                mini.settings[b"TimeZone"] = b"UTC"
                mini.set_here.clear()
                raise Failed("XX000", "StartTransactionCommand: unexpected state STARTED")
            runs(text)

        monkeypatch.setattr(mini, "_run", refuse)
        heard = w.say(client, group("SET TimeZone='Asia/Tokyo'") + query("select 1"))
        assert heard.startswith("1 2 C:SET T D:1 C:SELECT 1 S Z:I")
        if refused == 1:
            assert heard.endswith(" Z:I S"), "it is told so"
            assert w.say(client, query("show TimeZone")) == "T D:UTC C:SELECT 1 Z:I"
            assert w.say(other, query("select 2")) == "T D:2 C:SELECT 1 Z:I"
            w.check_idle()
            assert w.sessions[0].conn.client is None
        else:
            assert w.sessions[0].conn.closing, "it could not be shown to be idle"
            assert client.closed


@pytest.mark.parametrize("before", [b"", error("57P01", "bye", "FATAL")], ids=["alone", "behind a last word"])
def test_a_close_complete_that_nobody_asked_for_answers_no_query(before: bytes) -> None:
    with world() as w:
        client = w.client()
        w.sessions[0].mini.mute = True
        w.say(client, query("select 1"))
        says(w, before + message(b"3"))
        assert w.sessions[0].conn.owed, "the query is not answered yet"
        client.conn.left()
        w.settle()
        assert w.sessions[0].conn.closing, "what it still answers is for nobody else"
