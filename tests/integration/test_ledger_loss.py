"""An etcd that is wiped, or restored to an older state, under a fleet at work: clients are served on, nobody
grows, it is told at once, and a rebuild brings everything back."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pooler.demo.etcd import Etcd
from pooler.demo.fleet import http_get
from tests.support.etcd import MakeEtcd, etcdctl
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.load import Load
from tests.support.postgres import Database
from tests.support.wait import wait_until
from tests.support.watching import audit_is_clean, server_pids

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

PERMITS = 8
HOLDERS = 3  # clients inside a transaction all the time
LOADERS = 2
MORE = {"pool": {"query_wait_timeout": "15s", "server_idle_timeout": "1h"}}


def wipe(etcd: Etcd, snapshot: Path) -> None:
    etcdctl(etcd, "del", "--prefix", "/")


def restore(etcd: Etcd, snapshot: Path) -> None:
    """Stop it, put the snapshot in the place of its data, start it."""
    [member] = etcd.members
    member.stop()
    member.data = member.data.with_name("restored")
    etcdctl(etcd, "snapshot", "restore", str(snapshot), "--name", member.name, "--data-dir", str(member.data),
            "--initial-cluster", member.cluster,
            "--initial-advertise-peer-urls", f"http://127.0.0.1:{member.peer_port}")
    etcd.start()


LOSSES = {"wiped": wipe, "restored": restore}


def held(fleet: RunningFleet, stack: ExitStack) -> psycopg.Connection[Any]:
    """A client inside a transaction."""
    connection = stack.enter_context(psycopg.connect(fleet.dsn()))
    connection.execute("select 1")
    return connection


def logged(fleet: RunningFleet, event: str) -> list[str]:
    return [line for line in fleet.fleet.log.read_text().splitlines() if event in line]


def lost_by_metric(fleet: RunningFleet) -> float:
    """pooler_ledger_lost of the coordinator."""
    _, text = http_get(fleet.fleet.ports.http, "/metrics")
    return next((float(line.rpartition(" ")[2]) for line in text.splitlines()
                 if line.startswith("pooler_ledger_lost{")), -1.0)


def show(fleet: RunningFleet) -> Any:
    done = fleet.fleet.command("ledger", "show", fleet.database.dbname, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("loss", LOSSES)
def test_clients_are_served_on_nobody_grows_and_a_rebuild_brings_the_ledger_back(
    make_etcd: MakeEtcd, make_fleet: MakeFleet, postgres_newest: Database, tmp_path: Path, loss: str
) -> None:
    etcd, snapshot = make_etcd(), tmp_path / "snapshot"
    fleet = make_fleet(postgres_newest, etcd, permits=PERMITS, workers=2, more=MORE)
    load, wish = Load(fleet.dsn(), LOADERS), Load(fleet.dsn(), 2 * PERMITS, "select pg_sleep(0.2)")
    with ExitStack() as stack:
        first = held(fleet, stack)
        etcdctl(etcd, "snapshot", "save", str(snapshot))
        holders = [first, *(held(fleet, stack) for _ in range(HOLDERS - 1))]
        stack.enter_context(load.running())
        load.goes_on()
        before = server_pids(fleet)
        assert len(before) < PERMITS
        LOSSES[loss](etcd, snapshot)
        wait_until(lambda: logged(fleet, "ledger_lost"), "it is told", 20)
        wait_until(lambda: lost_by_metric(fleet) == 1, "the metric that pages says so", 10)

        load.goes_on()
        with wish.running():  # many more than there are sessions
            wait_until(lambda: wish.done > 3 * PERMITS, "all take their turns", 30)
            assert server_pids(fleet) <= before, "somebody grew"
        for command in (("ledger", "audit"), ("drain",)):
            refused = fleet.fleet.command(*command, fleet.database.dbname)
            assert (refused.returncode, "ledger rebuild" in refused.stderr) == (1, True), refused.stderr

        rebuilt = fleet.fleet.command("ledger", "rebuild", fleet.database.dbname, "--evidence", loss)
        assert rebuilt.returncode == 0, rebuilt.stdout + rebuilt.stderr
        assert server_pids(fleet) <= before
        for connection in holders:
            connection.execute("select 1")
            connection.commit()
            connection.execute("select 1")
        wait_until(lambda: audit_is_clean(fleet), "the audit is clean", 40)
        again = fleet.fleet.command("ledger", "rebuild", fleet.database.dbname, "--evidence", "once more")
        assert (again.returncode, "nothing is to be rebuilt" in again.stderr) == (1, True)
        wait_until(lambda: lost_by_metric(fleet) == 0, "the page ends", 10)
        wait_until(lambda: grows(fleet, before), "the fleet grows again", 60)
    assert load.faults == []
    assert [fault for fault in wish.faults if "the ledger is LOST" not in fault] == []
    assert not logged(fleet, "session_permit_gone")
    wait_until(lambda: audit_is_clean(fleet), "the audit is clean at the end", 40)


def grows(fleet: RunningFleet, before: set[int]) -> bool:
    """Whether there is a session that was not there before, when more are wanted than there were."""
    with suppress(psycopg.Error), ExitStack() as stack:
        for _ in range(PERMITS - HOLDERS - LOADERS):
            held(fleet, stack)
    return not server_pids(fleet) <= before
