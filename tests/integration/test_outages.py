"""What a fleet does while etcd, a server or a part of itself is away, and that it comes back by itself."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import ExitStack, suppress

import psycopg
import pytest

from pooler.demo.etcd import Etcd
from pooler.demo.process import started_at
from tests.support.etcd import MakeEtcd
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database, MakeServer, make_database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

WAIT = {"pool": {"query_wait_timeout": "2s"}}
LEASE_TTL_SECONDS = 5


def _busy(fleet: RunningFleet, stack: ExitStack, count: int) -> list[psycopg.Connection[tuple[object, ...]]]:
    """So many clients, each inside a transaction."""
    connections = []
    for _ in range(count):
        connection = stack.enter_context(psycopg.connect(fleet.dsn()))
        connection.execute("select 1")
        connections.append(connection)
    return connections


def _is_clean(fleet: RunningFleet) -> bool:
    return fleet.fleet.command("ledger", "audit", fleet.database.dbname).returncode == 0


@pytest.mark.timeout(180)
def test_etcd_away_serves_on_refuses_growth_in_time_and_grows_again(
    make_etcd: MakeEtcd, make_fleet: MakeFleet, postgres_newest: Database
) -> None:
    etcd = make_etcd()
    fleet = make_fleet(postgres_newest, etcd, permits=6, workers=1, more=WAIT)
    with ExitStack() as stack:
        held = _busy(fleet, stack, 3)
        etcd.stop()
        until = time.monotonic() + LEASE_TTL_SECONDS + 3
        rounds = 0
        while time.monotonic() < until:  # past the lease: the sessions are served on
            for connection in held:
                connection.execute("select 1")
                rounds += 1
            for connection in held:
                connection.commit()
                connection.execute("select 1")
        assert rounds > 30
        began = time.monotonic()
        with pytest.raises(psycopg.Error) as refused:
            _busy(fleet, stack, 1)
        assert time.monotonic() - began < 6
        assert refused.value.sqlstate in ("57014", "53300") or "query_wait_timeout" in str(refused.value)
        assert "ledger" in str(refused.value)
        etcd.start()

        def grown() -> bool:
            try:
                _busy(fleet, stack, 1)
            except psycopg.Error:
                return False
            return True

        wait_until(grown, "growth resumes by itself", 30)
        for connection in held:
            connection.execute("select 1")
    wait_until(lambda: _is_clean(fleet), "the audit is clean", 30)


def test_a_killed_coordinator_is_restarted_and_nobody_notices(
    etcd: Etcd, make_fleet: MakeFleet, postgres_newest: Database
) -> None:
    fleet = make_fleet(postgres_newest, etcd, permits=4)
    with ExitStack() as stack:
        held = _busy(fleet, stack, 2)
        status = fleet.fleet.command("fleet", "status", "--json").stdout
        before = _pid_of(status, "coordinator")
        os.kill(before, signal.SIGKILL)
        for connection in held:
            connection.execute("select 1")
            connection.commit()

        def back() -> bool:
            pid = _pid_of(fleet.fleet.command("fleet", "status", "--json").stdout, "coordinator")
            return pid not in (0, before) and fleet.fleet.is_ready()

        wait_until(back, "another coordinator serves", 30)
        _busy(fleet, stack, 1)
        for connection in held:
            connection.execute("select 1")
    wait_until(lambda: _is_clean(fleet), "the audit is clean", 30)


def _pid_of(status: str, name: str) -> int:
    rows = json.loads(status)["processes"]
    return next((int(row["pid"] or 0) for row in rows if name in (row.get("process"), row.get("name"))), 0)


def test_no_process_is_left_when_the_supervisor_is_killed(
    etcd: Etcd, make_fleet: MakeFleet, postgres_newest: Database
) -> None:
    fleet = make_fleet(postgres_newest, etcd, permits=4)
    with suppress(psycopg.OperationalError), ExitStack() as stack:  # the clients are told 57P01
        _busy(fleet, stack, 2)
        processes = {pid: started_at(pid) for pid in fleet.fleet.processes()}
        assert len(processes) >= 4
        assert fleet.fleet.child is not None
        fleet.fleet.child.stop(signal.SIGKILL)
        wait_until(
            lambda: not any(started_at(pid) == started for pid, started in processes.items() if started),
            "every process of the fleet is gone", 20)


@pytest.mark.timeout(120)
def test_a_restarted_server_costs_its_transactions_and_nothing_else(
    etcd: Etcd, make_fleet: MakeFleet, make_server: MakeServer
) -> None:
    server = make_server(18)
    fleet = make_fleet(make_database(server), etcd, permits=4, workers=1)
    with ExitStack() as stack:
        [held] = _busy(fleet, stack, 1)
        idle = stack.enter_context(psycopg.connect(fleet.dsn(), autocommit=True))
        idle.execute("select 1")
        server.stop(immediate=True)
        with pytest.raises(psycopg.Error):
            held.execute("select 1")
        server.start()

        def served() -> bool:
            try:
                return idle.execute("select 1").fetchone() == (1,)
            except psycopg.Error:
                return False

        wait_until(served, "the idle client is served again on its own connection", 30)
        assert not idle.broken
    wait_until(lambda: _is_clean(fleet), "the audit is clean", 40)
