"""A transaction that its client named runs once, whichever host a retry comes to."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import MakeServer, make_database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]


@pytest.fixture
def hosts(make_fleet: MakeFleet, make_server: MakeServer, etcd: Etcd) -> tuple[RunningFleet, RunningFleet]:
    """Two hosts of one fleet, a worker each."""
    database = make_database(make_server())
    made = [make_fleet(database, etcd, permits=6, workers=1, name="namedtickets",
                       more={"etcd": {"lease_ttl": "2s"}, "fleet": {"host_name": name}})
            for name in ("host-a", "host-b")]
    return made[0], made[1]


def connect(fleet: RunningFleet, name: str) -> psycopg.Connection[Any]:
    return psycopg.connect(fleet.dsn(), options=f"-c pooler.ticket={name}", autocommit=True)


def refusal(fleet: RunningFleet, name: str) -> tuple[str | None, str, str]:
    with connect(fleet, name) as again, pytest.raises(psycopg.Error) as told:
        again.execute("select 1")
    said = told.value.diag
    return said.sqlstate, said.message_primary or "", said.message_hint or ""


def shown(fleet: RunningFleet, name: str) -> dict[str, Any]:
    with psycopg.connect(fleet.console(), autocommit=True) as console:
        cursor = console.execute(f"SHOW TICKET '{name}'")
        rows, columns = cursor.fetchall(), [each.name for each in cursor.description or ()]
    assert len(rows) == 1
    return dict(zip(columns, rows[0], strict=True))


def test_a_retry_is_told_what_became_of_it(hosts: tuple[RunningFleet, RunningFleet]) -> None:
    one, two = hosts
    with connect(one, "paid") as client:
        client.execute("select 1")
        client.execute("select 2")
    state, text, hint = refusal(two, "paid")
    assert (state, text) == ("25000", 'ticket "paid" has ended: outcome=committed')
    assert hint.splitlines()[0] == "retry=never ticket=paid"
    with connect(two, "undone") as client:
        client.execute("begin")
        client.execute("select 1")
        running = refusal(one, "undone")
        assert running[0] == "53300"
        assert running[2].startswith("retry=after after_ms=")
        client.execute("rollback")
    wait_until(lambda: shown(one, "undone")["state"] == "REQUEST_RELEASED", "its end is recorded", 10.0)
    assert refusal(one, "undone")[1].endswith("outcome=rolled_back")


def test_of_a_worker_that_died_the_outcome_is_unknown(hosts: tuple[RunningFleet, RunningFleet]) -> None:
    one, two = hosts
    client = connect(one, "lost")
    client.execute("begin")
    client.execute("select 1")
    one.kill_worker(0)
    assert refusal(two, "lost")[0] in ("53300", "25000")
    wait_until(lambda: shown(two, "lost")["outcome"] == "unknown", "its session is proven gone", 20.0)
    assert refusal(two, "lost")[:2] == ("25000", 'ticket "lost" has ended: outcome=unknown')
    client.close()
