"""Names of prepared statements: shared texts, bounded memory, least recently used first, exact bytes."""

from __future__ import annotations

import struct
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pooler.errors import ProtocolViolation
from pooler.wire import messages
from pooler.wire.prepared import (
    ALL,
    ALTERING_TAG,
    ClientStatements,
    Statement,
    Statements,
    TooManyStatements,
    bind_names,
    close_statement,
    describe_statement,
    describe_target,
    forgotten_name,
    parse_message,
    parse_name_body,
    rename_bind,
)
from pooler.wire.session_state import Residue
from pooler.wire.session_statements import SessionStatements


def body(sql: str, *types: int) -> bytes:
    return messages.parse("", sql, types)[6:]


NAMES = st.binary(max_size=12).map(lambda raw: raw.replace(b"\0", b"x"))


def test_two_clients_with_the_same_text_share_one_statement() -> None:
    statements = Statements()
    one, two = ClientStatements(statements), ClientStatements(statements)
    assert one.add(b"s1", body("select 1")) is two.add(b"other", body("select 1"))
    assert len(statements) == 1


def test_the_same_name_of_two_clients_means_two_texts() -> None:
    statements = Statements()
    one, two = ClientStatements(statements), ClientStatements(statements)
    first, second = one.add(b"s1", body("select 1")), two.add(b"s1", body("select 2"))
    assert first is not None
    assert second is not None
    assert first.server_name != second.server_name
    assert (one.get(b"s1"), two.get(b"s1")) == (first, second)


def test_parameter_types_are_part_of_what_a_statement_is() -> None:
    statements = Statements()
    assert statements.intern(body("select $1", 23)) is not statements.intern(body("select $1", 25))


def test_a_taken_name_is_refused_and_keeps_its_meaning() -> None:
    client = ClientStatements(Statements())
    first = client.add(b"a", body("select 1"))
    assert client.add(b"a", body("select 2")) is None
    assert client.get(b"a") is first


def test_the_unnamed_statement_is_replaced_and_its_old_text_released() -> None:
    client = ClientStatements(Statements())
    first = client.add(b"", body("select 1"))
    second = client.add(b"", body("select 2"))
    assert first is not None
    assert second is not None
    assert (first.uses, second.uses) == (0, 1)
    assert client.get(b"") is second


def test_a_text_that_comes_back_has_its_old_server_name() -> None:
    statements = Statements()
    client = ClientStatements(statements)
    first = client.add(b"a", body("select 1"))
    client.clear()
    assert ClientStatements(statements).add(b"b", body("select 1")) is first


def test_spare_texts_are_bounded_and_a_server_name_is_never_used_twice() -> None:
    statements = Statements(spare_max=2)
    seen: set[bytes] = set()
    for number in range(10):
        client = ClientStatements(statements)
        made = client.add(b"a", body(f"select {number}"))
        assert made is not None
        seen.add(made.server_name)
        client.clear()
    assert len(seen) == 10
    assert len(statements) == 2


def test_a_client_may_not_have_more_names_than_the_limit_but_may_replace_the_unnamed_one() -> None:
    client = ClientStatements(Statements(), names_max=2)
    client.add(b"", body("select 0"))
    client.add(b"a", body("select 1"))
    with pytest.raises(TooManyStatements):
        client.add(b"b", body("select 2"))
    client.add(b"", body("select 3"))
    client.close(b"a")
    assert client.add(b"b", body("select 2")) is not None


def test_the_text_of_all_clients_is_bounded_and_spare_text_gives_way() -> None:
    statements = Statements(bytes_max=100)
    client = ClientStatements(statements)
    client.add(b"a", body("x" * 60))
    with pytest.raises(TooManyStatements):
        client.add(b"b", body("y" * 60))
    client.close(b"a")
    assert client.add(b"b", body("y" * 60)) is not None
    assert statements.text_bytes <= 100


