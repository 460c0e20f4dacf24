"""A client goes away at the worst moments: the session is undone and kept, or closed; nobody inherits it."""

from __future__ import annotations

import pytest

from pooler.demo.client import FLUSH, SYNC, TERMINATE, bind, execute, parse, query
from tests.relay.scripts import copy_data, group
from tests.relay.world import World, world


def gone(w: World, *sent: bytes, terminated: bool = False) -> None:
    """A client says these and leaves; then another must be served by a clean session."""
    client = w.client()
    for step in sent:
        w.say(client, step)
    if terminated:
        w.say(client, TERMINATE)
        assert client.closed
    else:
        client.leave()
    w.settle()


def kept(w: World) -> bool:
    """Whether the session stays."""
    w.check_idle()
    return not w.sessions[0].conn.closing


@pytest.mark.parametrize("terminated", [False, True])
@pytest.mark.parametrize("sent", [[], [query("select 1")], [group("select 1") + SYNC], [query("begin")],
                                  [query("begin"), query("insert a"), query("select 1/0")],
                                  [query("begin"), group("insert a") + SYNC]])
def test_idle_or_in_a_transaction_it_is_rolled_back_and_the_session_kept(
    sent: list[bytes], terminated: bool
) -> None:
    with world() as w:
        gone(w, *sent, terminated=terminated)
        assert kept(w)
        assert w.sessions[0].mini.committed == []
        assert w.say(w.client(), query("select 2")) == "T D:2 C:SELECT 1 Z:I"


UNFINISHED = {
    "parse and bind without a sync": [query("begin"), query("insert a"), parse("select 1") + bind()],
    "an answered group without a sync": [group("insert a") + FLUSH],
    "a group without a sync behind a finished one": [group("select 1") + SYNC + group("insert a") + FLUSH],
    "an error that waits for its sync": [parse("bad") + FLUSH],
    "copy in": [query("copy in"), copy_data("1\n")],
    "copy in, extended": [group("copy in") + SYNC, copy_data("1\n")],
    "half a header": [query("begin"), query("insert a")[:3]],
    "half a query": [query("begin"), query("insert a")[:9]],
    "half a query outside": [query("insert abc")[:-2]],
    "half a copy row": [query("copy in"), copy_data("1\n" * 50)[:40]],
    "half a bind": [parse("select $1") + bind(["x" * 5000])[:3000]],
}


@pytest.mark.parametrize("name", UNFINISHED)
@pytest.mark.parametrize("terminated", [False, True])
def test_nothing_unfinished_is_committed_or_inherited(name: str, terminated: bool) -> None:
    with world() as w:
        gone(w, *UNFINISHED[name], terminated=terminated and "half" not in name)
        session = w.sessions[0]
        assert session.conn.closing or kept(w)
        assert session.mini.committed == []
        w.open_session()
        assert w.say(w.client(), query("select 2")) == "T D:2 C:SELECT 1 Z:I"
        assert w.sessions[0].mini.committed == []


def test_a_session_with_half_a_message_is_not_told_to_terminate() -> None:
    """The Terminate would be taken for the rest of the message, and what comes of that would be run."""
    with world() as w:
        gone(w, query("insert " + "a" * 9_000)[:-2])  # a shorter one is sent whole
        assert w.sessions[0].conn.cut
        assert w.sessions[0].conn.closing


def test_a_client_that_leaves_while_it_waits_leaves_the_queue() -> None:
    with world() as w:
        holder, waiter, last = w.client(), w.client(), w.client()
        w.say(holder, query("begin"))
        w.say(waiter, query("insert waiter"))
        w.say(last, query("insert last"))
        waiter.leave()
        w.settle()
        assert w.pool.core.count_waiting() == 1
        w.say(holder, query("commit"))
        assert last.kinds == "C:INSERT 0 1 Z:I"
        assert w.sessions[0].mini.committed == ["last"]


def test_a_client_that_leaves_with_answers_unread_leaves_a_session_that_still_serves() -> None:
    with world() as w:
        client = w.client(buffer_bytes=4096)
        w.say(client, query("begin"))
        client.stopped = True
        w.say(client, query("rows 200 2000"))
        client.leave()
        w.settle()
        w.open_session()
        assert w.say(w.client(), query("select 2")) == "T D:2 C:SELECT 1 Z:I"
        assert not any(s.conn.client for s in w.sessions)


def test_a_session_left_during_a_paused_read_rolls_back() -> None:
    """The client takes no more when its transaction is idle: the answer to our ROLLBACK is read."""
    with world() as w:
        client = w.client()
        w.say(client, query("begin"))
        w.sessions[0].conn.pause(True)
        client.leave()
        w.settle()
        assert kept(w)


@pytest.mark.parametrize("mode", ["session", "transaction", "statement"])
def test_what_a_client_leaves_on_its_session_is_undone(mode: str) -> None:
    with world(mode=mode) as w:
        gone(w, query("SET search_path=x"), query("select pg_advisory_lock(1)"), query("do"))
        assert kept(w)
        assert b"search_path" not in w.sessions[0].mini.settings


def test_an_execute_behind_a_terminate_does_not_run() -> None:
    with world() as w:
        gone(w, query("begin"), TERMINATE + query("insert a") + query("commit"))
        assert w.sessions[0].mini.committed == []


def test_a_bind_without_parse_does_not_find_the_unnamed_statement_of_another() -> None:
    with world() as w:
        one, two = w.client(), w.client()
        w.say(one, group("select 41") + SYNC)
        assert w.say(two, bind() + execute() + SYNC) == "E:26000 Z:I"
        # also where the pooler cannot know what an error has left there
        w.say(one, group("select 41") + SYNC + bind((), "nope") + parse("select 42") + SYNC)
        assert w.say(two, bind() + execute() + SYNC) == "E:26000 Z:I"
