"""What a sequence gave last is its own client's."""

from __future__ import annotations

import pytest

from pooler.demo.client import SYNC, bind, describe, execute, parse, query
from tests.relay.scripts import group, run
from tests.relay.world import world

LASTVAL = {
    "simple": query("select lastval()"),
    "among others": query("select lastval()") + query("select 1"),
    "extended": group("select lastval()") + SYNC,
    "prepared": run("one"),
}


@pytest.mark.parametrize("name", LASTVAL)
@pytest.mark.parametrize("rule", ["clean", "pin", "reject"])
def test_what_a_sequence_gave_to_one_client_is_never_told_to_another(name: str, rule: str) -> None:
    with world(session_state=rule) as w:
        one, two = w.client(), w.client()
        w.say(two, parse("select lastval()", "one") + SYNC)
        for _ in range(2):
            w.say(one, query("select nextval()"))
            assert "E:55000" in w.say(two, LASTVAL[name])
        w.check_idle()
        assert w.say(two, query("begin") + query("select nextval()") + LASTVAL[name]).count("D:1 ") >= 2
        assert w.say(two, query("commit")).endswith("Z:I")
        assert w.say(two, query("select 1")) == "T D:1 C:SELECT 1 Z:I"


def test_a_client_with_a_session_of_its_own_asks_what_a_sequence_gave_last_whenever_it_likes() -> None:
    with world(mode="session") as w:
        one = w.client()
        w.say(one, query("select nextval()"))
        assert w.say(one, query("select lastval()")) == "T D:1 C:SELECT 1 Z:I"


@pytest.mark.parametrize("behind", [b"", parse("select 5"), query("select 5")])
@pytest.mark.parametrize("first", [b"", describe("S")])
def test_an_unnamed_lastval_that_was_prepared_before_is_told_nothing_of_anothers(
    behind: bytes, first: bytes
) -> None:
    with world() as w:
        one, two = w.client(), w.client()
        w.say(one, query("select nextval()"))
        w.say(two, parse("select lastval()") + SYNC)
        assert "E:55000" in w.say(two, first + bind(()) + execute() + behind + SYNC)
        assert w.say(two, parse("select 6") + SYNC) == "1 Z:I"
        assert w.say(two, bind(()) + execute() + SYNC) == "2 D:6 C:SELECT 1 Z:I"
        w.check_idle()


def test_the_unnamed_statement_outlives_what_makes_a_session_forget_its_sequences() -> None:
    with world() as w:
        client = w.client()
        w.say(client, parse("select lastval()", "one") + parse("select 5") + SYNC)
        named = parse("select nextval()", "two") + bind((), "two") + execute() + bind((), "one") + execute()
        unnamed = bind(()) + execute()
        assert "D:5 " in w.say(client, named + unnamed + SYNC)
        again = bind((), "two") + execute() + bind((), "one") + execute()
        assert "D:5 " in w.say(client, unnamed + again + SYNC)
        assert "D:5 " in w.say(client, unnamed + SYNC)
        taken = parse("select 7", "two")
        assert "D:5 " in w.say(client, unnamed + again + taken + SYNC)
