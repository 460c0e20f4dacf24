"""What one client sets or leaves on a session is there for itself and for nobody else, by every rule of
`session_state`, on real servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from secrets import token_hex

import psycopg
import pytest

from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database, make_database

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]

Client = psycopg.Connection[tuple[object, ...]]


@pytest.fixture(scope="module", params=["clean", "pin"])
def fleet(
    request: pytest.FixtureRequest, make_shared_fleet: MakeFleet, postgres: Database, etcd: Etcd
) -> RunningFleet:
    """One worker with two sessions."""
    database = make_database(postgres.server)
    return make_shared_fleet(database, etcd, workers=1, permits=4, admin_reserve=1, more={
        "pool": {"default_pool_size": 2, "session_state": request.param}})


@contextmanager
def clients(fleet: RunningFleet, count: int, **options: str) -> Iterator[list[Client]]:
    dsn = psycopg.conninfo.make_conninfo(fleet.dsn(), **options)
    with ExitStack() as ends:
        yield [ends.enter_context(psycopg.connect(dsn, autocommit=True, prepare_threshold=None))
               for _ in range(count)]


def value(client: Client, sql: str) -> object:
    row = client.execute(sql).fetchone()
    assert row is not None
    return row[0]


@contextmanager
def another_holds_a_session(holder: Client) -> Iterator[None]:
    """So that whoever comes next gets the other one."""
    with holder.transaction():
        holder.execute("select 1")
        yield


SETTINGS = {
    "statement_timeout": ("set statement_timeout = '1234ms'", "1234ms"),
    "search_path": ("set search_path = public, \"My \"\"Odd\"\" schema\"", 'public, "My ""Odd"" schema"'),
    "default_transaction_read_only": ("set default_transaction_read_only = on", "on"),
    "default_transaction_isolation": (
        "set session characteristics as transaction isolation level serializable", "serializable"),
    "work_mem": ("select set_config('work_mem', '9MB', false)", "9MB"),
    "app.tenant_id": ("set app.tenant_id = 't''1'", "t'1"),
    "app.user_id": ("select set_config('app.user_id', '7', false)", "7"),
    "timezone": ("set time zone 'Asia/Tokyo'", "Asia/Tokyo"),
    "application_name": ("set application_name = 'it''s \\\\ me'", "it's \\\\ me"),
    "client_encoding": ("set names 'latin1'", "LATIN1"),
}


def test_settings_stay_with_the_client_that_made_them_and_reach_no_other(fleet: RunningFleet) -> None:
    """R31, R33, R36: on whichever session either is served."""
    with clients(fleet, 3) as (one, two, holder):
        show = {name: f"select coalesce(current_setting('{name}', true), '')" for name in SETTINGS}
        before = {name: value(two, sql) for name, sql in show.items()}
        for sql, _ in SETTINGS.values():
            one.execute(sql)
        for _ in range(3):
            with another_holds_a_session(holder):
                assert {name: value(one, sql) for name, sql in show.items()} == {
                    name: wanted for name, (_, wanted) in SETTINGS.items()}
                assert {name: value(two, sql) for name, sql in show.items()} == before
            assert {name: value(two, sql) for name, sql in show.items()} == before


def test_only_what_was_set_for_the_session_is_kept(fleet: RunningFleet) -> None:
    """R34: not what was local to a transaction, nor what was rolled back."""
    with clients(fleet, 2) as (one, holder):
        notices: list[object] = []
        one.add_notice_handler(notices.append)
        one.execute("begin; set local statement_timeout = 1000; set transaction isolation level serializable;"
                    "select 1; set work_mem = '9MB'; commit")
        one.execute("begin; set lock_timeout = '7s'; rollback")
        with pytest.raises(psycopg.errors.DivisionByZero):
            one.execute("begin; set temp_buffers = '1MB'; select 1/0")
        one.execute("rollback")
        with another_holds_a_session(holder):
            assert value(one, "show work_mem") == "9MB"
            assert value(one, "show statement_timeout") == "0"
            assert value(one, "show lock_timeout") == "0"
            assert value(one, "show default_transaction_isolation") == "read committed"
        assert notices == []


def test_row_security_by_a_custom_setting_shows_nobody_a_strangers_rows(
    fleet: RunningFleet
) -> None:
    """R36."""
    with clients(fleet, 3) as (one, two, three):
        one.execute("drop table if exists secret; create table secret (tenant text)")
        one.execute("insert into secret values ('t1'), ('t2')")
        one.execute("alter table secret enable row level security")
        one.execute("alter table secret force row level security")
        one.execute("create policy own on secret using (tenant = current_setting('app.tenant', true))")
        for _ in range(3):
            one.execute("set app.tenant = 't1'")
            assert value(one, "select string_agg(tenant, ',') from secret") == "t1"
            assert value(two, "select count(*) from secret") == 0
            assert value(two, "select coalesce(current_setting('app.tenant', true), '')") == ""
            three.execute("select set_config('app.' || 'tenant', 't2', false)")  # no name to be seen
            assert value(one, "select string_agg(tenant, ',') from secret") == "t1"


def test_a_role_goes_with_its_client_alone(fleet: RunningFleet) -> None:
    database = fleet.database
    role = f"role_{token_hex(4)}"
    database.server.execute(f"CREATE ROLE {role}")
    database.server.execute(f"GRANT {role} TO {database.user}")
    with clients(fleet, 3) as (one, two, holder):
        one.execute(f"set role {role}")
        for _ in range(3):
            with another_holds_a_session(holder):
                assert value(one, "select current_user") == role
                assert value(two, "select current_user") == database.user
        database.server.execute(f"REVOKE {role} FROM {database.user}")
        two.execute("select 1")
        value(two, "select 1")
        with another_holds_a_session(holder):
            value(two, "select 1")  # whichever session is left, it had another client last
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                one.execute("select current_user")


def test_reset_and_discard_give_a_client_back_what_it_started_with(fleet: RunningFleet) -> None:
    with clients(fleet, 2, options="-c work_mem=7MB -c app.k=v", application_name="me") as (one, two):
        for undo in ("reset all", "discard all"):
            one.execute("set work_mem = '1MB'; set application_name = 'other'; set app.k = 'w'")
            assert value(two, "show work_mem") == "7MB"
            assert value(one, "show work_mem") == "1MB"
            one.execute(undo)
            shown = [value(one, f"show {name}") for name in ("work_mem", "application_name", "app.k")]
            assert shown == ["7MB", "me", "v"], undo


def test_what_a_sequence_gave_last_is_told_in_its_own_transaction_and_never_to_another_client(
    fleet: RunningFleet,
) -> None:
    name = f"s_{token_hex(4)}"
    with clients(fleet, 2) as (one, two):
        one.execute(f"create sequence {name}")
        for ask, values in (("select lastval()", None), ("select lastval() where %s::int = 1", (1,)),
                            (f"select currval('{name}')", None)):
            for _ in range(3):
                value(one, f"select nextval('{name}')")
                with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
                    two.execute(ask, values)
            with two.transaction():
                expected = value(two, f"select nextval('{name}')")
                assert two.execute(ask, values).fetchone() == (expected,)


TEMPORARY = "select count(*) from pg_class where relname = 't' and relnamespace = pg_my_temp_schema()"
LEAVINGS = {
    "temporary table": ("create temp table t (a int)", TEMPORARY),
    "temporary function": ("create function pg_temp.f() returns int language sql as 'select 1'",
                           "select count(*) from pg_proc where pronamespace = pg_my_temp_schema()"),
    "held cursor": ("declare c cursor with hold for select 1", "select count(*) from pg_cursors"),
    "listen": ("listen ch", "select count(*) from pg_listening_channels()"),
    "prepared": ("prepare p as select 1", "select count(*) from pg_prepared_statements where from_sql"),
    "advisory lock": ("select pg_advisory_lock(5)",
                      "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"),
    "in a block": ("do $$ begin perform pg_advisory_lock(6); create temp table t (a int); end $$",
                   f"select ({TEMPORARY}) + (select count(*) from pg_locks"
                   " where locktype = 'advisory' and pid = pg_backend_pid())"),
}
UNDO = {
    "temporary table": "drop table t", "temporary function": "drop function pg_temp.f()",
    "held cursor": "close c", "listen": "unlisten *",
    "prepared": "deallocate p", "advisory lock": "select pg_advisory_unlock(5)",
    "in a block": "drop table t; select pg_advisory_unlock(6)",
}


@pytest.mark.parametrize("kind", LEAVINGS)
def test_state_is_undone_or_pinned_and_a_pin_ends_with_its_cause(fleet: RunningFleet, kind: str) -> None:
    """R44, R49, R71."""
    leave, look = LEAVINGS[kind]
    pins = "pin" in fleet.fleet.config.read_text()
    with clients(fleet, 3) as (one, two, three):
        one.execute(leave)
        own = value(one, "select pg_backend_pid()")
        assert value(one, look) == (0 if not pins else 2 if kind == "in a block" else 1)
        for _ in range(3):
            assert value(two, look) == 0
        if pins:
            for other in ("reset work_mem", "analyze pg_catalog.pg_am", "set work_mem = '1MB'"):
                one.execute(other)
                assert value(one, "select pg_backend_pid()") == own
            assert value(one, look) == (2 if kind == "in a block" else 1)
            assert own not in {value(two, "select pg_backend_pid()") for _ in range(3)}
            one.execute(UNDO[kind])
            with another_holds_a_session(two), another_holds_a_session(three):
                pass  # both sessions are there for anybody again




REFUSED = {
    "listen": "listen ch", "temporary table": "create temp table t (a int)",
    "into temporary": "select 1 as a into temp t", "held cursor": "declare c cursor with hold for select 1",
    "prepared": "prepare p as select 1", "advisory lock": "select pg_advisory_lock(5)",
    "behind a comment": "/* */ listen ch", "not the first": "select 1; prepare p as select 1",
}
TAKEN = [
    "select 'listen', 'prepare p', 'create temp table'", "select pg_advisory_xact_lock(1)",
    "-- listen\nselect 1", "begin; declare c cursor for select 1; commit", "set work_mem = '9MB'",
    "unlisten *", "notify ch",
]


@pytest.fixture(scope="module")
def refusing(make_shared_fleet: MakeFleet, postgres: Database, etcd: Etcd) -> RunningFleet:
    database = make_database(postgres.server)
    return make_shared_fleet(database, etcd, workers=1, permits=2, admin_reserve=1, more={
        "pool": {"default_pool_size": 1, "session_state": "reject"}})


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("protocol", ["simple", "extended"])
def test_what_cannot_be_kept_is_refused_and_the_transaction_fails_by_it(
    refusing: RunningFleet, kind: str, protocol: str
) -> None:
    if protocol == "extended" and ";" in REFUSED[kind]:
        return  # several statements need the simple protocol
    with clients(refusing, 1) as (one,):
        for _ in range(2):
            with pytest.raises(psycopg.errors.FeatureNotSupported, match="session_state") as told:
                one.execute(REFUSED[kind], prepare=None if protocol == "simple" else True)
            assert told.value.diag.message_hint is not None
            assert value(one, "select 1") == 1
        one.execute("begin")
        with pytest.raises(psycopg.errors.FeatureNotSupported):
            one.execute(REFUSED[kind])
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            one.execute("select 1")
        one.execute("rollback")


def test_what_only_looks_like_it_is_served(refusing: RunningFleet) -> None:
    with clients(refusing, 1) as (one,):
        for sql in TAKEN:
            one.execute(sql)
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="ASSERTION"):
            one.execute("create assertion a check (true)")
