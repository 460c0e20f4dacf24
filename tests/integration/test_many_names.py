"""Clients that choose names freely leave nothing behind in a worker."""

from __future__ import annotations

import psycopg
import pytest

from pooler.demo.etcd import Etcd
from pooler.demo.fleet import http_get
from tests.support.fleet import MakeFleet
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]


def test_the_pools_of_users_that_no_list_names_are_forgotten(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    more = {
        "auth": {"type": "trust", "file": None},
        "pool": {"server_login_retry": "1s", "autodb_idle_timeout": "1s", "client_login_timeout": "2s",
                 "server_idle_timeout": "1s"},
    }
    fleet = make_fleet(postgres_newest, etcd, permits=2, workers=1, more=more)

    def named_pools() -> list[str]:
        _, page = http_get(fleet.fleet.ports.worker_http, "/metrics")
        return [line for line in page.splitlines() if 'user="nobody-' in line]

    for number in range(20):
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(fleet.dsn(user=f"nobody-{number}"))
    assert named_pools()
    wait_until(lambda: not named_pools(), "the pools are forgotten", 20)
