"""Names of statements are each client's own, whichever session serves it, whatever failed before."""

from __future__ import annotations

import pytest

from pooler.demo.client import FLUSH, SYNC, bind, close, describe, execute, parse, query
from tests.relay.scripts import group, run
from tests.relay.world import Client, World, world


def hold(w: World, client: Client) -> None:
    """The client has a transaction open on the session that is handed out next."""
    assert w.say(client, query("begin")) == "C:BEGIN Z:T"


@pytest.mark.parametrize("sessions", [1, 3])
def test_two_clients_with_one_name_each_get_their_own_text(sessions: int) -> None:
    with world(sessions) as w:
        one, two = w.client(), w.client()
        w.say(one, parse("select 1", "s1") + SYNC)
        w.say(two, parse("select 2", "s1") + SYNC)
        for _ in range(100):
            assert w.say(one, run("s1")) == "2 D:1 C:SELECT 1 Z:I"
            assert w.say(two, run("s1")) == "2 D:2 C:SELECT 1 Z:I"
        assert sum(s.mini.parsed for s in w.sessions) == 2


def test_a_statement_follows_its_client_to_every_session() -> None:
    with world(3) as w:
        client, *others = [w.client() for _ in range(3)]
        w.say(client, parse("select $1", "s") + SYNC)
        for other in others:
            assert w.say(client, run("s", "5")) == "2 D:5 C:SELECT 1 Z:I"
            hold(w, other)
        assert w.say(client, describe("S", "s") + SYNC) == "t T Z:I"
        assert w.say(client, run("s", "6")) == "2 D:6 C:SELECT 1 Z:I"
        assert [s.mini.parsed for s in w.sessions] == [1, 1, 1]


def test_describe_alone_finds_the_statement_on_another_session_until_it_is_closed() -> None:
    with world(2) as w:
        one, two = w.client(), w.client()
        w.say(one, parse("select $1", "d") + SYNC)
        hold(w, two)
        assert w.say(one, describe("S", "d") + SYNC) == "t T Z:I"
        assert w.say(one, close("S", "d") + SYNC) == "3 Z:I"
        assert w.say(one, describe("S", "d") + SYNC) == "E:26000 Z:I"


def test_the_unnamed_statement_follows_its_client_too() -> None:
    with world(2) as w:
        one, two = w.client(), w.client()
        w.say(one, parse("select $1") + SYNC)
        hold(w, two)
        w.say(two, group("select 9") + SYNC)
        assert w.say(one, run("", "4")) == "2 D:4 C:SELECT 1 Z:I"
        w.say(two, query("commit"))
        assert w.say(two, run("")) == "E:26000 Z:I", "a simple query has dropped it"


def test_the_same_text_is_parsed_once_for_all_clients() -> None:
    with world() as w:
        for n in range(5):
            client = w.client()
            assert w.say(client, parse("select $1", f"n{n}") + SYNC) == "1 Z:I"
            assert w.say(client, run(f"n{n}", "1")) == "2 D:1 C:SELECT 1 Z:I"
        assert w.sessions[0].mini.parsed == 1
        w.check_idle()


def test_a_name_in_use_is_refused_and_keeps_its_meaning() -> None:
    with world() as w:
        client = w.client()
        w.say(client, parse("select 1", "a") + SYNC)
        assert w.say(client, parse("select 2", "a") + SYNC) == "E:42P05 Z:I"
        assert w.say(client, run("a")) == "2 D:1 C:SELECT 1 Z:I"


def test_a_name_whose_parse_failed_may_be_used_again() -> None:
    with world() as w:
        client = w.client()
        assert w.say(client, parse("bad", "a") + SYNC) == "E:42601 Z:I"
        assert w.say(client, run("a")) == "E:26000 Z:I"
        assert w.say(client, parse("select 2", "a") + SYNC) == "1 Z:I"
        assert w.say(client, run("a")) == "2 D:2 C:SELECT 1 Z:I"


def test_evicted_statements_come_back_when_they_are_used() -> None:
    with world(max_prepared_statements=3) as w:
        client = w.client()
        for n in range(6):
            assert w.say(client, parse(f"select {n}", f"s{n}") + SYNC) == "1 Z:I"
        w.check_idle()
        assert len(w.sessions[0].mini.statements) == 3
        for n in (0, 5, 1, 4, 2, 3):
            assert w.say(client, run(f"s{n}")) == f"2 D:{n} C:SELECT 1 Z:I"
            w.check_idle()


