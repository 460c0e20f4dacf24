"""What a name means where an earlier group, which made or closed it, is not answered yet and may fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from pooler.demo.client import SYNC, bind, close, describe, execute, parse, query
from pooler.relay import extended
from tests.relay.scripts import COPY_DONE, copy_data, group, run
from tests.relay.world import whole, world

FAILS = describe("S", "missing")
USES = {"bind": bind((), "a") + execute(), "describe": describe("S", "a")}


@pytest.mark.parametrize("again", [False, True], ids=["new", "known to the session"])
@pytest.mark.parametrize("use", USES)
def test_a_name_whose_parse_an_earlier_group_skips_is_not_there(use: str, again: bool) -> None:
    with world() as w:
        one, two = w.client(), w.client()
        if again:
            w.say(two, parse("select 1", "x") + SYNC)
        heard = w.say(one, FAILS + parse("select 1", "a") + SYNC + USES[use] + SYNC)
        assert heard == "E:26000 Z:I E:26000 Z:I"
        assert w.say(one, parse("select 2", "a") + SYNC + run("a")) == "1 Z:I 2 D:2 C:SELECT 1 Z:I"
        w.check_idle()


@pytest.mark.parametrize("use", USES)
def test_a_name_whose_close_an_earlier_group_skips_is_there(use: str) -> None:
    heard = {"bind": "2 D:1 C:SELECT 1", "describe": "t T"}
    with world() as w:
        one = w.client()
        w.say(one, parse("select 1", "a") + SYNC)
        skipped = FAILS + close("S", "a") + SYNC
        assert w.say(one, skipped + USES[use] + SYNC) == f"E:26000 Z:I {heard[use]} Z:I"
        assert w.say(one, skipped + parse("select 2", "a") + SYNC) == "E:26000 Z:I E:42P05 Z:I"
        assert w.say(one, skipped + close("S", "a") + SYNC) == "E:26000 Z:I 3 Z:I"
        assert w.say(one, parse("select 2", "a") + SYNC) == "1 Z:I"
        w.check_idle()


@pytest.mark.parametrize("forgets", [group("deallocate a", "b") + SYNC, group("deallocate a") + SYNC,
                                     query("deallocate a")])
def test_a_deallocate_finds_what_the_groups_before_it_leave(forgets: bytes) -> None:
    with world() as w:
        one = w.client()
        heard = w.say(one, FAILS + parse("select 1", "a") + SYNC + forgets)
        assert heard.startswith("E:26000 Z:I ")
        assert heard.endswith("E:26000 Z:I")
        w.say(one, close("S", "b") + parse("select 1", "a") + SYNC)
        heard = w.say(one, FAILS + close("S", "a") + SYNC + forgets)
        assert heard.startswith("E:26000 Z:I ")
        assert heard.endswith("C:DEALLOCATE Z:I")
        assert w.say(one, run("a")) == "E:26000 Z:I"
        w.check_idle()


def test_the_unnamed_statement_of_a_skipped_group_is_not_somebody_elses() -> None:
    with world() as w:
        one, two = w.client(), w.client()
        w.say(two, parse("select 2") + SYNC)
        both = FAILS + parse("select 1") + SYNC + bind() + execute() + SYNC
        assert w.say(one, both) == "E:26000 Z:I E:26000 Z:I"
        w.check_idle()


def test_a_statement_whose_eviction_is_skipped_is_there_for_the_next_group() -> None:
    with world(max_prepared_statements=1) as w:
        one = w.client()
        w.say(one, parse("select 1", "a") + SYNC)
        evicts = FAILS + parse("select 2", "b") + SYNC
        assert w.say(one, evicts + run("a")) == "E:26000 Z:I 2 D:1 C:SELECT 1 Z:I"
        assert w.say(one, evicts + parse("select 1", "c") + SYNC) == "E:26000 Z:I 1 Z:I"
        assert w.say(one, run("c")) == "2 D:1 C:SELECT 1 Z:I"
        w.check_idle()


def test_groups_that_use_one_name_are_sent_without_waiting_for_each_other() -> None:
    with world() as w:
        one = w.client()
        w.say(one, parse("select 1", "a") + SYNC)
        w.sessions[0].mini.mute = True
        w.say(one, (bind((), "a") + execute() + SYNC + group("select 2") + SYNC) * 5)
        assert one.conn is not None
        assert not one.conn.missing, "nothing is held back"


@pytest.mark.parametrize("copies", [group("copy in"), group("copy in") + SYNC, query("copy in")],
                         ids=["extended", "and a Sync", "simple"])
@pytest.mark.parametrize("breaks", ["parse", "close"])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_message_that_the_pooler_answers_itself_breaks_copy_in_off_as_any_other(
    copies: bytes, breaks: str, in_pieces: bool,
) -> None:
    with world() as w:
        one, two = w.client(), w.client()
        w.say(two, parse("select 2", "x") + SYNC)
        w.say(one, parse("select 1", "y") + SYNC)
        said = parse("select 2", "a") if breaks == "parse" else close("S", "y")
        behind = copy_data("1") + COPY_DONE + SYNC
        if in_pieces:
            w.say(one, copies)
            heard = w.say(one, said + behind)
        else:
            heard = w.say(one, copies + said + behind)
        assert "C:COPY" not in heard
        assert w.sessions[0].mini.committed == []


@pytest.mark.parametrize("before", [group("select 3"), group("select 3") + SYNC, query("select 3")])
def test_what_the_pooler_answers_itself_behind_what_is_no_copy_is_answered_as_ever(before: bytes) -> None:
    with world() as w:
        one, two = w.client(), w.client()
        w.say(two, parse("select 1", "x") + SYNC)
        heard = w.say(one, before + parse("select 1", "a") + close("S", "a") + parse("select 1", "a") + SYNC)
        assert heard.endswith(" 1 3 1 Z:I")
        assert "E:" not in heard
        assert w.say(one, run("a")) == "2 D:1 C:SELECT 1 Z:I"
        w.check_idle()


def test_an_error_names_a_statement_as_its_client_does_though_its_close_was_sent_behind() -> None:
    with world() as w:
        one, two = w.client(), w.client()
        w.say(one, parse("select 1", "a") + SYNC)
        w.say(two, query("create index"))
        w.sessions[0].mini.statements.clear()
        w.send(one, bind((), "a") + close("S", "a") + SYNC)
        w.settle()
        (said,) = [each for each in one.heard if each.type == "E"]
        assert said.error().fields["M"] == 'prepared statement "a" does not exist'


def test_who_has_prepared_nothing_yet_finds_what_it_prepares_behind_its_deallocate_all() -> None:
    forgets = query("deallocate all") + query("select 1")
    answered = "C:DEALLOCATE ALL Z:I T D:1 C:SELECT 1 Z:I "
    with world() as w:
        one, two, three = w.client(), w.client(), w.client()
        w.say(three, parse("select 2", "x") + SYNC)
        assert w.say(one, forgets + group("select 2", "a") + SYNC) == answered + "1 2 D:2 C:SELECT 1 Z:I"
        both = group("select 2", "a") + parse("select 3", "a") + SYNC
        assert w.say(two, forgets + both) == answered + "1 2 D:2 C:SELECT 1 E:42P05 Z:I"
        assert w.say(two, parse("select 3", "a") + SYNC) == "E:42P05 Z:I"
        w.check_idle()


class Looked(deque[Any]):
    """What a server owes, and how much of it was looked at from its end."""

    steps = 0

    def __reversed__(self) -> Iterator[Any]:
        for entry in super().__reversed__():
            self.steps += 1
            yield entry


def test_a_bind_costs_the_same_however_many_of_its_group_are_unanswered() -> None:
    with world() as w:
        one = w.client()
        owed = w.sessions[0].conn.owed = Looked()
        one.conn._take(parse("select 1", "a") + 500 * (bind((), "a") + execute()))
        assert len(owed) == 1_001
        assert owed.steps <= 1_001
        assert w.say(one, SYNC) == "1" + 500 * " 2 D:1 C:SELECT 1" + " Z:I"
        w.check_idle()


@pytest.mark.parametrize("before", [b"", query("select 2")])
def test_what_the_pooler_answers_itself_costs_the_same_however_much_of_it_is_unanswered(
    before: bytes,
) -> None:
    names = [f"n{number}" for number in range(200)]
    with world() as w:
        one = w.client()
        w.say(one, parse("select 1", "a") + SYNC)
        owed = w.sessions[0].conn.owed = Looked()
        one.conn._take(before + b"".join(parse("select 1", name) for name in names)
                       + b"".join(close("S", name) for name in names))
        assert owed.steps <= 3 * len(names)
        heard = w.say(one, SYNC)
        assert heard.endswith(len(names) * "1 " + len(names) * "3 " + "Z:I")
        w.check_idle()


def test_of_who_never_lets_everything_be_answered_no_more_is_remembered_than_what_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extended, "YOUNG_MAX", 50)
    with world() as w:
        one, session = w.client(), w.sessions[0]
        one.conn._take(parse("select 1", "n0") + SYNC)
        for number in range(1, 200):
            session.move(whole)
            closes = close("S", f"n{number - 2}") if number > 1 else b""
            one.conn._take(parse("select 1", f"n{number}") + closes + SYNC)
            w.reactor._turn()
            one.read()
            assert session.conn.owed
        assert not one.conn.missing
        assert len(session.conn.statements.young) <= 52
