"""`pooler.…` of a client: answered here, in order, and seen by no server."""

from __future__ import annotations

import pytest

from pooler.demo.client import FLUSH, SYNC, bind, close, describe, execute, parse, query
from pooler.pool import janitor
from pooler.relay.asking import Asked
from tests.relay.scripts import GROUP, group
from tests.relay.world import Client, World, world

SET = "SET pooler.tenant = 'a'"
SHOW = "SHOW pooler.tenant"
ASKED = {
    "set": ([query(SET), query(SHOW)], "C:SET Z:I | T D:a C:SHOW Z:I"),
    "reset": ([query(SET), query("RESET pooler.tenant"), query(SHOW)],
                "C:SET Z:I | C:RESET Z:I | T D:u C:SHOW Z:I"),
    "wrong": ([query("SET pooler.deadline = 'x'"), query("select 1")], "E:22023 Z:I | T D:1 C:SELECT 1 Z:I"),
    "unknown": ([query("SHOW pooler.foo")], "E:42704 Z:I"),
    "among others": ([query(SET + "; select 1")], "E:0A000 Z:I"),
    "pipelined": ([query("select 1") + query(SET) + query(SHOW) + query("select 2")],
                  "T D:1 C:SELECT 1 Z:I C:SET Z:I T D:a C:SHOW Z:I T D:2 C:SELECT 1 Z:I"),
    "in a transaction": ([query("begin"), query(SET), query(SHOW), query("rollback"), query(SHOW)],
                         "C:BEGIN Z:T | C:SET Z:T | T D:a C:SHOW Z:T | C:ROLLBACK Z:I | T D:a C:SHOW Z:I"),
    "wrong in a transaction": ([query("begin"), query("SET pooler.deadline = 'x'"), query(SET),
                                query("rollback")],
                               "C:BEGIN Z:T | E:22023 Z:E | E:25P02 Z:E | C:ROLLBACK Z:I"),
    "extended": ([parse(SHOW) + describe("S") + bind() + describe() + execute() + SYNC],
                "1 t T 2 T D:u C:SHOW Z:I"),
    "extended set": ([group(SET) + SYNC, group(SHOW) + SYNC], "1 2 C:SET Z:I | 1 2 D:a C:SHOW Z:I"),
    "by name": ([parse(SHOW, "s") + FLUSH, bind((), "s") + execute() + SYNC, close("S", "s") + SYNC],
                "1 | 2 D:u C:SHOW Z:I | 3 Z:I"),
    "mixed": ([GROUP + group(SHOW) + GROUP + SYNC],
              "1 2 T D:1 C:SELECT 1 1 2 D:u C:SHOW 1 2 T D:1 C:SELECT 1 Z:I"),
    "skipped": ([group("select 1/0") + group(SET) + SYNC, query(SHOW)], "1 2 E:22012 Z:I | T D:u C:SHOW Z:I"),
    "extended wrong": ([group("SET pooler.x = 1") + group("insert a") + SYNC, query("select 1")],
                       "E:42704 Z:I | T D:1 C:SELECT 1 Z:I"),
    "wrong behind others": ([GROUP + group("SET pooler.x = 1") + group("insert a") + SYNC, query("select 1")],
                            "1 2 T D:1 C:SELECT 1 E:42704 Z:I | T D:1 C:SELECT 1 Z:I"),
    "query in a group": ([group("insert a") + query(SHOW), query("select 1")],
                         "1 2 C:INSERT 0 1 T D:u C:SHOW Z:I | T D:1 C:SELECT 1 Z:I"),
    "the unnamed one again": ([group(SHOW) + SYNC, GROUP + SYNC],
                "1 2 D:u C:SHOW Z:I | 1 2 T D:1 C:SELECT 1 Z:I"),
    "discard all": ([query(SET), query("discard all"), query(SHOW)],
                "C:SET Z:I | C:DISCARD ALL Z:I | T D:u C:SHOW Z:I"),
}


@pytest.mark.parametrize("mode", ["transaction", "session"])
@pytest.mark.parametrize("name", ASKED)
def test_it_is_answered_as_by_a_server_and_reaches_none(name: str, mode: str) -> None:
    steps, expected = ASKED[name]
    with world(mode=mode) as w:
        client = w.client()
        assert " | ".join(w.say(client, step) for step in steps) == expected
        assert b"pooler." not in w.sessions[0].received
        if mode == "transaction":
            w.check_idle()


@pytest.mark.parametrize("name", ASKED)
def test_the_same_in_single_bytes(name: str) -> None:
    steps, expected = ASKED[name]
    with world() as w:
        client = w.client()
        heard = []
        for step in steps:
            said = [w.say(client, step[at : at + 1]) for at in range(len(step))]
            heard.append(" ".join(filter(None, said)))
        assert " | ".join(heard) == expected
        w.check_idle()


def held(w: World) -> tuple[Client, Client]:
    """Who has the only session, and another."""
    holder, client = w.client(), w.client()
    w.say(holder, query("begin"))
    return holder, client


def test_none_needs_a_session() -> None:
    with world() as w:
        holder, client = held(w)
        assert w.say(client, query("SET pooler.deadline = '50ms'")) == "C:SET Z:I"
        assert w.say(client, group("SHOW pooler.deadline") + SYNC) == "1 2 D:50ms C:SHOW Z:I"
        w.say(holder, query("commit"))
        w.check_idle()


def test_the_limit_that_ended_a_wait_is_named_with_its_value_and_how_to_retry() -> None:
    with world() as w:
        holder, client = held(w)
        w.say(client, query("SET pooler.deadline = '50ms'") + query("SET pooler.ticket = 't-1'"))
        w.send(client, query("select 1"))
        w.settle()
        janitor.end_late_waits(w.pool, client.conn.requested_at + 0.06)
        w.settle()
        error = client.take()[0].error()
        assert error.sqlstate == "57014"
        assert "pooler.deadline = 50ms" in error.fields["M"]
        assert error.fields["M"].startswith("waited 60 ms for a session")
        assert error.fields["H"].startswith("retry=after after_ms=")
        assert error.fields["H"].endswith(" ticket=t-1\nSHOW WAITERS")
        w.say(holder, query("commit"))
        assert w.say(client, query("select 2")) == "T D:2 C:SELECT 1 Z:I"


def test_who_does_not_wait_is_refused_at_once_and_has_what_is_idle() -> None:
    with world() as w:
        holder, client = held(w)
        w.say(client, query("SET pooler.deadline = 0"))
        w.send(client, query("select 1"))
        w.settle()
        error = client.take()[0].error()
        assert (error.sqlstate, "pooler.deadline = 0ms" in error.fields["M"]) == ("57014", True)
        w.say(holder, query("commit"))
        assert w.say(client, query("select 2")) == "T D:2 C:SELECT 1 Z:I"
        w.check_idle()


def test_what_a_rule_gives_cannot_be_set() -> None:
    with world() as w:
        client = w.client()
        client.conn.asked = Asked("u", fixed=frozenset({"tenant"}))
        assert w.say(client, query(SET)) == "E:42501 Z:I"
        assert w.say(client, query("SET pooler.class = 'a'")) == "C:SET Z:I"
        assert (client.conn.tenant, client.conn.klass) == ("u", "a")