def test_closing_a_name_that_means_nothing_is_no_error() -> None:
    client = ClientStatements(Statements())
    client.close(b"nope")
    assert client.get(b"nope") is None


def test_a_statement_knows_what_its_text_leaves_behind() -> None:
    statements = Statements()
    assert statements.intern(body("select pg_advisory_lock(1)")).residue == Residue.ADVISORY
    assert statements.intern(body("select 1")).residue == 0


def test_a_session_gives_up_the_least_recently_used_statement() -> None:
    session = SessionStatements(2)
    a, b, c = (Statement(bytes([n]), body(str(n))) for n in (1, 2, 3))
    assert session.add(a) == []
    assert session.add(b) == []
    assert session.touch(a)
    assert session.add(c) == [b]
    assert (a in session, b in session, c in session) == (True, False, True)
    assert not session.touch(b)


def test_a_skipped_close_is_restored_and_goes_first_next_time() -> None:
    session = SessionStatements(2)
    a, b, c = (Statement(bytes([n]), body(str(n))) for n in (1, 2, 3))
    session.add(a)
    session.add(b)
    assert session.add(c) == [a]
    session.remove(c)
    session.restore(a)
    assert session.add(c) == [a]


def test_a_limit_lowered_under_a_full_session_is_reached_with_the_next_statement() -> None:
    session = SessionStatements(5)
    for number in range(5):
        session.add(Statement(b"%d" % number, body(str(number))))
    session.limit = 2
    assert len(session.add(Statement(b"x", body("x")))) == 4
    assert len(session) == 2


class Clients(RuleBasedStateMachine):
    """Whatever clients do: a statement's uses are its names, and nobody's name changes meaning."""

    def __init__(self) -> None:
        super().__init__()
        self.statements = Statements(spare_max=3)
        self.clients = [ClientStatements(self.statements) for _ in range(3)]
        self.model: list[dict[bytes, bytes]] = [{} for _ in range(3)]
        self.closed: list[tuple[int, bytes, Statement]] = []

    @rule(who=st.integers(0, 2), name=st.sampled_from([b"", b"a", b"b"]), text=st.integers(0, 6))
    def add(self, who: int, name: bytes, text: int) -> None:
        wanted = body(f"select {text}")
        taken = bool(name) and name in self.model[who]
        made = self.clients[who].add(name, wanted)
        assert (made is None) == taken
        if not taken:
            self.model[who][name] = wanted

    @rule(who=st.integers(0, 2), name=st.sampled_from([b"", b"a", b"b"]))
    def close(self, who: int, name: bytes) -> None:
        statement = self.clients[who].get(name)
        self.closed += [] if statement is None else [(who, name, statement)]
        self.clients[who].close(name)
        self.model[who].pop(name, None)

    @rule()
    def take_back_the_last_close(self) -> None:
        for who, name, statement in self.closed[-1:]:
            self.clients[who].restore(name, statement)
            if not name or name not in self.model[who]:
                self.model[who][name] = statement.body
        del self.closed[-1:]

    @rule()
    def alter(self) -> None:
        self.statements.outdate_all()

    @rule(who=st.integers(0, 2))
    def clear(self, who: int) -> None:
        self.clients[who].clear()
        self.model[who].clear()

    @invariant()
    def meanings_hold(self) -> None:
        uses: Counter[Statement] = Counter()
        for client, model in zip(self.clients, self.model, strict=True):
            for name, wanted in model.items():
                statement = client.get(name)
                assert statement is not None
                assert statement.body == wanted
                uses[statement] += 1
                if name:
                    assert client.name_of(statement.server_name) == name
        assert all(statement.uses == count for statement, count in uses.items())
        assert len(self.statements) <= len(uses) + 3
        text_bytes = sum(len(statement.body) for statement in uses)
        assert text_bytes <= self.statements.text_bytes <= text_bytes + 3 * len(body("select 1"))


TestClients = Clients.TestCase


