"""A group that is taken as one is served as it would be message by message: what a session is sent and what
a client hears is the same, and so is what is counted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pooler.demo.client import SYNC, bind, describe, execute, parse
from pooler.relay import plain_group, requests
from pooler.relay.server import ServerConn
from tests.relay.world import world

TEXTS = ("select 1", "select 2", "commit", "create table t ()", "set a.b = 1", "deallocate a")
RUNS = (execute() + SYNC, describe("P") + execute() + SYNC)
GROUPS = st.one_of(
    st.builds(lambda name, text, end: parse(text, name) + end,
              st.sampled_from(("", "a", "b")), st.sampled_from(TEXTS), st.sampled_from((SYNC, *RUNS))),
    st.builds(lambda name, end: bind((), name) + end, st.sampled_from(("", "a", "b", "none")),
              st.sampled_from(RUNS)),
    st.builds(lambda text, end: parse(text) + bind() + end, st.sampled_from(TEXTS), st.sampled_from(RUNS)),
    st.builds(lambda text, name, end: parse(text) + bind((), name) + end,
              st.sampled_from(TEXTS), st.sampled_from(("", "a")), st.sampled_from(RUNS)),
    st.just(bind((), "a", portal="p") + execute("p") + SYNC),
    st.just(bind(("x" * 40,), "a") + execute() + SYNC),
)
TURNS = st.lists(st.tuples(st.integers(0, 1), GROUPS), min_size=1, max_size=12)


def _play(turns: list[tuple[int, bytes]], **limits: Any) -> tuple[list[str], list[Any], list[int]]:
    """What the clients hear, what the session is sent and known to be then, and the counters."""
    sent: list[Any] = []
    write = ServerConn.write

    def noted(server: ServerConn, data: bytes) -> None:
        had = server.statements
        owed = [each if isinstance(each, int) else (type(each), getattr(each, "name", ""))
                for each in server.owed]
        sent.append((
            data, server.residue, server.commits, server.altered, server.unsynced, had.group,
            had.unnamed and had.unnamed.body,
            owed))
        write(server, data)

    with pytest.MonkeyPatch.context() as patch, world(**limits) as w:
        patch.setattr(ServerConn, "write", noted)
        clients = [w.client(), w.client()]
        heard = [w.say(clients[index], said) for index, said in turns if not clients[index].closed]
        pool = w.pool
        return heard, sent, [pool.client_parses, pool.server_parses, pool.binds, pool.queries]


@given(TURNS, st.sampled_from((0, 1, 200)))
@settings(max_examples=150, deadline=None)
@example([(0, parse(text, "a") + SYNC + bind((), "a") + RUNS[1]) for text in TEXTS], 200)
@example([(0, turn) for text in TEXTS for turn in (parse(text, text) + SYNC, bind((), text) + RUNS[1])], 200)
@example([(0, parse(text) + bind() + RUNS[1]) for text in TEXTS for _ in range(2)], 200)
@example([(0, parse("select 1") + bind() + RUNS[1]), (1, parse("select 2") + SYNC),
          (0, parse("select 1") + bind() + RUNS[1]), (1, bind() + RUNS[1])], 200)
def test_a_group_taken_as_one_is_served_as_message_by_message(
    turns: list[tuple[int, bytes]], statements_max: int
) -> None:
    at_once = _play(turns, max_prepared_statements=statements_max)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "take_group", lambda *_: None)
        assert _play(turns, max_prepared_statements=statements_max) == at_once


@pytest.mark.parametrize("said", [bind((), "a") + RUNS[0], bind((), "a") + RUNS[1],
                                  parse("select 7") + bind() + RUNS[1]])
def test_the_commonest_groups_are_taken_as_one(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bytes | None] = []

    def take(*args: Any) -> bytes | None:
        taken.append(plain_group.take_group(*args))
        return taken[-1]

    monkeypatch.setattr(requests, "take_group", take)
    with world() as w:
        one = w.client()
        w.say(one, parse("select 1", "a") + SYNC)
        w.say(one, parse("select 7") + bind() + execute() + SYNC)
        taken.clear()
        assert w.say(one, said).endswith("C:SELECT 1 Z:I")
        assert [group is not None for group in taken] == [True]
        w.check_idle()


def test_a_text_that_a_reload_made_too_long_is_refused() -> None:
    with world() as w:
        one = w.client()
        said = parse("select 1") + bind() + execute() + SYNC
        assert w.say(one, said).endswith("C:SELECT 1 Z:I")
        w.pool.packet_bytes_max = 12
        assert "E:08P01" in w.say(one, said)
