"""Scripts by chance: several clients, each writing groups of messages, over few sessions.

A client uses a table of its own, for what is compared is what each hears by itself. What a pool of
transactions does not keep for its clients on purpose (cursors with hold, PREPARE, ...) is left out.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from random import Random

from hypothesis import strategies as st

from pooler.demo.client import FLUSH, SYNC, TERMINATE, bind, close, describe, execute, parse, query
from tests.differential.script import Write
from tests.differential.scripts import COPY_DONE, COPY_FAIL, PI, bind_raw, data

CLIENTS = 3
ENDING = COPY_FAIL + SYNC + query("rollback")  # whatever a client was in, it is idle after it
SETUP = "; ".join(f"create table if not exists g{n} (a int primary key)" for n in range(CLIENTS))
EMPTY = "; ".join(f"truncate g{n}" for n in range(CLIENTS))
COMMITTED = " union all ".join(f"select {n}, a from g{n}" for n in range(CLIENTS)) + " order by 1, 2"

_TEXTS = (
    "select 1", "select 2", "select $1::int", "select $1::text, $2::int", "select generate_series(1, 5)",
    "select repeat('x', 9000)", "select 1/0", "selec", "", "begin", "commit", "rollback", "savepoint s",
    "rollback to s", "insert into {t} values (1)", "insert into {t} values (2)",
        "insert into {t} values ($1)",
    "delete from {t}", "table {t}", "copy {t} from stdin", "copy {t} to stdout", "deallocate all",
        "deallocate a",
    "set application_name = 'x'", "set timezone = 'Asia/Tokyo'", "show timezone", "show application_name",
    "declare c cursor for select generate_series(1, 4)", "fetch 2 from c", "close c", "select 'ä'",
    "select repeat('y', 70000)",
)
_MULTI = (
    "select 1; select 2", "begin; insert into {t} values (3)", "select 1; select 1/0; select 2",
        "commit; begin",
    "insert into {t} values (4); commit", "; ;", "copy {t} from stdin; select 1",
    "do $$ begin raise notice 'n'; end $$", "deallocate all; select 1", "discard plans",
    "select '" + "z" * 20_000 + "'",
)
_NAMES = st.sampled_from(("", "", "a", "b"))
_PORTALS = st.sampled_from(("", "", "p"))
_VALUES = st.lists(st.sampled_from((None, "1", "2", "x", "")), max_size=2)


def _parses(table: str) -> st.SearchStrategy[bytes]:
    texts = st.sampled_from(_TEXTS).map(lambda text: text.format(t=table))
    types: st.SearchStrategy[Sequence[int]] = st.sampled_from(((), (), (23,), (25, 23)))
    return st.builds(parse, texts, _NAMES, types)


def _queries(table: str) -> st.SearchStrategy[bytes]:
    return st.sampled_from(_TEXTS + _MULTI).map(lambda text: query(text.format(t=table)))


def _binds() -> st.SearchStrategy[bytes]:
    plain = st.builds(bind, _VALUES, _NAMES, _PORTALS)
    binary = st.builds(
        lambda name, portal: bind_raw([1], [struct.pack("!i", 7)], [1], name, portal), _NAMES, _PORTALS)
    return plain | plain | binary


def _messages(table: str) -> st.SearchStrategy[bytes]:
    group = st.builds(
        lambda text, name, values: parse(text.format(t=table), name) + bind(values, name) + execute(),
        st.sampled_from(_TEXTS), _NAMES, st.just([]) | _VALUES)
    return st.one_of(
        _parses(table), _binds(), group, group,
        st.builds(describe, st.sampled_from("SP"), st.sampled_from(("", "a", "b", "p"))),
        st.builds(execute, _PORTALS, st.sampled_from((0, 0, 1, 2))),
        st.builds(close, st.sampled_from("SP"), st.sampled_from(("", "a", "b", "p"))),
        st.sampled_from((FLUSH, SYNC, SYNC, PI, data("1\n"), data("7\nx"), data("x\n"), COPY_DONE,
            COPY_FAIL)),
        _queries(table))


def _writes(client: int) -> st.SearchStrategy[Write]:
    """Ends with what the server answers at once: else it is not known when it has answered."""
    table = f"g{client}"
    last = st.one_of(st.sampled_from((SYNC, SYNC, SYNC, FLUSH, data("5\n"), COPY_DONE)), _queries(table))
    return st.builds(
        lambda several, end: Write(b"".join(several) + end, client),
        st.lists(_messages(table), max_size=5), last)


LAST_WORDS = st.sampled_from(((ENDING,), (ENDING,), (ENDING,), (ENDING, TERMINATE), (b"",)))


@st.composite
def scripts(draw: st.DrawFn) -> list[Write]:
    """Writes of CLIENTS clients in some order, and how each of them ends."""
    order = draw(st.lists(st.integers(0, CLIENTS - 1), min_size=2, max_size=18))
    steps = [draw(_writes(client)) for client in order]
    endings = [Write(said, client) for client in sorted(set(order)) for said in draw(LAST_WORDS)]
    return [*steps, *endings]


def pieces(seed: int) -> Sequence[int]:
    """Where to cut the bytes of a run: sizes of pieces, used over and over."""
    random = Random(seed)
    return [random.choice((1, 3, 7, 40, 1000, 100_000)) for _ in range(7)]
