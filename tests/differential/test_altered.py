"""A text that is prepared anew means what the server makes of it now, whoever prepared it before and whatever
was altered since: its parameters and columns have the types of today."""

from __future__ import annotations

from functools import partial

import pytest

from pooler.demo.client import FLUSH, SYNC, bind, close, describe, execute, parse, query
from tests.differential.conftest import POOLS, Rig
from tests.differential.players import differences, play_straight, run
from tests.differential.script import Steps, Write

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]


def asks(name: str, text: str) -> bytes:
    """What a driver does with a text it has no name for: it looks at the types, and then runs it."""
    return parse(text, name) + describe("S", name) + FLUSH


def runs(name: str, *values: str) -> bytes:
    return bind(values, name) + execute() + SYNC


def scripts(table: str) -> dict[str, Steps]:
    """On a table that nobody but the script alters: what happens elsewhere no pooler hears of."""
    read, fill = f"select * from {table}", f"insert into {table} values ($1)"
    to_text, wider = f"alter table {table} alter a type text", f"alter table {table} add b text"
    first, second = asks("s1", fill) + SYNC, asks("s2", fill)
    return {
        "another column": [asks("s1", read), runs("s1"), query(wider), asks("s2", read), runs("s2")],
        "another type of a parameter": [
            asks("s1", fill), runs("s1", "1"), query(to_text), second, runs("s2", "x"), query(read)],
        "altered by the extended protocol": [
            first, parse(to_text) + bind() + execute() + SYNC, second, runs("s2", "x")],
        "altered in front of it in one pipeline": [
            first, parse(to_text) + bind() + execute() + second + runs("s2", "x")],
        "altered in front of it by a query that is not answered yet": [
            first, query(to_text) + second, runs("s2", "x")],
        "a table of the same name": [
            first, query(f"drop table {table}; create table {table} (a date)"), second,
            runs("s2", "2001-01-01")],
        "altered and rolled back": [
            first, query("begin"), query(to_text), second, runs("s2", "x"), query("rollback"),
            asks("s3", fill), runs("s3", "7"), query(read)],
        "looked at again after the plan was refused": [
            asks("s1", read), runs("s1"), query("begin"), query(wider), query("commit"), runs("s1"),
            close("S", "s1") + SYNC, asks("s1", read), runs("s1")],
        "looked at again in the same transaction": [
            asks("s1", read), runs("s1"), query("begin"), query(wider), asks("s2", read), runs("s2"),
            query("commit"), asks("s3", read), runs("s3")],
        "by another client": [
            Write(first), Write(query(to_text), 1), Write(asks("s1", fill), 1), Write(runs("s1", "x"), 1),
            Write(second), Write(runs("s2", "y")), Write(query(read))],
        "by another client that has not committed": [
            Write(first), Write(query("begin"), 1), Write(query(f"alter table {table} add b int"), 1),
            Write(asks("s1", f"select * from {table}"), 1), Write(runs("s1"), 1), Write(query("rollback"), 1),
            Write(asks("s2", read)), Write(runs("s2")), Write(query(read))],
        "by a block": [
            first, query(f"do $$ begin execute '{to_text}'; end $$"), second, runs("s2", "x")],
    }


def _make(rig: Rig, *statements: str) -> None:
    with rig.straight() as client:
        run(client, "set client_min_messages = error", *statements)


@pytest.mark.parametrize("pool", ["_one", "", "_session"])
def test_what_is_prepared_after_it_was_altered_has_the_types_of_now(rig: Rig, pool: str) -> None:
    wrong = {}
    for number, name in enumerate(scripts("")):
        table = f"altered_{pool}_{number}"
        steps = scripts(table)[name]
        _make(rig, f"drop table if exists {table}; create table {table} (a int)")
        expected = play_straight(steps, rig.straight, rig.watch)
        _make(rig, f"drop table {table}; create table {table} (a int)")
        wrong[name] = differences(steps, expected, partial(rig.pooled, pool), POOLS[pool][1])
        _make(rig, f"drop table {table}")
    assert {name: said for name, said in wrong.items() if said} == {}
