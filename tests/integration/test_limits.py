"""Limits in front of a real server: what each ends, whom it leaves alone, and what a reload makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import Any

import psycopg
import pytest
import yaml

from pooler.demo.client import SYNC, Disconnected, RawClient, execute, parse, query
from pooler.demo.client import bind as bound
from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database, make_database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]

LIMIT_SECONDS = 1.0
ACTS_WITHIN_SECONDS = 3.0


@pytest.fixture(scope="module")
def fleet(make_shared_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd) -> RunningFleet:
    """One worker; the second database has limits of its own."""
    database = make_database(postgres_newest.server)
    return make_shared_fleet(database, etcd, workers=1, permits=6, admin_reserve=1, more={
        "pool": {"default_pool_size": 5, "idle_transaction_timeout": "1s", "query_timeout": "1500ms",
                 "client_idle_timeout": "1s"}})


def login(fleet: RunningFleet) -> RawClient:
    database = fleet.database
    return RawClient("127.0.0.1", fleet.port).login(database.user, database.password, database.dbname)


def last_word(client: RawClient) -> str:
    """The SQLSTATE of what ends a client that says nothing."""
    try:
        said = client.receive()
        while said.type != "E":
            said = client.receive()
    except Disconnected:
        return "closed"
    assert client.is_closed()
    return said.error().sqlstate


def test_a_transaction_that_works_is_not_idle_and_one_that_rests_is(fleet: RunningFleet) -> None:
    """R51."""
    with login(fleet) as client:
        client.query("begin")
        for _ in range(4):
            client.query("select pg_sleep(0.9)")
        began = monotonic()
        assert last_word(client) == "25P03"
        assert LIMIT_SECONDS <= monotonic() - began < ACTS_WITHIN_SECONDS


def test_a_client_that_rests_after_a_query_is_ended(fleet: RunningFleet) -> None:
    """R52: from the end of its query on."""
    with login(fleet) as client:
        client.query("select pg_sleep(1.2)")
        began = monotonic()
        assert last_word(client) == "57P05"
        assert LIMIT_SECONDS <= monotonic() - began < ACTS_WITHIN_SECONDS


def test_a_query_has_its_own_time_wherever_it_stands(fleet: RunningFleet) -> None:
    """R53: queries in a transaction, and in a pipeline, that last longer together than one may."""
    one = parse("select pg_sleep(0.8)") + bound() + execute()
    with login(fleet) as client:
        client.query("begin")
        client.query("select pg_sleep(0.8)")
        client.query("select pg_sleep(0.8)")
        client.query("commit")
        asked = query("select pg_sleep(0.8)")
        for sent, readies in ((one * 3 + SYNC, 1), ((one + SYNC) * 3, 3), (asked * 3, 3)):
            client.send(sent)
            for _ in range(readies):
                assert all(said.type != "E" for said in client.until_ready())
        client.send(query("select pg_sleep(30)"))
        assert last_word(client) == "57014"


@contextmanager
def connected(fleet: RunningFleet, count: int) -> Iterator[list[psycopg.Connection[Any]]]:
    with ExitStack() as ends:
        yield [ends.enter_context(psycopg.connect(fleet.dsn(), autocommit=True)) for _ in range(count)]


def rewrite(fleet: RunningFleet, section: str, values: dict[str, Any]) -> None:
    """Change the file, reload."""
    settings = yaml.safe_load(fleet.config.read_text())
    settings[section] = settings.get(section, {}) | values
    fleet.config.write_text(yaml.safe_dump(settings))
    done = fleet.fleet.command("fleet", "reload")
    assert done.returncode == 0, done.stderr


def are_served_at_once(fleet: RunningFleet, served: int, clients: int) -> None:
    """Of so many clients just so many are in a transaction at once, and the others wait."""
    with ExitStack() as ends:
        raws = [ends.enter_context(login(fleet)) for _ in range(clients)]
        for raw in raws:
            raw.send(query("begin"))
        expected = {"sv_active": served, "cl_waiting": clients - served}
        wait_until(lambda: {name: int(pool_row(fleet)[name]) for name in expected} == expected,
                   f"{expected}", 15)


def pool_row(fleet: RunningFleet) -> dict[str, str]:
    with psycopg.connect(fleet.console(), autocommit=True) as console:
        found = console.execute("show pools")
        assert found.description is not None
        names = [column.name for column in found.description]
        rows = [dict(zip(names, row, strict=True)) for row in found.fetchall()]
    return next(row for row in rows if row["database"] == fleet.database.dbname)


def test_a_reload_makes_a_pool_larger_and_smaller_and_a_database_and_a_user_have_their_own(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    """R74, R75."""
    fleet = make_fleet(postgres_newest, etcd, workers=1, permits=8, admin_reserve=1, more={
        "pool": {"default_pool_size": 2}})
    are_served_at_once(fleet, 2, 6)
    rewrite(fleet, "pool", {"default_pool_size": 5})
    are_served_at_once(fleet, 5, 6)
    with connected(fleet, 1) as (holder,), holder.transaction():
        holder.execute("select 1")
        rewrite(fleet, "pool", {"default_pool_size": 1})
        assert holder.execute("select 2").fetchone() == (2,)
    are_served_at_once(fleet, 1, 3)
    database = yaml.safe_load(fleet.config.read_text())["databases"]
    database[postgres_newest.dbname]["pool_size"] = 3
    rewrite(fleet, "databases", database)
    are_served_at_once(fleet, 3, 5)
    rewrite(fleet, "users", {postgres_newest.user: {"pool_size": 2}})
    are_served_at_once(fleet, 2, 4)
    rewrite(fleet, "users", {postgres_newest.user: {"max_user_client_connections": 2}})
    with connected(fleet, 2), pytest.raises(psycopg.OperationalError, match="max_user_client_connections"):
        psycopg.connect(fleet.dsn())
    with connected(fleet, 2):
        pass


def test_client_limits_hold_over_all_workers(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    fleet = make_fleet(postgres_newest, etcd, workers=2, permits=4, admin_reserve=1, more={
        "pool": {"default_pool_size": 2, "max_db_client_connections": 5}})
    for _ in range(3):
        with connected(fleet, 5):
            for _ in range(4):
                with pytest.raises(psycopg.OperationalError, match="max_db_client_connections"):
                    psycopg.connect(fleet.dsn())
        wait_until(lambda: not clients_of(fleet), "all have left", 10)


def clients_of(fleet: RunningFleet) -> int:
    with psycopg.connect(fleet.console(), autocommit=True) as console:
        found = console.execute("show clients")
        assert found.description is not None
        at = [column.name for column in found.description].index("database")
        return sum(row[at] == fleet.database.dbname for row in found.fetchall())
