"""What an administrator may type, in any case and form, and what is said about the rest."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooler.console.as_pgbouncer import AS_PGBOUNCER
from pooler.console.commands import (
    DATABASE_COMMANDS,
    SHOW_ITEMS,
    TEXT_BYTES_MAX,
    Act,
    Answer,
    Command,
    Nothing,
    Show,
    Unknown,
    help_text,
    parse_commands,
)


def parse(text: str) -> list[Command]:
    return parse_commands(text, version="pooler 1")


@pytest.mark.parametrize("form", ["show {}", "SHOW {};", "  Show\n{} ; ", "/* x */ show -- y\n {}"])
@pytest.mark.parametrize("item", SHOW_ITEMS)
def test_every_item_is_shown_in_any_case_with_or_without_an_end(form: str, item: str) -> None:
    assert parse(form.format(item.upper())) == [Show(item)]


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("PAUSE", Act("pause", (), "PAUSE")),
        ("pause orders;", Act("pause", (("database", "orders"),), "PAUSE")),
        ('RESUME "Odd ""Name"""', Act("resume", (("database", 'Odd "Name"'),), "RESUME")),
        ("kill my-db", Act("kill", (("database", "my-db"),), "KILL")),
        ("disable 'x'", Act("disable", (("database", "x"),), "DISABLE")),
        ("Reload", Act("reload", (), "RELOAD")),
        ("reconnect", Act("reconnect", (), "RECONNECT")),
        ("kill_client 17", Act("kill_client", (("client", "17"),), "KILL_CLIENT")),
        ("shutdown", Act("shutdown", (("mode", "now"),), "SHUTDOWN")),
        ("SHUTDOWN wait_for_clients;", Act("shutdown", (("mode", "wait_for_clients"),), "SHUTDOWN")),
        ("set verbose=0", Act("set", (("key", "verbose"), ("value", "0")), "SET verbose=0")),
        ("SET Pool_Mode TO 'session'", Act("set", (("key", "pool_mode"), ("value", "session")),
                                          "SET pool_mode=session")),
        ("show pools workers", Show("pools", "workers")),
        ("show ledger 'orders/write'", Show("ledger", "orders/write")),
    ],
)
def test_commands_and_their_arguments(text: str, command: Command) -> None:
    assert parse(text) == [command]


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("SET extra_float_digits = 3", Nothing("SET")),
        ("set client_encoding to 'UTF8'", Nothing("SET")),
        ("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED", Nothing("SET")),
        ("SET NAMES 'utf8'", Nothing("SET")),
        ("BEGIN", Nothing("BEGIN", opens=True)),
        ("START TRANSACTION READ ONLY", Nothing("START TRANSACTION", opens=True)),
        ("COMMIT", Nothing("COMMIT", opens=False)),
        ("ROLLBACK", Nothing("ROLLBACK", opens=False)),
        ("DISCARD ALL", Nothing("DISCARD ALL")),
        ("SELECT 1", Answer("?column?", 1, "SELECT 1")),
        ("select version()", Answer("version", "pooler 1", "SELECT 1")),
        ("SELECT pg_catalog.version();", Answer("version", "pooler 1", "SELECT 1")),
        ("SHOW TRANSACTION ISOLATION LEVEL", Answer("transaction_isolation", "read committed", "SHOW")),
        ("show standard_conforming_strings", Answer("standard_conforming_strings", "on", "SHOW")),
    ],
)
def test_what_drivers_say_by_themselves_is_understood(text: str, command: Command) -> None:
    """R60."""
    assert parse(text) == [command]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("show pols", "Did you mean SHOW POOLS?"),
        ("SHOW cliens", "Did you mean SHOW CLIENTS?"),
        ("pasue", "Did you mean PAUSE?"),
        ("shutdown wait_for_client", "Did you mean SHUTDOWN WAIT_FOR_CLIENTS?"),
        ("frobnicate", "SHOW HELP lists what is known."),
        ("disable", "DISABLE name"),
        ("reload orders", "RELOAD"),
        ("pause a b", "PAUSE [name]"),
        ("select * from t", "SHOW HELP lists what it knows."),
    ],
)
def test_a_refusal_names_the_nearest_known(text: str, hint: str) -> None:
    (command,) = parse(text)
    assert isinstance(command, Unknown)
    assert command.hint == hint


def test_several_statements_may_stand_in_one_text() -> None:
    assert parse("set extra_float_digits=3; show stats;; show 'a;b'")[:2] == [Nothing("SET"), Show("stats")]
    assert len(parse("set extra_float_digits=3; show stats;; show 'a;b'")) == 3


@pytest.mark.parametrize("text", ["", " ;; ", "-- nothing", "/* nothing */"])
def test_an_empty_text_has_no_command(text: str) -> None:
    assert parse(text) == []


def test_an_overlong_text_is_refused() -> None:
    (command,) = parse("show pools " + "x" * 100_000)
    assert isinstance(command, Unknown)
    assert command.sqlstate == "54000"


@given(st.text(max_size=80))
def test_any_text_is_answered(text: str) -> None:
    for command in parse(text):
        assert isinstance(command, Show | Act | Answer | Nothing | Unknown)


def test_help_names_everything() -> None:
    said = help_text().lower()
    assert all(word in said for word in (*SHOW_ITEMS, *DATABASE_COMMANDS, "shutdown"))


def test_a_comment_without_an_end_is_a_comment_to_the_end() -> None:
    """Else each beginning of one would be looked at to the end of the text again: seconds of a worker."""
    assert parse("SHOW POOLS /* not ended") == parse("SHOW POOLS")
    assert parse("/* " * (TEXT_BYTES_MAX // 3)) == []


@pytest.mark.parametrize(("said", "meant"), [
    ("disable", Unknown("a database is required", "", "08P01")),
    (" Enable ; ", Unknown("a database is required", "", "08P01")),
    ("suspend x", Unknown("invalid command 'suspend x', use SHOW HELP;", "", "08P01")),
    ("show TimeZone", Answer("timezone", "GMT", "SHOW")),
    ("set datestyle = 'iso'", Nothing("SET", notice="SET ignored")),
    ("set application_name = 'x'", Nothing("SET")),
])
def test_it_is_understood_as_pgbouncer_does(said: str, meant: object) -> None:
    assert AS_PGBOUNCER.parse(said) == [meant]


def test_what_the_help_in_pgbouncers_words_lists_can_be_said() -> None:
    for line in AS_PGBOUNCER.help().splitlines()[2:]:
        verb, _, rest = re.sub(r"\[.*]|= arg", "", line).strip().partition(" ")
        for each in rest.split("|"):
            given = re.sub(r"<\w+>", "17", each) if verb != "SET" else "verbose = 1"
            (command,) = AS_PGBOUNCER.parse(f"{verb} {given}")
            assert isinstance(command, Act | Show), line
