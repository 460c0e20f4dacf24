"""What a text or a tag leaves behind: nothing may be missed, and common statements cost nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooler.wire.session_state import (
    FORGETTING_TAGS,
    LONGEST_WORD_BYTES,
    Residue,
    TextLook,
    cleanup,
    forgets_statements,
    is_undoable,
    kinds,
    residue_of_tag,
    residue_of_text,
)

P, T, A, C = Residue.PARAMETERS, Residue.TEMP, Residue.ADVISORY, Residue.CURSORS
LEAVING = [
    ("select set_config('app.tenant', 'x', false)", P),
    ("SELECT Set_Config('a','b',$1)", P),
    ("select pg_catalog.set_config ( 'a', 'b', f(true, true) )", P),
    ("select \"set_config\"('a','b',false)", P),
    ("select set_config/* why */('a','b',false)", P),
    ("select set_config('a','b',true), set_config('c','d',false)", P),
    ("update pg_settings set setting = '9MB' where name = 'work_mem'", P),
    ("select set_limit(0.5)", P),
    ("select pg_advisory_lock(1)", A),
    ("select pg_try_advisory_lock_shared(1, 2)", A),
    ("select\npg_catalog.pg_advisory_lock_shared(1)", A),
    ("create temp table t (a int)", T),
    ("CREATE TEMPORARY TABLE t AS SELECT 1", T),
    ("create local temp table t ()", T),
    ("create /* here */ temp -- now\n table t ()", T),
    ("create or replace temp view v as select 1", T),
    ("create temp recursive view v (n) as select 1", T),
    ("select 1 into temp t", T),
    ("select 1 into temporary table t", T),
    ("create table pg_temp.t (a int)", T),
    ("set search_path = pg_temp", T),
    ("declare c cursor with hold for select 1", C),
    ("declare c cursor with\n/* x */hold for select 1", C),
    ("select U&\"set\\005fconfig\"('a','b',false)", Residue.SUSPECT),
    ("select dblink_connect('c', 'dbname=x')", Residue.RENEW),
    ("select pg_create_logical_replication_slot('s', 'pgoutput', true)", Residue.RENEW),
    ("select pg_replication_origin_session_setup('x')", Residue.RENEW),
    ("select query_to_xml('select set_config(''a'',''b'',false)', true, true, '')", P),
]
LEAVING_NOTHING = [
    "deallocate all",
    "DISCARD ALL",
    "select 1",
    "",
    "SELECT abalance FROM pgbench_accounts WHERE aid = 1",
    "select set_config('a', 'b', true)",
    "select set_config('a', f('x', (1, 2)), TRUE )",
    "select 'set_config(1,2,3)'",
    "select 1 -- set_config('a','b',false)",
    "select 1 /* pg_advisory_lock(1) /* nested */ create temp table t */",
    "select $$ pg_advisory_lock(1) $$, $a$ $$ create temp table $b$ $a$",
    "select E'it\\'s set_config(1,2,3)'",
    "select pg_advisory_xact_lock(1), pg_try_advisory_xact_lock(2)",
    "select * from pg_settings",
    "select temperature, attempts, template from household",
    "select temp, hold from t",
    "insert into notes values ('please hold'), ('create temp table')",
    "declare c cursor for select 1",
    "select lo_open(1, 131072)",
]


@pytest.mark.parametrize(("text", "residue"), LEAVING)
def test_what_a_text_leaves_behind_is_seen(text: str, residue: Residue) -> None:
    assert residue_of_text(text.encode()) & residue


@pytest.mark.parametrize("text", LEAVING_NOTHING)
def test_a_text_that_leaves_nothing_costs_nothing(text: str) -> None:
    assert residue_of_text(text.encode()) == 0


HARMLESS = st.sampled_from(
    ["'a''b'", "'--'", "'/*'", '"--"', '"a""b"', '"\'"', "-- ' \" $$ /*\n", "/* ' /* $$ */ -- */", "$$ ' $$",
     "$q$ $$ ' -- $q$", "a$b$c", "$1", "1", " ", ";", "E'\\''", "E'\\\\'", "e'--'", "N'x'", "+", "x", "\n",
     "(", ")"]
)


@given(st.lists(HARMLESS, max_size=8), st.sampled_from(LEAVING), st.lists(HARMLESS, max_size=8))
def test_no_surroundings_hide_what_a_text_leaves(
    before: list[str], leaving: tuple[str, Residue], after: list[str]
) -> None:
    text = " ".join([*before, "\n;", leaving[0], ";", *after])
    assert residue_of_text(text.encode()) & leaving[1]


@given(st.lists(HARMLESS, max_size=8), st.lists(HARMLESS, max_size=8))
def test_what_stands_in_a_literal_is_not_run(before: list[str], after: list[str]) -> None:
    text = " ".join([*before, "'select pg_advisory_lock(1)'", *after])
    assert residue_of_text(text.encode()) == 0


def test_a_backslash_whose_meaning_is_unknown_makes_the_literal_count_as_code() -> None:
    assert residue_of_text(rb"select '\', pg_advisory_lock(1), '\'") == A
    assert residue_of_text(rb"select 'C:\temp'") == T
    assert residue_of_text(b"create /* ' \\ ' */ temp table t (); select '\\'") == T


@given(st.sampled_from(LEAVING), st.integers(0, 200), st.integers(80, 200))
def test_a_text_seen_in_overlapping_pieces_shows_at_least_as_much(
    leaving: tuple[str, Residue], shift: int, size: int
) -> None:
    text = b"x" * shift + b" " + leaving[0].encode() + b" " + b"y" * 200
    look = TextLook()
    found = 0
    for at in range(0, len(text), size):
        found |= look.residue_of_piece(text[max(0, at - LONGEST_WORD_BYTES) : at + size])
    assert found & leaving[1]


def test_functions_named_in_the_settings_make_a_session_suspect() -> None:
    look = TextLook(["app.become_tenant", "Remember"])
    assert look.residue(b"select app.Become_Tenant(7)") == Residue.SUSPECT
    assert look.residue(b"select remember()") == Residue.SUSPECT
    assert look.residue(b"select 'remember'") == 0
    assert residue_of_text(b"select app.become_tenant(7)") == 0


@pytest.mark.parametrize(
    ("tag", "residue"),
    [
        (b"SET", P), (b"RESET", P | Residue.RESETS), (b"LISTEN", Residue.LISTEN),
        (b"PREPARE", Residue.PREPARED),
        (b"DO", Residue.SUSPECT), (b"CALL", Residue.SUSPECT), (b"LOAD", Residue.RENEW), (b"CREATE TABLE", T),
        (b"SELECT 1", 0), (b"INSERT 0 1", 0), (b"UPDATE 3", 0), (b"DELETE 0", 0), (b"BEGIN", 0),
        (b"COMMIT", 0),
        (b"ROLLBACK", 0), (b"COPY 5", 0), (b"DISCARD ALL", P | Residue.RESETS), (b"PREPARE TRANSACTION", 0),
        (b"SET CONSTRAINTS", 0),
    ],
)
def test_tags_tell_their_residue(tag: bytes, residue: int) -> None:
    assert residue_of_tag(tag) == residue


def test_a_clean_session_costs_no_statement() -> None:
    assert cleanup(0) == ()
    assert cleanup(int(Residue.RESETS)) == ()


def test_each_kind_is_undone_by_its_own_statement_alone() -> None:
    assert cleanup(int(Residue.LISTEN)) == (b"UNLISTEN *",)
    assert cleanup(int(T)) == (b"DISCARD TEMP",)
    assert cleanup(int(C | Residue.PREPARED)) == (b"CLOSE ALL;DEALLOCATE ALL",)


def test_discard_all_stands_alone_since_it_refuses_company() -> None:
    assert cleanup(int(Residue.SUSPECT | T)) == (b"DISCARD ALL",)
    assert cleanup(int(Residue.SUSPECT), in_transaction=True) == (b"ROLLBACK", b"DISCARD ALL")


def test_an_open_transaction_is_ended_first() -> None:
    assert cleanup(0, in_transaction=True) == (b"ROLLBACK",)
    assert cleanup(int(A), in_transaction=True) == (b"ROLLBACK;SELECT pg_catalog.pg_advisory_unlock_all()",)


def test_it_is_said_which_clean_up_drops_the_poolers_own_statements() -> None:
    forgetting = [kind for kind in Residue if forgets_statements(int(kind))]
    assert forgetting == [Residue.PREPARED, Residue.SUSPECT]
    assert b"DISCARD ALL" in FORGETTING_TAGS


def test_a_loaded_library_needs_a_new_session() -> None:
    assert not is_undoable(residue_of_tag(b"LOAD"))
    assert is_undoable(int(P | Residue.SUSPECT))


def test_kinds_are_named_for_people() -> None:
    assert kinds(int(P | T | Residue.RESETS)) == ("parameters", "temp")