@given(NAMES, st.text(alphabet="abc$1 ", max_size=40), st.lists(st.integers(0, 2**32 - 1), max_size=4))
def test_parse_is_read_and_written_back_under_another_name(name: bytes, sql: str, types: list[int]) -> None:
    original = messages.message(b"P", name + b"\0" + body(sql, *types))
    read_name, read_body = parse_name_body(original, 5)
    assert read_name == name
    statement = Statement(b"pooler_9", read_body)
    assert parse_message(statement) == messages.message(b"P", b"pooler_9\0" + body(sql, *types))
    assert parse_message(statement, b"") == messages.parse("", sql, types)


def rewritten(message: bytes, new: bytes) -> bytes:
    _, name, behind = bind_names(message, 5)
    return rename_bind(message, name, behind, new)


@given(NAMES, NAMES, st.binary(max_size=60), NAMES)
def test_only_the_name_in_a_bind_changes(portal: bytes, name: bytes, rest: bytes, new: bytes) -> None:
    original = messages.message(b"B", portal + b"\0" + name + b"\0" + rest)
    assert bind_names(original, 5)[:2] == (portal, name)
    assert original[bind_names(original, 5)[2] :] == rest
    assert rewritten(original, new) == messages.message(b"B", portal + b"\0" + new + b"\0" + rest)


@given(NAMES, NAMES, st.binary(max_size=60), st.integers(0, 60))
def test_a_bind_without_its_tail_gets_the_length_of_the_whole(
    portal: bytes, name: bytes, rest: bytes, seen: int
) -> None:
    original = messages.message(b"B", portal + b"\0" + name + b"\0" + rest)
    head = original[: len(original) - len(rest) + min(seen, len(rest))]
    assert rewritten(head, b"new_name") + original[len(head) :] == rewritten(original, b"new_name")


@pytest.mark.parametrize("kind", [b"S", b"P"])
@pytest.mark.parametrize("name", [b"", b"n", "näme".encode()])
def test_describe_and_close_name_their_target(kind: bytes, name: bytes) -> None:
    assert describe_target(messages.message(b"D", kind + name + b"\0"), 5) == (kind, name)
    assert describe_target(kind + name + b"\0") == (kind, name)


def test_describe_and_close_are_built_as_the_protocol_says() -> None:
    assert describe_statement(b"p") == b"D" + struct.pack(">I", 7) + b"Sp\0"
    assert close_statement(b"p") == b"C" + struct.pack(">I", 7) + b"Sp\0"


