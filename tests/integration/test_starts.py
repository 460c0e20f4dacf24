"""What clients give at their start is honoured on every session they get, or refused in the server's own
words; what they are told is what the server says. Against PostgreSQL itself, for the same start."""

from __future__ import annotations

import psycopg
import pytest

from pooler.demo.client import RawClient, ServerSaid
from pooler.demo.etcd import Etcd
from pooler.demo.postgres import Server
from tests.integration.test_session_state import another_holds_a_session, value
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database, MakeServer, make_database

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]

SHOWN = ("application_name", "client_encoding", "DateStyle", "TimeZone", "search_path", "work_mem",
         "extra_float_digits", "statement_timeout", "default_transaction_read_only", "a.b")
# of a custom setting that a session has had once, nothing but an empty value can be left
ASK = "select " + ",".join(f"coalesce(current_setting('{name}', true), '')" for name in SHOWN)


@pytest.fixture(scope="module")
def fleet(make_shared_fleet: MakeFleet, postgres: Database, etcd: Etcd) -> RunningFleet:
    """One worker with two sessions."""
    return make_shared_fleet(postgres, etcd, workers=1, permits=4, admin_reserve=1, more={
        "pool": {"default_pool_size": 2, "ignore_startup_parameters": ["ignored_one"]}})


STARTS = {
    "a driver's": {"extra_float_digits": "2", "application_name": "drv", "client_encoding": "UTF8",
                   "DateStyle": "ISO", "TimeZone": "utc"},
    "statement_timeout and search_path": {"statement_timeout": "5s", "search_path": "a, b"},
    "options": {"options": r"-c a.b=1 -cwork_mem=7MB --search-path=zz"},
    "a blank in options": {"options": r"-c a.b=x\ y\\z"},
    "the same name twice": {"options": "-c work_mem=1MB -c work_mem=2MB", "work_mem": "3MB"},
    "a reported one that follows nobody": {"options": "--default-transaction-read-only=1"},
    "empty options": {"options": ""},
    "an application_name beyond ASCII": {"application_name": "née"},
    "latin1": {"client_encoding": "latin-1", "DateStyle": "german"},
}
REFUSED = {
    "unknown": {"options": "-c no_such=1"},
    "unknown in the packet": {"no_such": "1"},
    "a plus": {"options": "-c+search_path=zz"},
    "no name": {"1a.b": "1"},
    "no value": {"options": "-c work_mem"},
    "a wrong value": {"DateStyle": "nonsense"},
    "a wrong encoding": {"client_encoding": "nonsense"},
    "a blank in a list": {"options": r"-c search_path=a\ b"},
    "out of range": {"work_mem": "1"},
    "not at a session's start": {"options": "-c shared_buffers=1MB"},
}


def _login(port: int, database: Database, start: dict[str, str]) -> RawClient:
    return RawClient("127.0.0.1", port).login(
        database.user, database.password, database.dbname, **start)


def _refused(port: int, database: Database, start: dict[str, str]) -> dict[str, str]:
    """The fields of the error that a login ends with."""
    with RawClient("127.0.0.1", port) as client, pytest.raises(ServerSaid) as refused:
        client.login(database.user, database.password, database.dbname, **start)
    return refused.value.fields


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_a_start_is_honoured_and_told_as_by_the_server_itself(
    fleet: RunningFleet, postgres: Database, start: dict[str, str]
) -> None:
    """R28, R30, R32: at the first login and at one that finds it known already."""
    heard = []
    for port in (postgres.port, fleet.port, fleet.port):
        with _login(port, postgres, start) as client:
            told = {name: client.session.parameters.get(name) for name in SHOWN}
            heard.append((told, client.query(ASK)))
    assert heard[1] == heard[0]
    assert heard[2] == heard[0]


@pytest.mark.parametrize("start", REFUSED.values(), ids=REFUSED)
def test_a_start_that_the_server_refuses_is_refused_in_its_words(
    fleet: RunningFleet, postgres: Database, start: dict[str, str]
) -> None:
    """R28, R30."""
    said = []
    for port in (postgres.port, fleet.port):
        fields = _refused(port, postgres, start)
        said.append({name: fields.get(name) for name in "SVCMDH"})
    assert said[1] == said[0]


def test_a_refused_start_leaves_nothing_on_the_session_and_the_next_client_is_served(
    fleet: RunningFleet, postgres: Database
) -> None:
    for _ in range(3):
        _refused(fleet.port, postgres, {"options": "-c work_mem=9MB -c app.k=v -c no_such=1"})
        with _login(fleet.port, postgres, {}) as client:
            assert client.query("select current_setting('work_mem'), current_setting('app.k', true)") in (
                [["4MB", None]], [["4MB", ""]])


def test_each_client_has_its_own_start_on_every_session(fleet: RunningFleet) -> None:
    dsn = fleet.dsn()
    seven, none, holder = (
        psycopg.connect(dsn, autocommit=True, prepare_threshold=None, options=options)
        for options in ("-c work_mem=7MB -c app.k=v", "", ""))
    with seven, none, holder:
        for _ in range(3):
            with another_holds_a_session(holder):
                assert value(seven, "show work_mem") == "7MB"
                assert value(none, "show work_mem") == "4MB"
            assert value(seven, "show app.k") == "v"


def test_ignored_parameters_are_dropped(fleet: RunningFleet, postgres: Database) -> None:
    with _login(fleet.port, postgres, {"ignored_one": "1", "options": "-c Ignored_One=2"}) as client:
        assert client.query("select 1") == [["1"]]


def test_two_clients_with_one_start_cost_one_set_between_them(
    make_fleet: MakeFleet, make_server: MakeServer, etcd: Etcd
) -> None:
    """R32: 100 transactions on one session, by turns; and not one for a start that is the server's own."""
    server = make_server(settings={"log_statement": "all"})
    database = make_database(server)
    fleet = make_fleet(database, etcd, workers=1, permits=4, admin_reserve=1, more={
        "pool": {"default_pool_size": 1}})
    with _login(fleet.port, database, {}) as first:
        first.query("select 1")  # the session is open
    own = {"DateStyle": "ISO", "TimeZone": server_zone(database)}
    other = {"DateStyle": "german", "TimeZone": "utc", "extra_float_digits": "2"}
    for start in (own, other):
        before = len(statements_set(server))
        with _login(fleet.port, database, start) as one, _login(fleet.port, database, start) as two:
            for _ in range(50):
                one.query("select 1")
                two.query("select 2")
        assert len(statements_set(server)) - before <= 1, "\n".join(statements_set(server))


def server_zone(database: Database) -> str:
    with psycopg.connect(database.dsn()) as straight:
        return str(value(straight, "show timezone"))


def statements_set(server: Server) -> list[str]:
    text = server.log.read_text(errors="replace")
    return [line for line in text.splitlines() if "statement: SET" in line or "set_config(" in line]
