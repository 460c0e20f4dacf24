"""Two ledgers of one fleet at one server, with sessions of one role, that are lost together."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from tests.integration.test_ledger_loss import logged
from tests.support.etcd import MakeEtcd, etcdctl
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database
from tests.support.wait import wait_until
from tests.support.watching import server_pids

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

PERMITS = 6
EACH = 3  # clients inside a transaction in each ledger
SECOND = "second"
POLICY = """
schema: dbAdmissionPolicy.v1
database: second-primary/write
generation: 1
serverSessionPermits: 6
adminReserve: 1
executionClasses:
  interactive: {permits: 6, maxQueue: 100}
fairness: weighted-deficit-v2
"""


def audited(fleet: RunningFleet, db: str) -> tuple[int, int, int]:
    """(exit code, sessions of this ledger, sessions of others)."""
    done = fleet.fleet.command("ledger", "audit", db, "--json")
    found = json.loads(done.stdout)
    return done.returncode, sum(found["ours"].values()), sum(found["elsewhere"].values())


@pytest.mark.timeout(180)
def test_each_is_rebuilt_with_its_own_sessions_and_none_of_the_other_is_booked_or_ended(
    make_etcd: MakeEtcd, make_fleet: MakeFleet, postgres_newest: Database, tmp_path: Path
) -> None:
    etcd, server = make_etcd(), postgres_newest
    (tmp_path / "second.yaml").write_text(POLICY)
    second = {"hosts": [server.address], "dbname": server.dbname, "role": "write",
              "policy": str(tmp_path / "second.yaml"),
              "monitor": {"user": server.monitor, "password": server.monitor_password}}
    fleet = make_fleet(server, etcd, permits=PERMITS, workers=2, more={
        "databases": {SECOND: second}, "pool": {"server_idle_timeout": "1h"},
        "failover": {"reconcile": "terminate", "unknown_terminate_after": "1s"}})
    names = (server.dbname, SECOND)
    with ExitStack() as stack:
        clients = [stack.enter_context(psycopg.connect(fleet.dsn(dbname=name)))
                   for name in names for _ in range(EACH)]
        for client in clients:
            client.execute("select 1")
        before = server_pids(fleet)
        assert len(before) == 2 * EACH
        etcdctl(etcd, "del", "--prefix", "/")
        wait_until(lambda: len(logged(fleet, "ledger_lost")) >= len(names), "both are lost", 20)
        for name in names:
            done = fleet.fleet.command("ledger", "rebuild", name, "--evidence", "wiped", "--timeout", "40s")
            assert done.returncode == 0, done.stdout + done.stderr
            code, ours, others = audited(fleet, name)
            assert (code, others) == (0, EACH), f"{name}: {ours} of its own"
        assert [audited(fleet, name)[0] for name in names] == [0, 0]
        assert server_pids(fleet) == before
        for client in clients:
            client.execute("select 1")
    assert not logged(fleet, "permit_terminating")
    assert not logged(fleet, "session_permit_gone")
