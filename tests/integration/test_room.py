"""Who has no session gets room from who has one idle, though the budget is full."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from time import monotonic

import psycopg
import pytest
import yaml

from pooler.demo.client import RawClient, query
from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet
from tests.support.postgres import Database

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]


def test_a_user_without_a_session_gets_the_only_one_of_another(
    postgres_newest: Database, etcd: Etcd, make_fleet: MakeFleet
) -> None:
    other, password = f"other_{secrets.token_hex(4)}", secrets.token_hex(8)
    postgres_newest.server.execute(f"create role {other} login password '{password}'")
    fleet = make_fleet(postgres_newest, etcd, permits=1, workers=1, also={other: password},
                       more={"pool": {"query_wait_timeout": "20s"}})
    with (psycopg.connect(fleet.dsn(), autocommit=True) as one,
          psycopg.connect(fleet.dsn(user=other, password=password), autocommit=True) as two):
        for _ in range(3):
            for client in (one, two):
                assert client.execute("select 1").fetchone() == (1,)


def test_a_tenant_that_fills_its_own_limits_keeps_nobody_else_waiting(
    postgres_newest: Database, etcd: Etcd, make_fleet: MakeFleet
) -> None:
    """R70. It has all the clients that it may, and all of its sessions are busy."""
    greedy, password = f"greedy_{secrets.token_hex(4)}", secrets.token_hex(8)
    postgres_newest.server.execute(f"create role {greedy} login password '{password}'")
    fleet = make_fleet(postgres_newest, etcd, permits=4, workers=2, also={greedy: password}, more={
        "users": {greedy: {"pool_size": 2, "max_user_client_connections": 10}},
        "pool": {"max_client_conn": 20, "query_wait_timeout": "60s"}})
    dsn = fleet.dsn(user=greedy, password=password)
    with ExitStack() as stack:
        for _ in range(10):
            raw = stack.enter_context(RawClient("127.0.0.1", fleet.port))
            raw.login(greedy, password, postgres_newest.dbname).send(query("select pg_sleep(60)"))
        with pytest.raises(psycopg.OperationalError, match="max_user_client_connections"):
            psycopg.connect(dsn)
        for _ in range(5):
            began = monotonic()
            with psycopg.connect(fleet.dsn(), autocommit=True) as other:
                assert other.execute("select 1").fetchone() == (1,)
            assert monotonic() - began < 3


def test_two_entries_of_one_database_have_sessions_of_their_own_each(
    postgres_newest: Database, etcd: Etcd, make_fleet: MakeFleet
) -> None:
    """As `app` and `app_session` of many a PgBouncer: the larger one takes no seats of the smaller."""
    fleet = make_fleet(postgres_newest, etcd, permits=6, workers=1, start=False)
    settings = yaml.safe_load(fleet.config.read_text())
    name = postgres_newest.dbname
    settings["databases"][name]["pool_size"] = 4
    settings["databases"]["small"] = {**settings["databases"][name], "pool_size": 1, "pool_mode": "session"}
    settings["pool"]["query_wait_timeout"] = "10s"
    fleet.config.write_text(yaml.safe_dump(settings))
    fleet.fleet.start()
    with ExitStack() as stack:
        large = [stack.enter_context(psycopg.connect(fleet.dsn())) for _ in range(4)]
        for client in large:
            client.execute("select 1")  # and stays in its transaction
        small = stack.enter_context(psycopg.connect(fleet.dsn(dbname="small"), autocommit=True))
        assert small.execute("select current_database()").fetchone() == (name,)
        other = stack.enter_context(psycopg.connect(fleet.dsn(dbname="small"), autocommit=True))
        with pytest.raises(psycopg.Error, match="query_wait_timeout"):
            other.execute("select 1")
    shown = fleet.fleet.command("ledger", "audit", fleet.fleet.plan.ledger)
    assert shown.returncode == 0, shown.stdout + shown.stderr