def test_an_eviction_that_was_skipped_is_not_believed() -> None:
    """The Close of the evicted statement was skipped after an error: the session still has it."""
    with world(max_prepared_statements=1) as w:
        client = w.client()
        w.say(client, parse("select 1", "a") + SYNC)
        assert w.say(client, bind((), "nope") + parse("select 2", "b") + SYNC) == "E:26000 Z:I"
        w.check_idle()
        assert w.say(client, run("a")) == "2 D:1 C:SELECT 1 Z:I"
        assert w.say(client, parse("select 2", "b") + SYNC) == "1 Z:I"
        assert w.say(client, run("a")) == "2 D:1 C:SELECT 1 Z:I"
        w.check_idle()


@pytest.mark.parametrize("text", ["deallocate all", "discard all"])
@pytest.mark.parametrize("extended", [False, True])
def test_one_clients_deallocate_forgets_its_own_names_only(text: str, extended: bool) -> None:
    with world() as w:
        one, two = w.client(), w.client()
        w.say(one, parse("select 1", "a") + SYNC)
        w.say(two, parse("select 2", "b") + SYNC)
        w.say(two, group(text) + SYNC if extended else query(text))
        assert w.say(two, run("b")) == "E:26000 Z:I"
        assert w.say(one, run("a")) == "2 D:1 C:SELECT 1 Z:I"
        w.check_idle()


def test_a_statement_sent_behind_a_deallocate_is_known_to_be_there() -> None:
    with world() as w:
        one, two = w.client(), w.client()
        heard = w.say(one, query("deallocate all") + parse("select 1", "a") + SYNC)
        assert heard == "C:DEALLOCATE ALL Z:I 1 Z:I"
        w.check_idle()
        assert w.say(two, parse("select 1", "b") + SYNC) == "1 Z:I"
        assert w.say(two, run("b")) == "2 D:1 C:SELECT 1 Z:I"


def test_a_clean_up_that_drops_statements_lets_them_come_back() -> None:
    with world() as w:
        client = w.client()
        w.say(client, parse("select 1", "a") + SYNC)
        w.say(client, query("do"))
        w.check_idle()
        assert w.sessions[0].mini.statements == {}
        assert w.say(client, run("a")) == "2 D:1 C:SELECT 1 Z:I"


def test_an_unnamed_parse_that_was_skipped_leaves_the_named_statement_of_that_text() -> None:
    with world() as w:
        one, two = w.client(), w.client()
        w.say(one, parse("select 1", "s") + SYNC)
        assert w.say(two, describe("S", "nope") + parse("select 1") + SYNC) == "E:26000 Z:I"
        w.check_idle()
        assert w.say(one, run("s")) == "2 D:1 C:SELECT 1 Z:I"


def test_nobody_reaches_a_statement_by_the_poolers_own_name() -> None:
    with world() as w:
        one, two = w.client(), w.client()
        w.say(one, parse("select 1", "a") + SYNC)
        (name,) = w.sessions[0].mini.statements
        assert name.startswith("pooler_")
        assert w.say(two, run(name)) == "E:26000 Z:I"
        assert w.say(two, describe("S", name) + SYNC) == "E:26000 Z:I"
        assert w.say(two, close("S", name) + SYNC) == "3 Z:I"
        assert w.say(one, run("a")) == "2 D:1 C:SELECT 1 Z:I"
        assert w.say(two, parse("select 7", name) + run(name)) == "1 2 D:7 C:SELECT 1 Z:I"


def test_answers_the_pooler_gives_itself_stand_in_their_place() -> None:
    with world() as w:
        client = w.client()
        w.say(client, parse("rows 3 50000", "a") + SYNC)
        heard = w.say(client, run("a")[:-5] + parse("rows 3 50000", "b") + close("S", "b") + SYNC)
        assert heard == "2 D D D C:SELECT 3 1 3 Z:I"
        # one that nothing stands before comes at once
        assert w.say(client, parse("rows 3 50000", "b") + FLUSH) == "1"
        assert w.say(client, SYNC) == "Z:I"
        w.check_idle()


def test_a_row_description_in_pieces_is_not_torn_by_an_answer_of_the_poolers() -> None:
    for cut in range(1, 40):
        with world() as w:
            client = w.client()
            w.say(client, parse("select 1", "a") + SYNC)
            w.chop = lambda data, cut=cut: [data[:cut], data[cut:]] if len(data) > cut else [data]  # type: ignore[misc]
            assert w.say(client, describe("S", "a") + close("S", "a") + FLUSH) == "t T 3"
            assert w.say(client, SYNC) == "Z:I"


def test_a_client_may_not_have_names_without_end() -> None:
    with world() as w:
        client = w.client()
        for n in range(0, 10_000, 500):
            heard = w.say(client, b"".join(parse("select 1", f"n{k}") for k in range(n, n + 500)) + SYNC)
            assert heard.endswith("Z:I")
        assert w.say(client, parse("select 1", "one more") + SYNC) == "E:53400"
        assert w.say(w.client(), query("select 1")) == "T D:1 C:SELECT 1 Z:I"