@pytest.mark.parametrize("broken", [b"", b"abc", b"a\0b"])
def test_names_without_an_end_are_a_violation(broken: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        parse_name_body(broken)
    with pytest.raises(ProtocolViolation):
        bind_names(broken)


@given(st.binary(max_size=30))
def test_garbage_is_read_or_refused_and_nothing_else(garbage: bytes) -> None:
    for read in (parse_name_body, bind_names, describe_target):
        try:
            read(garbage)
        except ProtocolViolation:
            continue


@pytest.mark.parametrize(("text", "name"), [
    (b"deallocate s", b"s"), (b"DEALLOCATE PREPARE S;", b"s"), (b'deallocate"a ""B"""', b'a "B"'),
    (b" -- why\n deallocate /* x */ s ; ", b"s"), (b"deallocate all", ALL), (b"DISCARD ALL\0", ALL),
    (b"deallocate prepare all", ALL), (b'deallocate "all"', b"all"), (b"deallocate " + b"n" * 70, b"n" * 63),
    (b"deallocate s; select 1", None), (b"discard temp", None), (b"deallocates", None),
    (b"select 'deallocate s'", None), (b"deallocate", None)])
def test_a_text_that_forgets_a_name_is_known(text: bytes, name: bytes | None) -> None:
    assert forgotten_name(text) == name


def test_an_outdated_statement_is_kept_by_those_who_have_it_and_found_by_nobody_else() -> None:
    statements = Statements()
    one, two = ClientStatements(statements), ClientStatements(statements)
    old = one.add(b"a", body("select 1"))
    one.outdate()
    new = two.add(b"a", body("select 1"))
    assert new is not old
    assert one.get(b"a") is old
    assert one.add(b"b", body("select 1")) is new
    text = len(body("select 1"))
    assert statements.text_bytes == 2 * text
    one.clear()
    assert statements.text_bytes == text
    assert len(statements) == 1


def test_one_text_under_two_search_paths_is_two_statements() -> None:
    statements = Statements()
    one, two = ClientStatements(statements), ClientStatements(statements)
    first = one.add(b"a", body("select 1"), b"s1")
    assert two.add(b"a", body("select 1"), b"s2") is not first
    assert two.add(b"b", body("select 1"), b"s1") is first
    assert one.name_of(first.server_name if first else b"") == b"a"
    assert one.name_of(b"pooler_99") is None


def test_two_names_of_one_client_for_one_text_are_two_statements_so_that_errors_tell_which() -> None:
    statements = Statements()
    client, other = ClientStatements(statements), ClientStatements(statements)
    shared = other.add(b"s", b"select 1\0\0\0")
    unnamed, a, b = (client.add(name, b"select 1\0\0\0") for name in (b"", b"a", b"b"))
    assert shared is unnamed
    assert len({shared, a, b}) == 3
    assert a is not None
    assert b is not None
    assert (client.name_of(a.server_name), client.name_of(b.server_name)) == (b"a", b"b")
    client.clear()
    other.clear()
    assert statements.text_bytes == len(b"select 1\0\0\0")


def test_when_everything_is_outdated_nobody_finds_what_was_there_and_no_text_stays_counted() -> None:
    statements = Statements()
    one, two = ClientStatements(statements), ClientStatements(statements)
    old = one.add(b"a", body("select 1"))
    two.add(b"spare", body("select 2"))
    two.close(b"spare")
    statements.outdate_all()
    assert statements.text_bytes == len(body("select 1"))
    assert one.get(b"a") is old
    assert two.add(b"a", body("select 1")) is not old
    one.clear()
    two.clear()
    statements.outdate_all()
    assert (len(statements), statements.text_bytes) == (0, 0)


def test_a_statement_alone_is_shared_with_nobody_before_and_after() -> None:
    statements = Statements()
    one, two, three = (ClientStatements(statements) for _ in range(3))
    shared = one.add(b"a", body("select 1"))
    alone = two.add(b"a", body("select 1"), alone=True)
    assert alone is not shared
    assert three.add(b"a", body("select 1")) is shared
    two.clear()
    assert statements.text_bytes == len(body("select 1"))


@pytest.mark.parametrize(("text", "may"), [
    (b"alter table t add a int", True), (b" ;/* so */ -- \n Create table t ()", True), (b"DROP TYPE x", True),
    (b"do $$ begin end $$", True), (b"call p()", True), (b"import foreign schema s", True),
    (b"insert into t values (1) on conflict do nothing", False), (b"select 'alter'", False),
    (b"alternate", False), (b"", False)])
def test_a_text_that_may_alter_what_others_mean_is_known_by_its_first_word(text: bytes, may: bool) -> None:
    assert Statement(b"", text + b"\0\0\0").alters is may


@pytest.mark.parametrize(("tag", "may"), [
    (b"ALTER TABLE", True), (b"CREATE TABLE AS", True), (b"DROP TYPE", True), (b"DO", True), (b"CALL", True),
    (b"IMPORT FOREIGN SCHEMA", True), (b"DISCARD ALL", False), (b"SELECT 1", False),
    (b"TRUNCATE TABLE", False)])
def test_a_tag_tells_that_tables_or_types_were_altered(tag: bytes, may: bool) -> None:
    assert (ALTERING_TAG(tag) is not None) is may
