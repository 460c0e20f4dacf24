"""Parameters that follow a client: identity when nothing differs, exact and safe SQL when something does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooler.wire.parameters import (
    SETS_KEPT_BYTES_MAX,
    SETS_KEPT_MAX,
    TRACKED_ALWAYS,
    ParameterSet,
    TrackedParameters,
    literal,
)

REPORTED = (
    (b"client_encoding", b"UTF8"), (b"DateStyle", b"ISO, MDY"), (b"TimeZone", b"UTC"),
    (b"server_version", b"15.1"),
    (b"IntervalStyle", b"postgres"), (b"standard_conforming_strings", b"on"),
    (b"application_name", b"pooler w0"),
)


@pytest.fixture
def tracked() -> TrackedParameters:
    return TrackedParameters(["statement_timeout"])


@pytest.fixture
def fresh(tracked: TrackedParameters) -> ParameterSet:
    return tracked.from_statuses(REPORTED)


def test_equal_sets_are_one_object(tracked: TrackedParameters, fresh: ParameterSet) -> None:
    assert tracked.from_statuses(reversed(REPORTED)) is fresh
    assert fresh.with_startup({b"timezone": b"UTC"}) is fresh
    assert fresh.difference(fresh) is None


def test_a_status_of_something_untracked_changes_nothing(fresh: ParameterSet) -> None:
    assert fresh.with_status(b"is_superuser", b"on") is fresh
    assert fresh.with_status(b"TimeZone", b"UTC") is fresh
    assert fresh.with_status(b"timezone", b"CET").get(b"TimeZone") == b"CET"


def test_only_what_differs_is_set(fresh: ParameterSet) -> None:
    wanted = fresh.with_startup({b"DATESTYLE": b"German", b"application_name": b"O'Brien"})
    assert fresh.difference(wanted) == b"SET DateStyle='German';SET application_name='O''Brien'"


def test_a_list_is_set_as_a_list(fresh: ParameterSet) -> None:
    wanted = fresh.with_startup({b"search_path": b'"$user", "My ""Odd"" one"'})
    assert fresh.difference(wanted) == (
        b"SELECT pg_catalog.set_config('search_path','\"$user\", \"My \"\"Odd\"\" one\"',false)"
    )


def test_after_the_difference_both_are_one_and_the_value_is_the_servers_form(fresh: ParameterSet) -> None:
    client = fresh.with_startup({b"datestyle": b"German", b"search_path": b"app"})
    session = fresh.with_status(b"DateStyle", b"German, DMY")  # what the server answers to the SET
    both = session.adopt(client)
    assert both.get(b"DateStyle") == b"German, DMY"
    assert both.get(b"search_path") == b"app"
    assert session.adopt(both) is both
    assert both.difference(both) is None


def test_a_form_that_only_differs_in_writing_is_set_once(fresh: ParameterSet) -> None:
    client = fresh.with_startup({b"DateStyle": b"ISO"})
    assert fresh.difference(client) is not None
    assert fresh.adopt(client) is fresh  # the server kept `ISO, MDY` and had nothing to report


def test_the_next_client_gets_defaults_back(fresh: ParameterSet) -> None:
    one = fresh.with_startup({b"search_path": b"app", b"work_mem": b"9MB"})
    session = fresh.adopt(one)
    assert session.difference(fresh) == b"RESET search_path;RESET work_mem"
    assert session.adopt(fresh) is fresh


def test_after_a_reset_unreported_values_are_as_they_began(fresh: ParameterSet) -> None:
    session = fresh.adopt(fresh.with_startup({b"search_path": b"app", b"lock_timeout": b"5"}))
    assert session.after_reset(fresh) is fresh


def test_a_client_may_not_look_like_the_poolers_own_sessions(fresh: ParameterSet) -> None:
    client = fresh.with_startup({b"application_name": b"pooler probe"})
    assert fresh.difference(client) == b"SET application_name='_pooler probe'"
    session = fresh.with_status(b"application_name", b"_pooler probe")
    assert session.difference(client) is None
    assert session.difference(session.adopt(client)) is None


def test_start_parameters_that_are_no_settings_are_passed_over(fresh: ParameterSet) -> None:
    packet = {b"user": b"u", b"database": b"d", b"replication": b"off", b"options": b"-c x=1"}
    assert fresh.with_startup(packet | {b"_pq_.a": b"1"}) is fresh


@pytest.mark.parametrize("name", [b"a b", b"a;b", b"", b"1a", b"a.", b"a\n", b"a'"])
def test_what_cannot_be_a_parameter_is_refused(fresh: ParameterSet, name: bytes) -> None:
    with pytest.raises(ValueError, match="not the name of a parameter"):
        fresh.with_startup({name: b"1"})
    with pytest.raises(ValueError, match="not the name of a parameter"):
        TrackedParameters([name.decode()])


def test_extra_tracked_names_join_the_known_ones_once() -> None:
    assert TrackedParameters(["TIMEZONE", "app.tenant"]).names == (*TRACKED_ALWAYS, b"app.tenant")


def test_a_greeting_has_what_the_server_reports(fresh: ParameterSet) -> None:
    greeted = dict(fresh.with_startup({b"search_path": b"x"}).items())
    assert greeted == {name: value for name, value in REPORTED if name != b"server_version"}


def test_values_are_written_in_the_encoding_the_session_has_now(fresh: ParameterSet) -> None:
    client = fresh.with_startup({b"client_encoding": b"LATIN1", b"application_name": "ä".encode("latin-1")})
    utf8 = "ä".encode()
    assert fresh.difference(client) == b"SET client_encoding='LATIN1';SET application_name='%b'" % utf8


def test_memory_for_sets_is_bounded(tracked: TrackedParameters, fresh: ParameterSet) -> None:
    first = fresh.with_startup({b"application_name": b"first"})
    for number in range(SETS_KEPT_MAX + 10):
        fresh.with_startup({b"application_name": b"%d" % number})
    assert len(tracked._sets) <= SETS_KEPT_MAX
    again = fresh.with_startup({b"application_name": b"first"})
    assert first.difference(again) is None


def test_memory_for_long_values_is_bounded_too(tracked: TrackedParameters, fresh: ParameterSet) -> None:
    long = b"x" * 60_000
    for number in range(2 * SETS_KEPT_BYTES_MAX // len(long)):
        fresh.with_status(b"search_path", b"%d" % number + long)
    kept = sum(len(value) for each in tracked._sets.values() for value in each.values if value is not None)
    assert kept <= SETS_KEPT_BYTES_MAX + 2 * len(long)


@given(st.binary(max_size=30).map(lambda raw: raw.replace(b"\0", b"")))
def test_a_literal_is_one_token_and_means_the_value(value: bytes) -> None:
    quoted = literal(value)
    escaped = quoted.startswith(b"E")
    inner = quoted[2 if escaped else 1 : -1]
    assert escaped == (b"\\" in value)
    assert inner.replace(b"''", b"").count(b"'") == 0
    assert inner.replace(b"''", b"'").replace(b"\\\\", b"\\") == value