def test_a_portal_is_read_in_portions_while_others_wait() -> None:
    with world() as w:
        one, two = w.client(), w.client()
        w.say(one, parse("select 5") + bind((), "", "cur") + describe("P", "cur") + FLUSH)
        w.say(two, query("select 6"))
        assert two.kinds == ""
        assert w.say(one, execute("cur") + FLUSH) == "D:5 C:SELECT 1"
        assert two.kinds == ""
        assert w.say(one, SYNC) == "Z:I"
        assert two.kinds == "T D:6 C:SELECT 1 Z:I"


def test_session_pooling_passes_names_as_they_are() -> None:
    with world(mode="session") as w:
        client = w.client()
        w.say(client, parse("select 1", "mine") + SYNC)
        assert w.sessions[0].mini.statements == {"mine": "select 1"}
        assert w.say(client, run("mine")) == "2 D:1 C:SELECT 1 Z:I"


def test_a_client_goes_on_behind_its_deallocate_though_the_next_one_has_its_session_at_once() -> None:
    with world() as w:
        one, two = w.client(), w.client()
        assert w.say(one, parse("select 1", "a") + SYNC) == "1 Z:I"
        w.say(one, query("begin"))
        w.send(two, query("begin"))
        w.settle()
        assert w.say(one, query("commit") + query("DEALLOCATE ALL")).endswith("Z:I")
        assert two.kinds == "C:BEGIN Z:T"
        w.say(one, query("select 3"))
        w.say(two, query("commit"))
        assert one.kinds == "T D:3 C:SELECT 1 Z:I"


def test_a_client_goes_on_behind_its_discard_with_the_settings_it_has_then() -> None:
    with world(2) as w:
        one = w.client(work_mem="7")
        assert w.say(one, parse("select 1", "a") + SYNC) == "1 Z:I"
        w.say(one, query("SET work_mem='1'"))
        w.send(one, query("DISCARD ALL") + query("show work_mem"))
        w._push(one)
        w.reactor._turn()
        for session in w.sessions:
            session.move(w.chop)
        w.reactor._turn()
        asked = next(session.conn for session in w.sessions if session.conn.leaver is one.conn)
        assert one.conn.server is None, "it waits for what is set on its last session"
        w.settle()
        assert asked.leaver is None
        assert one.kinds.endswith("Z:I T D:7 C:SELECT 1 Z:I")


@pytest.mark.parametrize("use", [bind() + execute(), describe("S")])
def test_an_unnamed_statement_is_there_behind_a_query_that_was_skipped(use: bytes) -> None:
    """Whether the query dropped it is known only when what stands before it is answered."""
    with world() as w:
        client, other = w.client(), w.client()
        w.say(client, parse("select 1") + SYNC)
        w.say(other, query("select 2"))  # the session has none now
        heard = w.say(client, bind((), "nope") + query("select 2") + SYNC + use + SYNC)
        assert heard.startswith("E:26000 Z:I ")
        assert "E:" not in heard[8:]
        w.say(client, parse("select 1") + SYNC)
        w.say(other, query("select 2"))
        heard = w.say(client, bind() + query("select 2") + use + SYNC)
        assert heard.endswith("C:SELECT 1 Z:I E:26000 Z:I")


def test_a_parse_of_a_name_in_use_leaves_the_unnamed_statement() -> None:
    with world() as w:
        one, two = w.client(), w.client()
        again = parse("select 2", "b") + parse("select 3", "b")
        assert w.say(one, parse("select 1") + again + SYNC) == "1 1 E:42P05 Z:I"
        w.say(two, query("select 4"))
        assert w.say(one, bind(()) + execute() + SYNC) == "2 D:1 C:SELECT 1 Z:I"
        w.check_idle()


def test_deallocate_all_as_the_unnamed_statement_leaves_that_one() -> None:
    with world() as w:
        client = w.client()
        assert w.say(client, parse("select 1", "a") + SYNC) == "1 Z:I"
        again = bind(()) + execute()
        heard = w.say(client, parse("deallocate all") + again + again + SYNC)
        assert heard == "1 2 C:DEALLOCATE ALL 2 C:DEALLOCATE ALL Z:I"
        assert w.say(client, run("a")) == "E:26000 Z:I"
        w.check_idle()


def test_a_query_about_names_that_was_skipped_does_not_open_the_next_ones_unnamed_statement() -> None:
    with world() as w:
        one, two = w.client(), w.client()
        assert w.say(one, parse("select 1", "a") + SYNC) == "1 Z:I"
        assert w.say(two, parse("select 7") + SYNC) == "1 Z:I"
        assert w.say(one, bind((), "nope") + query("deallocate all") + SYNC) == "E:26000 Z:I"
        assert w.say(one, bind(()) + execute() + SYNC) == "E:26000 Z:I"
        assert w.say(two, bind(()) + execute() + SYNC) == "2 D:7 C:SELECT 1 Z:I"
        w.check_idle()


