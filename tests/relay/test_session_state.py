"""Parameters follow their client, and what a client leaves behind is undone before the next."""

from __future__ import annotations

import pytest

from pooler.demo.client import SYNC, query
from tests.relay.scripts import COPY_DONE, copy_data, group
from tests.relay.world import world


def test_a_clients_settings_follow_it_and_never_reach_another() -> None:
    with world(2) as w:
        one, two, three = w.client(), w.client(), w.client()
        w.say(one, query("SET TimeZone='Asia/Tokyo'"))
        assert w.say(two, query("show TimeZone")) == "T D:UTC C:SELECT 1 Z:I"
        w.say(three, query("begin"))
        assert w.say(one, query("show TimeZone")) == "T D:Asia/Tokyo C:SELECT 1 Z:I"
        assert w.say(two, query("show TimeZone")) == "T D:UTC C:SELECT 1 Z:I"


def test_a_startup_parameter_is_there_at_the_first_query() -> None:
    with world() as w:
        client = w.client(TimeZone="Asia/Tokyo", statement_timeout="5")
        assert w.say(client, query("show TimeZone")) == "T D:Asia/Tokyo C:SELECT 1 Z:I"
        assert w.say(client, query("show statement_timeout")) == "T D:5 C:SELECT 1 Z:I"
        assert w.say(w.client(), query("show TimeZone")) == "T D:UTC C:SELECT 1 Z:I"


def test_equal_settings_cost_nothing() -> None:
    with world() as w:
        one, two = w.client(TimeZone="Asia/Tokyo"), w.client(TimeZone="Asia/Tokyo")
        w.say(one, query("select 1"))
        before = len(w.sessions[0].mini.ran)
        for _ in range(10):
            w.say(one, query("select 1"))
            w.say(two, query("select 1"))
        assert len(w.sessions[0].mini.ran) == before + 20


def test_a_startup_parameter_that_the_server_refuses_ends_that_client_before_anything_runs() -> None:
    with world() as w:
        client = w.client(TimeZone="bogus")
        assert w.say(client, query("insert a")) == "E:22023"
        assert client.closed
        assert w.sessions[0].mini.committed == []
        w.check_idle()
        assert not w.sessions[0].conn.closing, "the session is as it was"
        assert w.say(w.client(), query("select 1")) == "T D:1 C:SELECT 1 Z:I"
        assert not w.sessions[0].conn.fatal


def test_a_waiting_client_with_a_refused_parameter_ends_too() -> None:
    with world() as w:
        holder, client = w.client(), w.client(TimeZone="bogus")
        w.say(holder, query("begin"))
        w.say(client, query("insert a"))
        w.say(holder, query("commit"))
        assert client.kinds == "E:22023"
        assert w.sessions[0].mini.committed == []


def test_a_refused_clean_up_is_not_taken_for_the_servers_last_word() -> None:
    with world() as w:
        client = w.client(TimeZone="bogus")
        w.say(client, query("select 1"))
        other = w.client()
        w.say(other, query("begin"))
        w.sessions[0].mini.ended = True
        w.settle()
        assert other.kinds == "E:08006"


LEAVINGS = {
    "advisory lock": query("select pg_advisory_lock(1)"),
    "advisory lock, extended": group("select pg_advisory_lock(1)") + SYNC,
    "a function call": b"F\x00\x00\x00\x0e\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00",
    "do": query("do"),
    "set": query("SET work_mem='1'"),
    "set_config": query("select set_config('work_mem','1',false)"),
    "at the end of a long text": query("select pg_advisory_lock(1) -- " + "x" * 200_000),
    "at the end of many": query("select 1;" * 30_000 + "select pg_advisory_lock(1)"),
}


@pytest.mark.parametrize("name", LEAVINGS)
def test_what_a_transaction_leaves_is_undone_before_the_next_client(name: str) -> None:
    with world() as w:
        assert w.say(w.client(), LEAVINGS[name]).endswith("Z:I")
        w.check_idle()
        mini = w.sessions[0].mini
        assert mini.locks == 0
        assert b"work_mem" not in mini.settings


def test_what_is_left_is_seen_wherever_the_text_is_cut() -> None:
    text = query("select pg_advisory_lock(1)")
    for cut in range(1, len(text)):
        with world() as w:
            client = w.client()
            w.say(client, text[:cut])
            assert w.say(client, text[cut:]).endswith("Z:I")
            w.check_idle()
            assert w.sessions[0].mini.locks == 0, cut


def test_a_clean_transaction_costs_nothing_extra() -> None:
    with world() as w:
        w.say(w.client(), query("select 1"))
        assert w.sessions[0].mini.ran == ["select 1"]


def test_a_session_whose_clean_up_fails_is_closed_and_serves_nobody() -> None:
    with world() as w:
        one, two = w.client(), w.client()
        w.sessions[0].mini.refuses_cleanup = True
        assert w.say(one, query("do")) == "C:DO Z:I"
        assert w.sessions[0].conn.closing
        w.say(two, query("select 1"))
        assert two.kinds == ""
        w.open_session()
        w.settle()
        assert two.kinds == "T D:1 C:SELECT 1 Z:I"


def test_a_client_that_waits_gets_the_session_after_the_clean_up() -> None:
    with world() as w:
        one, two = w.client(), w.client()
        w.say(one, query("begin"))
        w.say(two, query("show work_mem"))
        w.say(one, query("SET work_mem='1'"))
        w.say(one, query("commit"))
        assert two.kinds == "T D: C:SELECT 1 Z:I"


def test_allow_leaves_everything() -> None:
    with world(session_state="allow") as w:
        w.say(w.client(), query("select pg_advisory_lock(1)"))
        assert w.sessions[0].mini.locks == 1


def test_an_error_in_copy_with_syncs_in_flight_leaves_no_answer_for_the_next_client() -> None:
    """The pooler cannot know which of the Syncs the server read before the error."""
    with world() as w:
        one, two = w.client(), w.client()
        assert w.say(one, group("copy in") + SYNC) == "1 2 G"
        heard = w.say(one, copy_data("bad\n") + SYNC + copy_data("x\n") + SYNC + COPY_DONE + SYNC)
        assert heard.startswith("E:22P04 Z:I")
        assert w.say(two, query("select 2")) == "T D:2 C:SELECT 1 Z:I"
        assert w.say(one, query("select 3")) == "T D:3 C:SELECT 1 Z:I"
        w.check_idle()
