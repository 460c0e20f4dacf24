"""Ordinary work of real drivers through a whole fleet: transaction pooling, fewer sessions than clients."""

from __future__ import annotations

import asyncio
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from psycopg.rows import dict_row

from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]


@pytest.fixture
def fleet(make_fleet: MakeFleet, postgres: Database, etcd: Etcd) -> RunningFleet:
    """Two workers, four sessions in all."""
    return make_fleet(postgres, etcd, permits=4)


def _tool(fleet: RunningFleet, *command: str, stdin: str = "") -> str:
    database = fleet.database
    environment = {**os.environ, "PGPASSWORD": database.password, "PGHOST": "127.0.0.1",
                   "PGPORT": str(fleet.port), "PGUSER": database.user, "PGDATABASE": database.dbname,
                   "PGSSLMODE": "disable"}
    done = subprocess.run(
        command, input=stdin, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_psql_does_its_ordinary_work(fleet: RunningFleet) -> None:
    script = """
        create table t (a int primary key, b text);
        begin; insert into t values (1, 'one'); savepoint s; insert into t values (1, 'again');
        rollback to s; insert into t values (2, 'two'); commit;
        \\copy t from stdin with (delimiter '|')
        3|three
        4|four
        \\.
        \\copy (select * from t order by a) to stdout with csv
        select count(*) as c from t \\gset
        \\echo counted :c
        \\d t
        explain select * from t;
    """
    out = _tool(fleet, "psql", "-X", "-v", "ON_ERROR_STOP=0", stdin="\n".join(
        line.strip() for line in script.splitlines()))
    assert "1,one\n2,two\n3,three\n4,four" in out
    assert "counted 4" in out
    assert "Primary key" in out or "PRIMARY KEY" in out


@pytest.mark.parametrize("mode", ["simple", "extended", "prepared"])
def test_pgbench_runs_in_every_query_mode(fleet: RunningFleet, mode: str) -> None:
    _tool(fleet, "pgbench", "-q", "-i", "-s", "1")
    # a thread for each client: pgbench waits for PQprepare without serving the thread's other clients
    out = _tool(fleet, "pgbench", "-n", "-M", mode, "-c", "12", "-j", "12", "-t", "50")
    assert "transactions actually processed: 600/600" in out
    assert "failed transactions: 0" in out


def test_psycopg_prepares_copies_and_rolls_back(fleet: RunningFleet) -> None:
    with psycopg.connect(fleet.dsn(), row_factory=dict_row, prepare_threshold=1) as connection:
        connection.execute("create table p (a int, b text)")
        with connection.cursor() as cursor:
            with cursor.copy("copy p from stdin") as copy:
                for number in range(1000):
                    copy.write_row((number, "x" * (number % 50)))
            connection.commit()
            for number in range(20):
                row = cursor.execute("select count(*) c, %s::int n from p", (number,)).fetchone()
                assert row == {"c": 1000, "n": number}
                connection.commit()
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("select 1/0")
        connection.rollback()
        with connection.transaction():
            connection.execute("delete from p")
            raise psycopg.Rollback
        assert connection.execute("select count(*) c from p").fetchone() == {"c": 1000}


def test_psycopg_pipelines_many_statements_and_an_error_in_the_middle(fleet: RunningFleet) -> None:
    with psycopg.connect(fleet.dsn(), autocommit=True, prepare_threshold=0) as connection:
        for _ in range(5):
            with connection.pipeline():
                cursors = [connection.execute("select %s::int", (n,)) for n in range(50)]
                assert [cursor.fetchone() for cursor in cursors] == [(n,) for n in range(50)]
        with pytest.raises(psycopg.errors.UndefinedTable):
            _pipeline_with_an_error(connection)
        assert connection.execute("select 3").fetchone() == (3,)


def _pipeline_with_an_error(connection: psycopg.Connection[Any]) -> None:
    with connection.pipeline() as pipeline:
        connection.execute("select 1")
        connection.execute("select * from nowhere_at_all")
        connection.execute("select 2")
        pipeline.sync()


async def _psycopg_async(dsn: str) -> list[int]:
    async def one(number: int) -> int:
        async with await psycopg.AsyncConnection.connect(dsn, prepare_threshold=1) as connection:
            total = 0
            for step in range(10):
                row = await (await connection.execute("select %s::int + %s::int", (number, step))).fetchone()
                assert row is not None
                total += row[0]
                await connection.commit()
            return total

    return list(await asyncio.gather(*(one(n) for n in range(16))))


def test_psycopg_async_shares_few_sessions_among_many_clients(fleet: RunningFleet) -> None:
    assert asyncio.run(_psycopg_async(fleet.dsn())) == [n * 10 + 45 for n in range(16)]


async def _asyncpg(fleet: RunningFleet) -> dict[str, Any]:
    database = fleet.database
    pool = await asyncpg.create_pool(
        host="127.0.0.1", port=fleet.port, user=database.user, password=database.password,
        database=database.dbname, ssl=False, min_size=12, max_size=12)
    seen: dict[str, Any] = {}
    async with pool.acquire() as connection:
        await connection.execute("create table a (n int, t text)")
        await connection.copy_records_to_table("a", records=[(n, str(n)) for n in range(500)])

    async def work(number: int) -> int:
        async with pool.acquire() as connection, connection.transaction():
            value = await connection.fetchval("select sum(n) + $1::int from a", number)
            rows = [row async for row in connection.cursor("select n from a order by n limit $1", 120)]
            assert len(rows) == 120
            return int(value)

    seen["sums"] = await asyncio.gather(*(work(n) for n in range(48)))
    async with pool.acquire() as connection:
        statement = await connection.prepare("select t from a where n = $1")
        seen["prepared"] = [await statement.fetchval(n) for n in (1, 250, 499)]
        try:
            await connection.fetchval("select 1/0")
        except asyncpg.DivisionByZeroError as error:
            seen["error"] = error.sqlstate
    await pool.close()
    return seen


def test_asyncpg_prepares_copies_and_uses_cursors(fleet: RunningFleet) -> None:
    seen = asyncio.run(_asyncpg(fleet))
    assert seen["sums"] == [sum(range(500)) + n for n in range(48)]
    assert seen["prepared"] == ["1", "250", "499"]
    assert seen["error"] == "22012"


def test_sqlalchemy_works_over_its_pool_in_threads(fleet: RunningFleet) -> None:
    database = fleet.database
    url = sa.URL.create(
        "postgresql+psycopg", database.user, database.password, "127.0.0.1", fleet.port, database.dbname,
        {"sslmode": "disable"})
    engine = sa.create_engine(url, pool_size=8, max_overflow=0)
    columns = (sa.Column("id", sa.Integer, primary_key=True), sa.Column("v", sa.Text))
    table = sa.Table("s", sa.MetaData(), *columns)
    counted = sa.select(sa.func.count()).select_from(table)
    table.create(engine)

    def write(number: int) -> None:
        with engine.begin() as connection:
            connection.execute(table.insert(), [{"id": number * 10 + k, "v": f"v{k}"} for k in range(10)])
            assert connection.execute(counted.where(table.c.id == number * 10)).scalar() == 1

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(24)))
    with engine.connect() as connection:
        assert connection.execute(counted).scalar() == 240
        assert sa.inspect(connection).get_columns("s")[1]["name"] == "v"
    engine.dispose()
