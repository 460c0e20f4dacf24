"""A server process that hangs in its start-up, its owner dead: no time frees its permit, only its end."""

from __future__ import annotations

import threading
from contextlib import suppress

import psycopg
import pytest

from coordinator.ledger.states import SessionState
from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet
from tests.support.postgres import MakeServer, make_database
from tests.support.wait import wait_until
from tests.support.watching import proofs, stay_unknown, unknown, watch_of

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

AUTHENTICATION_SECONDS = 1
MORE = {"etcd": {"lease_ttl": "2s"}}


def ask(dsn: str) -> None:
    with suppress(psycopg.Error), psycopg.connect(dsn) as connection:
        connection.execute("select 1")


@pytest.mark.timeout(150)
@pytest.mark.parametrize("version", [15, 18])
def test_a_backend_that_waits_for_a_lock_in_its_start_up_keeps_its_permit_when_its_owner_is_killed(
    make_fleet: MakeFleet, make_server: MakeServer, etcd: Etcd, etcd_prefix: str, version: int
) -> None:
    server = make_server(version, settings={"authentication_timeout": f"{AUTHENTICATION_SECONDS}s"})
    database = make_database(server)
    fleet = make_fleet(database, etcd, permits=2, workers=1, more=MORE)
    watch = watch_of(fleet, etcd, etcd_prefix)
    with server.connect(dbname=database.dbname) as holder:
        holder.execute("begin")
        holder.execute("lock table pg_catalog.pg_db_role_setting in access exclusive mode")
        client = threading.Thread(target=ask, args=(fleet.dsn(connect_timeout="60"),))
        client.start()
        wait_until(lambda: any(each.state is SessionState.CONNECTING for each in watch.now().values()),
                   "a session is being opened", 20)
        wait_until(lambda: holder.execute(
            "select count(*) from pg_locks where not granted and relation = 'pg_db_role_setting'::regclass",
        ).fetchone() > (0,), "its backend waits for the lock", 20)
        fleet.kill_worker(0)
        wait_until(lambda: unknown(watch), "it is unknown", 20)
        permits = set(unknown(watch))
        assert not any(each.pid for each in unknown(watch).values())
        stay_unknown(watch, permits, 8 * AUTHENTICATION_SECONDS)
        holder.execute("rollback")
    wait_until(lambda: not permits & unknown(watch).keys(), "the permits are free", 60)
    client.join(70)
    assert proofs(fleet, permits) == {"never_born": len(permits)}
