"""A monitor role that lost its grants: what it no longer sees is not taken for gone."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import psycopg
import pytest
from psycopg import sql

from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet
from tests.support.postgres import MakeServer, make_database
from tests.support.wait import wait_until
from tests.support.watching import logged, proofs, stay_unknown, unknown, watch_of

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

MORE = {"etcd": {"lease_ttl": "2s"}}
HELD_SECONDS = 8.0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("version", [15, 18])
def test_without_pg_monitor_nothing_is_released_and_the_missing_grant_is_named(
    make_fleet: MakeFleet, make_server: MakeServer, etcd: Etcd, etcd_prefix: str, version: int
) -> None:
    server = make_server(version)
    database = make_database(server)
    fleet = make_fleet(database, etcd, permits=4, workers=2, more=MORE)
    watch = watch_of(fleet, etcd, etcd_prefix)
    monitor = sql.Identifier(database.monitor)
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(psycopg.connect(fleet.dsn())).execute("select 1")
        server.execute(sql.SQL("REVOKE pg_monitor FROM {}").format(monitor))
        for index in (0, 1):
            fleet.kill_worker(index)
        wait_until(lambda: len(unknown(watch)) == 4, "all are unknown", 20)
        permits = set(unknown(watch))
        stay_unknown(watch, permits, HELD_SECONDS)
        assert any("GRANT pg_monitor" in each["why"] for each in logged(fleet, "look_void"))
        server.execute(sql.SQL("GRANT pg_monitor TO {}").format(monitor))
        wait_until(lambda: not permits & unknown(watch).keys(), "they are proven gone", 30)
        with suppress(psycopg.Error):  # their workers are dead
            stack.close()
    assert proofs(fleet, permits) == {"absent": 4}
