"""The clean-up against real servers: after it nothing of a client's session state is left."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg.pq import ExecStatus, TransactionStatus

from pooler.wire.session_state import Residue, cleanup, residue_of_tag, residue_of_text
from tests.support.postgres import Database

pytestmark = pytest.mark.postgres

LEAVE = {
    "set work_mem = '9MB'": "select current_setting('work_mem') = '9MB'",
    "select set_config('app.tenant', 't1', false)": "select current_setting('app.tenant', true) = 't1'",
    "update pg_settings set setting = 'off' where name = 'enable_sort'":
        "select current_setting('enable_sort') = 'off'",
    "set role pg_read_all_stats": "select current_user = 'pg_read_all_stats'",
    "listen news": "select count(*) > 0 from pg_listening_channels()",
    "declare c cursor with hold for select 1": "select count(*) > 0 from pg_cursors where is_holdable",
    "prepare p as select 1": "select count(*) > 0 from pg_prepared_statements",
    "create temp table t (a int)": "select to_regclass('pg_temp.t') is not null",
    "select 1 into temporary u": "select to_regclass('pg_temp.u') is not null",
    "create table pg_temp.v as select 1": "select to_regclass('pg_temp.v') is not null",
    "select pg_advisory_lock(7)":
        "select count(*) > 0 from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()",
    "do $$ begin perform set_config('work_mem', '8MB', false); end $$":
        "select current_setting('work_mem') = '8MB'",
}


class Session:
    """One session by the simple protocol, with what its statements left behind added up."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection
        self.residue = 0

    def run(self, sql: bytes) -> bytes | None:
        result = self.connection.pgconn.exec_(sql)
        assert result.status != ExecStatus.FATAL_ERROR, result.error_message
        self.residue |= residue_of_text(sql) | residue_of_tag(result.command_status or b"")
        return result.get_value(0, 0) if result.status == ExecStatus.TUPLES_OK and result.ntuples else None

    def clean(self, residue: int, *, in_transaction: bool = False) -> None:
        for query in cleanup(residue, in_transaction=in_transaction):
            self.run(query)
        assert self.connection.pgconn.transaction_status == TransactionStatus.IDLE


@pytest.fixture
def session(postgres: Database) -> Iterator[Session]:
    with psycopg.connect(postgres.server.dsn("postgres", "postgres"), autocommit=True) as connection:
        yield Session(connection)


@pytest.mark.parametrize("left", LEAVE, ids=lambda text: text.split("(")[0][:24])
def test_what_one_statement_leaves_is_seen_and_undone(session: Session, left: str) -> None:
    session.run(b"begin")
    session.run(left.encode())
    session.run(b"commit")
    residue = session.residue
    assert session.run(LEAVE[left].encode()) == b"t"
    session.clean(residue)
    assert session.run(LEAVE[left].encode()) != b"t"


def test_everything_together_is_undone_by_one_query(session: Session) -> None:
    for left in LEAVE:
        if not left.startswith("do"):
            session.run(f"begin;{left};commit".encode())
    for left in LEAVE:
        session.residue |= residue_of_text(left.encode())
    session.residue |= int(Residue.LISTEN | Residue.PREPARED | Residue.PARAMETERS)
    residue = session.residue & ~int(Residue.SUSPECT)
    session.run(b"begin")
    assert len(cleanup(residue, in_transaction=True)) == 1
    session.clean(residue, in_transaction=True)
    for check in LEAVE.values():
        assert session.run(check.encode()) != b"t", check


def test_a_failed_transaction_is_cleaned_too(session: Session) -> None:
    session.run(b"begin")
    session.connection.pgconn.exec_(b"select 1/0")
    session.clean(int(Residue.SUSPECT), in_transaction=True)


def test_a_read_only_default_does_not_stop_the_clean_up(session: Session) -> None:
    session.run(b"create temp table t (a int)")
    session.run(b"set default_transaction_read_only = on")
    session.clean(session.residue)
    assert session.run(b"show default_transaction_read_only") == b"off"