def test_a_deallocate_in_pieces_of_who_prepared_nothing_is_known_to_what_follows() -> None:
    with world() as w:
        one, two = w.client(), w.client()
        assert w.say(two, parse("select 1", "b") + SYNC) == "1 Z:I"
        forgets = query("deallocate all")
        w.say(one, forgets[:9])
        heard = w.say(one, forgets[9:] + parse("select 1", "a") + bind((), "a") + execute() + SYNC)
        assert heard == "C:DEALLOCATE ALL Z:I 1 2 D:1 C:SELECT 1 Z:I"
        w.check_idle()


@pytest.mark.parametrize("use", [bind((), "a") + execute(), describe("S", "a")])
def test_a_statement_whose_parse_an_error_skipped_is_there_for_the_next_group(use: bytes) -> None:
    """The client has it all the while, and knows nothing of the pooler's Parse."""
    with world(max_prepared_statements=1) as w:
        client = w.client()
        for name in ("a", "b"):
            assert w.say(client, parse(f"select {name}", name) + SYNC) == "1 Z:I"
        heard = w.say(client, bind((), "nope") + bind((), "a") + execute() + SYNC + use + SYNC + run("a"))
        assert heard.startswith("E:26000 Z:I ")
        assert "E:" not in heard[8:]
        assert heard.endswith(" 2 D:a C:SELECT 1 Z:I")
        w.check_idle()


def test_the_unnamed_statement_is_there_though_the_poolers_own_parse_of_it_was_skipped() -> None:
    with world() as w:
        client, other = w.client(), w.client()
        w.say(client, parse("select 1") + SYNC)
        w.say(other, query("select 2"))
        use = bind(()) + execute() + SYNC
        assert w.say(client, bind((), "nope") + use + use) == "E:26000 Z:I 2 D:1 C:SELECT 1 Z:I"


def test_a_text_that_fails_fails_in_every_group_that_has_it() -> None:
    with world() as w:
        client = w.client()
        said = [parse("bad", name) + SYNC for name in "abc"]
        assert w.say(client, b"".join(said)) == " ".join(["E:42601 Z:I"] * 3)
        assert w.say(client, run("b")) == "E:26000 Z:I"
        w.check_idle()


def test_a_name_whose_parse_was_lost_with_its_session_may_be_used_again() -> None:
    with world() as w:
        client = w.client()
        w.say(client, parse("select 1", "a") + parse("select 2") + SYNC)
        w.sessions[0].mini.mute = True
        w.say(client, parse("select 3", "b") + close("S", "a") + parse("select 4") + SYNC)
        w.sessions[0].far.close()
        w.settle()
        assert client.kinds == "E:08007 Z:I"
        w.open_session()
        assert w.say(client, parse("select 5", "b") + SYNC + run("a")) == "1 Z:I 2 D:1 C:SELECT 1 Z:I"
        assert w.say(client, bind(()) + execute() + SYNC) == "2 D:2 C:SELECT 1 Z:I"


def test_a_query_about_names_that_ends_a_group_makes_sure_of_its_end_as_any_other() -> None:
    with world() as w:
        client = w.client()
        w.say(client, parse("select 1", "a") + SYNC)
        w.say(client, bind((), "a") + execute() + query("DEALLOCATE ALL"))
        assert w.sessions[0].mini.ran[-1] == "SELECT 1", "the pooler's own"


def test_what_drops_the_unnamed_statement_behind_a_skipped_one_drops_the_one_before_too() -> None:
    with world() as w:
        one = w.client()
        again = parse("select 1") + bind((), "nope") + parse("select 2") + SYNC
        assert w.say(one, again + query("commit")) == "1 E:26000 Z:I C:COMMIT Z:I"
        assert w.say(one, bind(()) + execute() + SYNC) == "E:26000 Z:I"
        assert w.say(one, again) == "1 E:26000 Z:I"
        assert w.say(one, bind(()) + execute() + SYNC) == "2 D:1 C:SELECT 1 Z:I"
        w.check_idle()


def test_the_query_behind_a_skipped_one_drops_the_unnamed_statement() -> None:
    with world() as w:
        one = w.client()
        assert w.say(one, parse("select 1") + SYNC) == "1 Z:I"
        both = bind((), "nope") + query("select 2") + SYNC + query("select 3")
        assert w.say(one, both) == "E:26000 Z:I T D:3 C:SELECT 1 Z:I"
        assert w.say(one, bind(()) + execute() + SYNC) == "E:26000 Z:I"
        w.check_idle()
