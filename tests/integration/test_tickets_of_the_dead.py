"""Which ticket was on the session of a worker that died: its own host tells, whoever leads; and if that host
is gone too, that it is lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from pooler.demo.etcd import Etcd
from pooler.demo.process import started_at
from tests.integration.test_alerts import first, given_up, lines, unknown
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import MakeServer, make_database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

FLEET = "ticketsofthedead"
TENANT = ({"match": {"user": "*"}, "tenant": "acme"},)


@pytest.fixture
def hosts(make_fleet: MakeFleet, make_server: MakeServer, etcd: Etcd) -> tuple[RunningFleet, RunningFleet]:
    """Two hosts of one fleet; the first leads."""
    database = make_database(make_server())
    made = [make_fleet(database, etcd, permits=6, workers=1, name=FLEET, tenants=TENANT,
                       more={"etcd": {"lease_ttl": "2s"}, "fleet": {"host_name": name}})
            for name in ("host-a", "host-b")]
    assert lines(made[0], "leader_elected")
    return made[0], made[1]


@contextmanager
def held_up(pid: int) -> Iterator[None]:
    """A server process that ends only when it goes on."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def kill_all(fleet: RunningFleet) -> None:
    processes = {pid: started_at(pid) for pid in fleet.fleet.processes()}
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert fleet.fleet.child is not None
    fleet.fleet.child.wait(10)


def row_of(fleet: RunningFleet, pid: int) -> dict[str, Any]:
    found = [row for row in unknown(fleet) if row["pid"] == pid]
    return found[0] if found else {"ticket": "not unknown", "tenant": ""}


def test_the_host_of_a_dead_worker_tells_its_ticket_to_a_leader_elsewhere(
    hosts: tuple[RunningFleet, RunningFleet],
) -> None:
    leading, other = hosts
    with given_up(other) as client:
        (pid,) = client.execute("select pg_backend_pid()").fetchone() or (0,)
        with held_up(pid):
            other.kill_worker(0)
            noted = first(other, "ticket_noted")
            wait_until(
                lambda: row_of(leading, pid)["ticket"] == noted["ticket"], "the leader's host shows it", 10)
            assert (row_of(leading, pid)["tenant"], noted["tenant"]) == ("acme", "acme")
            told = first(leading, "session_permit_stuck", pid=pid)
            assert (told["ticket"], told["tenant"], told["host"]) == (noted["ticket"], "acme", "host-b")
        wait_until(lambda: row_of(leading, pid)["ticket"] == "not unknown", "it is proven gone", 20)


def test_a_ticket_whose_host_is_gone_too_is_lost_with_it(
    hosts: tuple[RunningFleet, RunningFleet],
) -> None:
    leading, other = hosts
    with given_up(other) as client:
        (pid,) = client.execute("select pg_backend_pid()").fetchone() or (0,)
        with held_up(pid):
            kill_all(other)
            wait_until(lambda: row_of(leading, pid)["ticket"] == "lost with host", "it is said so", 20)
            assert first(leading, "session_permit_stuck", pid=pid)["ticket"] == "lost with host"
        wait_until(lambda: row_of(leading, pid)["ticket"] == "not unknown", "it is proven gone", 20)
    audit = leading.fleet.command("ledger", "audit", leading.database.dbname, "--json")
    assert (audit.returncode, json.loads(audit.stdout)["differences"]) == (0, [])
