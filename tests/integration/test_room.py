"""Who has no session gets room from who has one idle, though the budget is full."""

from __future__ import annotations

import secrets

import psycopg
import pytest

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
