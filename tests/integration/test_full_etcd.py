"""An etcd that is full (NOSPACE) under a fleet at work: clients are served on, nobody grows, what ends is
given back all the same, and once there is room again everything goes on by itself."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import psycopg
import pytest

from pooler.demo.etcd import Etcd
from tests.integration.test_ledger_loss import (
    HOLDERS,
    LOADERS,
    MORE,
    PERMITS,
    held,
)
from tests.support.etcd import MakeEtcd, etcdctl
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.load import Load
from tests.support.postgres import Database
from tests.support.wait import wait_until
from tests.support.watching import audit_is_clean, server_pids, stays, watch_of

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

QUOTA_BYTES = 8 << 20
TOLD = ("database space exceeded", "etcd takes no reservation")  # whom no session of its worker was free for
LEASES_SECONDS = 12.0  # more than two leases


def fill(etcd: Etcd) -> None:
    """Until it takes no put any more."""
    for number in range(64):
        done = etcdctl(etcd, "put", f"/fill/{number}", stdin=b"x" * (1 << 20), check=False)
        if done.returncode != 0:
            assert b"space exceeded" in done.stderr, done.stderr
            return
    pytest.fail("etcd took more than its quota")


def make_room(etcd: Etcd) -> None:
    """What an operator does. The revision is that after the deletion: what was there before it would stay."""
    etcdctl(etcd, "del", "--prefix", "/fill/")
    said = etcdctl(etcd, "get", "/fill/0", "-w", "fields").stdout.decode()
    revision = next(line.rpartition(" ")[2] for line in said.splitlines() if "Revision" in line)
    etcdctl(etcd, "compact", revision)
    etcdctl(etcd, "defrag")
    etcdctl(etcd, "alarm", "disarm")


def has_all(fleet: RunningFleet) -> bool:
    """Whether so many clients as there are permits can be inside a transaction at once."""
    with suppress(psycopg.Error), ExitStack() as stack:
        for _ in range(PERMITS):
            held(fleet, stack)
        return len(server_pids(fleet)) == PERMITS
    return False


@pytest.mark.timeout(240)
def test_clients_are_served_on_nobody_grows_and_what_ends_is_given_back(
    monkeypatch: pytest.MonkeyPatch, make_etcd: MakeEtcd, make_fleet: MakeFleet, etcd_prefix: str,
    postgres_newest: Database,
) -> None:
    monkeypatch.setenv("ETCD_QUOTA_BACKEND_BYTES", str(QUOTA_BYTES))
    etcd = make_etcd()
    fleet = make_fleet(postgres_newest, etcd, permits=PERMITS, workers=2, more=MORE)
    watch = watch_of(fleet, etcd, etcd_prefix)
    load, wish = Load(fleet.dsn(), LOADERS), Load(fleet.dsn(), 2 * PERMITS, "select pg_sleep(0.2)")
    with ExitStack() as stack:
        holders = [held(fleet, stack) for _ in range(HOLDERS - 1)]
        victim = psycopg.connect(fleet.dsn())
        stack.callback(victim.close)
        row = victim.execute("select pg_backend_pid()").fetchone()
        assert row is not None
        with load.running():
            load.goes_on()  # so the worker of each has a session that nobody holds
            before = server_pids(fleet)
            assert len(before) < PERMITS
            fill(etcd)
            stays(lambda: server_pids(fleet) <= before, "nobody grows", LEASES_SECONDS)
            load.goes_on()
            for connection in holders:
                connection.execute("select 1")
            with wish.running():  # many more than there are sessions
                wait_until(lambda: wish.done > 3 * PERMITS, "all take their turns", 40)
                assert server_pids(fleet) <= before, "somebody grew"

            permits = len(watch.now())
            postgres_newest.server.execute(psycopg.sql.SQL("select pg_terminate_backend({})").format(row[0]))
            wait_until(lambda: len(watch.now()) == permits - 1, "a permit is deleted from a full etcd", 20)

            make_room(etcd)
            load.goes_on()
        for connection in holders:
            connection.execute("select 1")
            connection.commit()
        wait_until(lambda: has_all(fleet), "the fleet has all its permits in use", 60)
    assert load.faults == []
    assert [fault for fault in wish.faults if not any(why in fault for why in TOLD)] == []
    wait_until(lambda: audit_is_clean(fleet), "the audit is clean", 40)
