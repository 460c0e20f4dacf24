"""What a sequence gave last is its own client's."""

from __future__ import annotations

import pytest

from pooler.demo.client import SYNC, parse, query
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
