"""Parameters follow their client, and what a client leaves behind is undone before the next."""

from __future__ import annotations

import pytest

from pooler.demo.client import SYNC, query
from tests.relay.scripts import COPY_DONE, copy_data, group
from tests.relay.words import PARAMETERS
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


SETTINGS = {
    "set": query("SET work_mem='1'"),
    "set_config": query("select set_config('work_mem','1',false)"),
    "set in a transaction": query("begin") + query("SET work_mem='1'") + query("commit"),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("rule", ["clean", "pin", "reject"])
def test_a_setting_goes_with_its_client_and_reaches_no_other(name: str, rule: str) -> None:
    """R31: whichever session serves it."""
    with world(2, session_state=rule) as w:
        one, two, holder = w.client(), w.client(), w.client()
        assert w.say(one, SETTINGS[name]).endswith("Z:I")
        assert w.say(two, query("show work_mem")) == "T D: C:SELECT 1 Z:I"
        w.say(holder, query("begin"))
        for _ in range(2):
            assert w.say(one, query("show work_mem")) == "T D:1 C:SELECT 1 Z:I"
            assert w.say(two, query("show work_mem")) == "T D: C:SELECT 1 Z:I"
        w.say(holder, query("commit"))
        w.check_idle()


def test_what_a_client_sends_while_its_session_is_asked_waits_and_finds_its_settings() -> None:
    with world() as w:
        one, two = w.client(), w.client()
        w.send(one, query("SET work_mem='1'"))
        w._push(one)
        w.send(two, query("show work_mem"))
        w.settle()
        assert w.say(one, query("show work_mem")) == "C:SET Z:I T D:1 C:SELECT 1 Z:I"
        assert two.kinds == "T D: C:SELECT 1 Z:I"


def test_a_client_that_leaves_while_its_session_is_asked_costs_nothing() -> None:
    with world() as w:
        one = w.client()
        w.send(one, query("SET work_mem='1'"))
        w._push(one)
        w.reactor._turn()
        w.sessions[0].move(w.chop)
        w.reactor._turn()
        assert w.sessions[0].conn.leaver is one.conn
        one.leave()
        w.settle()
        assert w.say(w.client(), query("show work_mem")) == "T D: C:SELECT 1 Z:I"
        w.check_idle()


def test_a_session_that_dies_while_it_is_asked_ends_its_client_too() -> None:
    """Its next query would run without what it has set."""
    with world() as w:
        one = w.client()
        w.send(one, query("SET work_mem='1'"))
        w._push(one)
        w.reactor._turn()
        w.sessions[0].move(w.chop)
        w.reactor._turn()
        w.sessions[0].mini.ended = True
        w.sessions[0].unsent.clear()
        w.sessions[0].far.close()
        w.settle()
        assert (one.kinds, one.closed) == ("C:SET Z:I E:08006", True)


def test_a_set_that_is_local_to_its_transaction_asks_nothing() -> None:
    with world() as w:
        one = w.client()
        w.say(one, query("begin"))
        w.say(one, query("SET LOCAL work_mem='1'"))
        w.say(one, query("commit"))
        assert w.sessions[0].mini.ran == ["begin", "SET LOCAL work_mem='1'", "commit"]


def test_settings_that_cannot_be_read_are_undone_and_the_client_is_told() -> None:
    with world() as w:
        one = w.client()
        w.sessions[0].mini.refuses_question = True
        assert w.say(one, query("SET work_mem='1'")) == "C:SET Z:I N"
        assert w.say(w.client(), query("show work_mem")) == "T D: C:SELECT 1 Z:I"


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_after_a_reset_a_client_has_what_it_started_with(mode: str) -> None:
    with world(mode=mode) as w:
        client = w.client(work_mem="7", TimeZone="Asia/Tokyo")
        w.say(client, query("SET work_mem='1'"))
        w.say(client, query("SET TimeZone='Europe/Rome'"))
        assert "Z:I" in w.say(client, query("DISCARD ALL"))
        assert w.say(client, query("show work_mem")).startswith("T D:7 ")
        assert w.say(client, query("show TimeZone")).startswith("T D:Asia/Tokyo ")


@pytest.mark.parametrize("mode", ["transaction", "session"])
@pytest.mark.parametrize("undo", ["RESET TimeZone", "SET TimeZone TO DEFAULT"])
def test_a_parameter_that_is_reset_is_as_at_the_start_and_the_client_is_told_so(mode: str, undo: str) -> None:
    with world(mode=mode) as w:
        client = w.client(TimeZone="Asia/Tokyo", statement_timeout="5")
        w.say(client, query("SET TimeZone='Europe/Rome'"))
        w.say(client, query("SET statement_timeout='6'"))
        client.take()
        w.send(client, query(undo))
        w.settle()
        said = [message.body for message in client.take() if message.type == "S"]
        assert said[-1] == b"TimeZone\0Asia/Tokyo\0"
        assert w.say(client, query("show TimeZone")).startswith("T D:Asia/Tokyo ")
        assert w.say(client, query("show statement_timeout")).startswith("T D:6 "), "it was not reset"


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_a_reset_of_one_parameter_leaves_another_that_was_set_to_the_servers_own_value(mode: str) -> None:
    with world(mode=mode) as w:
        client = w.client(TimeZone="Asia/Tokyo")
        own = PARAMETERS[b"TimeZone"].decode()
        w.say(client, query(f"SET TimeZone='{own}'"))
        w.say(client, query("RESET work_mem"))
        assert w.say(client, query("show TimeZone")).startswith(f"T D:{own} ")


def test_a_session_of_a_clients_own_is_asked_nothing_without_a_reset() -> None:
    with world(mode="session") as w:
        client = w.client()
        w.say(client, query("SET work_mem='1'"))
        assert w.sessions[0].mini.ran[-1] == "SET work_mem='1'"


def test_what_comes_behind_a_reset_waits_until_the_start_is_there_again() -> None:
    with world(mode="session") as w:
        client = w.client(TimeZone="Asia/Tokyo")
        w.say(client, query("RESET TimeZone"))
        w.send(client, query("RESET TimeZone"))
        w._push(client)
        w.reactor._turn()
        w.sessions[0].move(w.chop)
        w.reactor._turn()
        assert w.sessions[0].conn.own, "the session is being asked"
        assert w.say(client, query("show TimeZone")).endswith("T D:Asia/Tokyo C:SELECT 1 Z:I")


def test_a_pinned_client_keeps_its_session_until_its_state_is_gone() -> None:
    """R71."""
    with world(session_state="pin") as w:
        one, two = w.client(), w.client()
        assert w.say(one, query("select pg_advisory_lock(1)")) == "T D:locked C:SELECT 1 Z:I"
        assert w.pool.pinned == {one.conn}
        w.say(two, query("select 2"))
        assert w.say(one, query("select 1")) == "T D:1 C:SELECT 1 Z:I"
        assert two.kinds == "", "the only session is pinned"
        assert w.say(one, query("select pg_advisory_unlock(1)")) == "T D:unlocked C:SELECT 1 Z:I"
        assert two.kinds == "T D:2 C:SELECT 1 Z:I"
        assert not w.pool.pinned
        w.check_idle()


ENDS_NOTHING = {
    "another command": query("SET work_mem='1'"),
    "one whose tag says nothing": query("create index"),
    "a reset": query("RESET work_mem"),
    "in a transaction": query("begin") + query("create index") + query("commit"),
}


@pytest.mark.parametrize("name", ENDS_NOTHING)
def test_a_pinned_client_keeps_its_session_whatever_else_it_does(name: str) -> None:
    """R71: and nobody else sees what it has there."""
    with world(session_state="pin") as w:
        one, two = w.client(work_mem="7"), w.client()
        w.say(one, query("select pg_advisory_lock(1)"))
        w.send(two, query("select 2"))
        for _ in range(2):
            assert w.say(one, ENDS_NOTHING[name]).endswith(("Z:I", "N"))
            assert (w.pool.pinned, two.kinds) == ({one.conn}, "")
        assert w.say(one, query("RESET work_mem")) == "C:RESET Z:I"
        assert w.say(one, query("show work_mem")) == "T D:7 C:SELECT 1 Z:I"
        w.say(one, query("select pg_advisory_unlock(1)"))
        assert two.kinds == "T D:2 C:SELECT 1 Z:I"


def test_what_a_pinned_client_has_reaches_nobody_when_the_session_does_not_tell() -> None:
    with world(session_state="pin") as w:
        one, two = w.client(), w.client()
        w.say(one, query("select pg_advisory_lock(1)"))
        w.sessions[0].mini.refuses_question = True
        assert w.say(one, query("create index")) == "C:CREATE INDEX Z:I N"
        assert w.sessions[0].mini.locks == 0
        assert w.say(two, query("select 1")) == "T D:1 C:SELECT 1 Z:I"


def test_a_session_that_nothing_makes_clean_is_kept_as_long_as_its_client_stays_and_not_longer() -> None:
    with world(session_state="pin") as w:
        one = w.client()
        assert w.say(one, query("LOAD")) == "C:LOAD Z:I"
        for _ in range(2):
            w.say(one, query("create index"))
            assert w.pool.pinned == {one.conn}
        one.leave()
        w.settle()
        assert w.sessions[0].conn.closing


def test_a_pinned_client_that_leaves_leaves_nothing() -> None:
    with world(session_state="pin") as w:
        one = w.client()
        w.say(one, query("select pg_advisory_lock(1)"))
        one.leave()
        w.settle()
        assert not w.pool.pinned
        assert w.sessions[0].mini.locks == 0
        w.check_idle()


def test_no_more_clients_than_max_pinned_keep_a_session() -> None:
    with world(2, session_state="pin", max_pinned=1) as w:
        one, two = w.client(), w.client()
        w.say(one, query("select pg_advisory_lock(1)"))
        assert w.say(two, query("select pg_advisory_lock(1)")) == "T D:locked C:SELECT 1 Z:I E:53400"
        assert two.closed
        assert w.sessions[0].mini.locks + w.sessions[1].mini.locks == 1


def test_a_warned_client_is_told_once_of_each_kind() -> None:
    with world(session_state="warn") as w:
        one = w.client()
        lock = query("select pg_advisory_lock(1)")
        assert w.say(one, lock) == "T D:locked C:SELECT 1 Z:I N"
        assert w.say(one, lock) == "T D:locked C:SELECT 1 Z:I"
        assert w.say(one, query("SET work_mem='1'")) == "C:SET Z:I N"
        assert w.sessions[0].mini.locks == 2
        assert w.pool.states_left == {"advisory": 2, "parameters": 1}


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
        w.say(one, query("select pg_advisory_lock(1)"))
        w.say(one, query("commit"))
        assert two.kinds == "T D: C:SELECT 1 Z:I"
        assert w.sessions[0].mini.locks == 0


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


def test_a_session_that_dies_while_it_is_fitted_again_is_not_replaced_behind_its_clients_back() -> None:
    with world(mode="session") as w:
        client = w.client(geqo_threshold="7")
        w.say(client, query("select 1"))
        w.open_session()
        w.send(client, query("RESET geqo_threshold"))
        while not client.conn.fitting:
            w._push(client)
            w.reactor._turn()
            w.sessions[0].move(w.chop)
            w.reactor._turn()
        w.sessions[0].far.close()
        w.settle()
        assert client.kinds.endswith("E:08006")
        assert client.closed
