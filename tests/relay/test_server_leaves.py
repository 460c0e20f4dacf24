"""A session goes away: each client hears what it must know, once, and never a wrong answer."""

from __future__ import annotations

import pytest

from pooler.demo.client import FLUSH, SYNC, bind, execute, parse, query
from pooler.pool import pressure
from pooler.relay.reactor import IN
from tests.relay.miniserver import MiniServer
from tests.relay.scripts import COPY_DONE, copy_data, group
from tests.relay.words import error
from tests.relay.world import Client, World, world


def crash(w: World, which: int = 0) -> None:
    """The server's end is closed without a word."""
    w.sessions[which].mini.ended = True
    w.settle()


def mute(w: World) -> None:
    w.sessions[0].mini.mute = True


def served(w: World, client: Client) -> str:
    """A following query, on a new session."""
    w.open_session()
    return w.say(client, query("select 2"))


def test_an_idle_client_notices_nothing() -> None:
    with world() as w:
        client = w.client()
        w.say(client, query("select 1"))
        crash(w)
        assert client.kinds == ""
        assert served(w, client) == "T D:2 C:SELECT 1 Z:I"


def test_a_waiting_client_goes_on_waiting() -> None:
    with world() as w:
        holder, waiter = w.client(), w.client()
        w.say(holder, query("begin"))
        w.say(waiter, query("select 7"))
        crash(w)
        assert waiter.kinds == ""
        w.open_session()
        w.settle()
        assert waiter.kinds == "T D:7 C:SELECT 1 Z:I"


@pytest.mark.parametrize("sent", [query("insert a"), group("insert a") + SYNC, parse("x") + SYNC])
def test_outside_a_transaction_an_unanswered_statement_has_an_unknown_outcome(sent: bytes) -> None:
    with world() as w:
        client = w.client()
        mute(w)
        w.say(client, sent)
        crash(w)
        assert client.kinds == "E:08007 Z:I"
        assert served(w, client) == "T D:2 C:SELECT 1 Z:I"


def test_every_group_of_a_pipeline_is_answered() -> None:
    with world() as w:
        client = w.client()
        mute(w)
        w.say(client, (group("insert a") + SYNC) * 3)
        crash(w)
        assert client.kinds == "E:08007 Z:I E:08007 Z:I E:08007 Z:I"
        assert served(w, client) == "T D:2 C:SELECT 1 Z:I"


def test_a_group_without_its_sync_is_skipped_to_it() -> None:
    """What follows before the Sync belongs to what was lost: it must not run alone."""
    with world() as w:
        client = w.client()
        w.say(client, group("insert a") + FLUSH)
        crash(w)
        assert client.kinds == "E:08006"
        w.open_session()
        assert w.say(client, group("insert b") + query("insert c") + SYNC) == "Z:I"
        assert w.sessions[1].mini.ran == []
        assert w.say(client, query("select 2")) == "T D:2 C:SELECT 1 Z:I"


@pytest.mark.parametrize("began", [query("begin"), group("begin") + SYNC])
def test_in_a_transaction_the_rest_of_it_never_runs_alone(began: bytes) -> None:
    with world() as w:
        client = w.client()
        w.say(client, began)
        w.say(client, query("insert a"))
        crash(w)
        assert client.kinds == "E:08006"
        assert client.closed
        assert w.sessions[0].mini.committed == []


def test_in_a_transaction_an_unanswered_statement_ends_it_too() -> None:
    with world() as w:
        client = w.client()
        w.say(client, query("begin"))
        mute(w)
        w.say(client, query("insert a"))
        crash(w)
        assert client.kinds == "E:08006"
        assert client.closed


COMMITS = {
    "simple": query("commit"),
    "in words": query("END  work"),
    "two-phase": query("prepare  transaction 'x'"),
    "extended": group("commit") + SYNC,
    "with others before": query("insert a; commit"),
    "with others behind": query("commit") + query("select 1"),
    "extended with others behind": group("commit") + SYNC + group("select 1") + SYNC,
}


@pytest.mark.parametrize("name", COMMITS)
@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_an_unanswered_commit_has_an_unknown_outcome(name: str, mode: str) -> None:
    with world(mode=mode) as w:
        client = w.client()
        w.say(client, query("begin"))
        w.say(client, query("insert a"))
        mute(w)
        w.say(client, COMMITS[name])
        crash(w)
        heard = client.kinds
        assert heard.startswith("E:08007")
        assert "08006" not in heard
        assert client.closed == (mode == "session")


def test_a_prepared_commit_is_known_as_one() -> None:
    with world() as w:
        client = w.client()
        w.say(client, parse("commit", "c") + SYNC)
        w.say(client, query("begin"))
        mute(w)
        w.say(client, bind((), "c") + execute() + SYNC)
        crash(w)
        assert client.kinds == "E:08007 Z:I"


def test_a_commit_that_was_answered_is_not_in_doubt_later() -> None:
    with world() as w:
        client = w.client()
        for text in ("begin", "insert a", "commit"):
            w.say(client, query(text))
        w.say(client, group("begin") + SYNC)
        mute(w)
        w.say(client, group("insert b") + SYNC)
        crash(w)
        assert client.kinds == "E:08006"


@pytest.mark.parametrize("before", [b"", query("begin")])
def test_the_servers_own_last_word_is_passed_on_alone(before: bytes) -> None:
    with world() as w:
        client = w.client()
        w.say(client, before or query("select 1"))
        assert w.say(client, query("die")) == "E:57P01"
        assert client.closed


def test_a_last_word_in_pieces_is_still_the_last_word() -> None:
    for cut in range(1, 60):
        with world() as w:
            client = w.client()
            w.say(client, query("begin"))
            w.chop = lambda data, cut=cut: [data[:cut], data[cut:]] if len(data) > cut else [data]  # type: ignore[misc]
            assert w.say(client, query("die")) == "E:57P01"
            assert client.closed


@pytest.mark.parametrize("how", ["crash", "give up"])
def test_in_the_middle_of_an_answer_nothing_is_said_into_it(how: str) -> None:
    """An error would be taken for the rest of the row."""
    with world() as w:
        client = w.client()
        w.chop = lambda data: [data[:30_000]]
        assert w.say(client, query("rows 1 50000")) == "T"
        if how == "crash":
            crash(w)
        else:
            w.sessions[0].conn.give_up("a test")
        w.settle()
        assert client.closed
        assert client.kinds == ""
        assert client.got_bytes == 30_000


def test_a_session_in_session_mode_takes_its_client_along() -> None:
    """Its settings, temporary tables and listens are gone: nothing may run without them."""
    with world(mode="session") as w:
        client = w.client()
        w.say(client, query("SET search_path=x"))
        crash(w)
        assert client.kinds == "E:08006"
        assert client.closed


def test_in_the_middle_of_copy_in_the_rest_is_dropped() -> None:
    with world() as w:
        client = w.client()
        w.say(client, query("copy in"))
        w.say(client, copy_data("1\n"))
        crash(w)
        assert client.kinds == "E:08007 Z:I"
        w.open_session()
        assert w.say(client, copy_data("2\n") + COPY_DONE) == ""
        assert w.pool.core.count().active == 0, "what is left of a COPY needs no session"
        assert w.say(client, query("select 2")) == "T D:2 C:SELECT 1 Z:I"


@pytest.mark.parametrize("cut", [1, 4, 6, 9])
def test_in_the_middle_of_a_message_the_rest_of_it_is_dropped(cut: int) -> None:
    with world() as w:
        client = w.client()
        message = query("select 12345")
        w.say(client, query("begin")[:0] + message[:cut])
        sent_on = bool(w.sessions[0].received)
        crash(w)
        assert client.kinds == ("E:08007 Z:I" if sent_on else "")
        w.open_session()
        assert w.say(client, message[cut:]) == ("" if sent_on else "T D:12345 C:SELECT 1 Z:I")
        assert w.say(client, query("select 2")) == "T D:2 C:SELECT 1 Z:I"


def test_a_message_that_was_not_yet_whole_survives_the_session() -> None:
    """The first bytes of the next message are with the pooler: without them the stream is out of step."""
    with world() as w:
        client = w.client()
        mute(w)
        w.say(client, query("insert a") + query("select 12345")[:3])
        crash(w)
        assert client.kinds == "E:08007 Z:I"
        w.open_session()
        assert w.say(client, query("select 12345")[3:]) == "T D:12345 C:SELECT 1 Z:I"


def test_a_session_that_dies_before_it_has_seen_the_client_is_replaced_unheard() -> None:
    with world() as w:
        mute(w)
        client = w.client(TimeZone="Asia/Tokyo")
        assert w.say(client, query("show TimeZone")) == ""  # its parameters come first
        crash(w)
        assert client.kinds == ""
        w.open_session()
        w.settle()
        assert client.kinds == "T D:Asia/Tokyo C:SELECT 1 Z:I"


def test_an_idle_session_that_has_said_its_last_word_is_given_to_nobody() -> None:
    """R57. Its end may be read a moment later, and a query in between would be lost with it."""
    with world(2) as w:
        dying = w.sessions[1]  # the one that is given first
        dying.unsent.append(error("57P01", "terminating connection", "FATAL"))
        w.settle()
        client = w.client()
        assert w.say(client, query("select 1")) == "T D:1 C:SELECT 1 Z:I"
        assert dying.mini.ran == []
        dying.mini.ended = True
        w.settle()
        assert dying.conn.closing


def test_a_client_whose_settings_end_every_session_is_told_so_and_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = MiniServer._run

    def dies(mini: MiniServer, text: str) -> None:
        if "work_mem" in text:
            mini._die()
        run(mini, text)

    monkeypatch.setattr(MiniServer, "_run", dies)
    monkeypatch.setattr(pressure, "ENDS_SECONDS", -1.0)  # one by one: no restart of the server
    with world(9) as w:
        other, one = w.client(), w.client(work_mem="7")
        assert w.say(one, query("select 1")) == "E:08006"
        assert one.closed
        assert sum(session.mini.ended for session in w.sessions) == 4
        assert w.say(other, query("select 1")) == "T D:1 C:SELECT 1 Z:I"
        w.check_idle()


def test_the_servers_last_word_is_heard_though_a_send_to_it_fails_first() -> None:
    with world() as w:
        one = w.client()
        assert w.say(one, query("begin")) == "C:BEGIN Z:T"
        far = w.sessions[0].far
        far.send(error("57P01", "terminating connection", "FATAL"))
        far.close()
        w.send(one, query("select 1"))
        w._push(one)
        one.conn.on_event(IN)
        w.sessions[0].mini.ended = True
        w.settle()
        assert one.kinds == "E:57P01"
        assert one.closed
