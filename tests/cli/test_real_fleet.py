"""The commands on a real fleet: real workers, coordinator, etcd and PostgreSQL."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from pooler.demo.etcd import Etcd
from pooler.demo.process import has_ended
from tests.cli.conftest import Done, Pooler
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

Command = Callable[..., Done]


@pytest.fixture
def fleet(make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd) -> RunningFleet:
    """Each pool has one session: a second would be opened for whom the first is not ready in time."""
    return make_fleet(postgres_newest, etcd, permits=4, more={"pool": {"default_pool_size": 1}})


@pytest.fixture
def command(pooler: Pooler, fleet: RunningFleet) -> Command:
    return lambda *words: pooler(*words, "-c", fleet.config)


def shown(done: Done) -> Any:
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_the_ledger_is_shown_audited_and_explained(
    fleet: RunningFleet, command: Command, pooler: Pooler, etcd: Etcd, etcd_prefix: str
) -> None:
    db = fleet.database.dbname
    with psycopg.connect(fleet.dsn(), autocommit=True) as client:
        client.execute("SELECT 1")
        answer = shown(command("ledger", "show", db, "--json"))
        [permit] = answer["permits"]
        assert answer["database"] == f"{db}-primary/write"
        assert answer["sum"]["by_state"] == {permit["state"]: 1}
        assert (permit["user"], permit["dbname"]) == (fleet.database.user, db)
        text = command("ledger", "show", f"{db}-primary/write")
        assert text.out.splitlines()[0].startswith(f"{db}-primary/write: 4 slots: 1 ")
        assert max(len(line) for line in text.out.splitlines()) <= 100
        assert shown(command("ledger", "show", db, "--state", "unknown", "--json"))["permits"] == []
        clean = shown(command("ledger", "audit", db, "--json"))
        assert (clean["exit_code"], clean["held"], clean["slots"]) == (0, 1, 4)
        explained = command("ledger", "explain", db, permit["permit"])
        assert (explained.code, permit["permit"] in explained.out) == (0, True)
        gone = command("ledger", "explain", db, "main/3.1")
        assert (gone.code, gone.out, len(gone.err.splitlines())) == (1, "", 1)
        assert f"{db}-primary/write: no permit main/3.1: it was released" in gone.err
    where = ("--etcd", etcd.endpoints[0], "--fleet", "test0", "--prefix", etcd_prefix)
    fleet.fleet.stop(signal.SIGKILL)
    dead = pooler("ledger", "show", f"{db}-primary/write", "--json", *where)
    assert shown(dead)["sum"]["slots"] == 4
    unknown = pooler("ledger", "show", "other/write", *where)
    assert (unknown.code, f"known: {db}-primary/write" in unknown.err) == (2, True)


def test_a_session_without_a_permit_is_a_difference(fleet: RunningFleet, command: Command) -> None:
    with psycopg.connect(fleet.database.dsn()):
        found = command("ledger", "audit", fleet.database.dbname)
        assert found.code == 1
        assert "difference: I2" in found.out
    assert command("ledger", "audit", fleet.database.dbname).code == 0


def test_an_open_permit_cannot_be_resolved_and_nobody_is_asked_without_a_terminal(
    fleet: RunningFleet, command: Command
) -> None:
    db = fleet.database.dbname
    with psycopg.connect(fleet.dsn(), autocommit=True) as client:
        client.execute("SELECT 1")
        [permit] = shown(command("ledger", "show", db, "--json"))["permits"]
        words = ("ledger", "resolve", db, permit["permit"], "--evidence", "a test")
        asked = command(*words)
        assert (asked.code, "repeat it with --yes" in asked.err) == (2, True)
        refused = command(*words, "--yes")
        assert refused.code == 1
        assert "not SESSION_UNKNOWN" in refused.out
        client.execute("SELECT 1")
    nothing = command("ledger", "resolve", db, "--owner", "nobody", "--evidence", "a test")
    assert nothing.code == 0
    assert "nothing to resolve" in nothing.err


def test_a_drain_renews_every_session_and_keeps_its_clients(fleet: RunningFleet, command: Command) -> None:
    db = fleet.database.dbname
    with psycopg.connect(fleet.dsn(), autocommit=True) as client:
        [before] = client.execute("SELECT pg_backend_pid()").fetchall()
        done = command("drain", db, "--json", "--timeout", "20s")
        assert done.code == 0, done.err + done.out
        last = json.loads(done.out.splitlines()[-1])
        assert (last["code"], last["epoch"]) == (0, 2)
        assert client.execute("SELECT pg_backend_pid()").fetchall() != [before]
    unfit = command("drain", db, "--to", "127.0.0.1:1")
    assert unfit.code == 1
    assert "the target cannot be reached" in unfit.err
    assert command("drain", db, "--abort").code == 1


def test_workers_are_replaced_while_new_clients_keep_coming_in(fleet: RunningFleet, command: Command) -> None:
    before = pids(command)
    over, came = threading.Event(), []

    def come_and_go() -> None:
        while not over.is_set():
            with socket.create_connection(("127.0.0.1", fleet.port), timeout=20):  # raises if it is refused
                came.append(1)

    with ThreadPoolExecutor(2) as clients, psycopg.connect(fleet.dsn(), autocommit=True) as persistent:
        coming = [clients.submit(come_and_go) for _ in range(2)]
        done = command("fleet", "restart", "--rolling", "--timeout", "20s")
        over.set()
        for each in coming:
            each.result()
        with pytest.raises(psycopg.errors.AdminShutdown):  # 57P01, as the help of the command says
            persistent.execute("SELECT 1")
    assert done.code == 0, done.err
    assert len(came) > 10
    after = pids(command)
    assert after["coordinator"] == before["coordinator"]
    assert not {before["worker 0"], before["worker 1"]} & set(after.values())


def pids(command: Command) -> dict[str, int]:
    return {row["name"]: row["pid"] for row in shown(command("fleet", "status", "--json"))["processes"]}


def test_a_killed_supervisor_leaves_no_process_and_the_next_one_a_clean_ledger(
    fleet: RunningFleet, command: Command
) -> None:
    db = fleet.database.dbname
    with psycopg.connect(fleet.dsn(), autocommit=True) as client:
        client.execute("SELECT 1")
        assert fleet.fleet.child is not None
        pidfds = [os.pidfd_open(pid) for pid in fleet.fleet.processes() - {fleet.fleet.child.pid}]
        assert len(pidfds) == 3
        fleet.fleet.child.stop(signal.SIGKILL)
        assert all(has_ended(pidfd, 10) for pidfd in pidfds)
        for pidfd in pidfds:
            os.close(pidfd)
    fleet.fleet.start()
    with psycopg.connect(fleet.dsn(), autocommit=True) as client:
        assert client.execute("SELECT 1").fetchone() == (1,)
        owners = {row["boot_id"] for row in shown(command("fleet", "status", "--json"))["processes"]}
        fleet.fleet.child.wait_until(
            lambda: (
                {row["owner"] for row in shown(command("ledger", "show", db, "--json"))["permits"]} <= owners
            ),
            "nothing of the killed fleet is left",
            60,
        )
        assert command("ledger", "audit", db).code == 0


def test_a_reload_with_a_broken_userlist_keeps_the_users_of_before_and_every_worker(
    fleet: RunningFleet, command: Command
) -> None:
    pids = fleet.fleet.worker_pids()
    users = fleet.config.parent / "userlist.txt"
    whole = users.read_text()
    users.write_text("not a userlist\n")
    broken = command("fleet", "reload", "--json")
    problems = json.loads(broken.out)["problems"]
    assert broken.code == 2  # it is the config that is refused, before any worker hears of it
    assert [line.rpartition("/")[2].partition(": ")[0] for line in problems] == ["userlist.txt:1"]
    assert all("userlist.txt:1: " in line for line in problems)
    with psycopg.connect(fleet.dsn()) as client:
        client.execute("SELECT 1")
    users.write_text(whole.replace(fleet.database.password, "another"))
    assert command("fleet", "reload").code == 0
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(fleet.dsn())
    assert fleet.fleet.worker_pids() == pids


def test_a_policy_file_that_is_not_in_force_is_told_by_the_reload_and_by_the_check(
    fleet: RunningFleet, command: Command, pooler: Pooler
) -> None:
    assert (command("fleet", "reload").code, pooler("config", "check", fleet.config).code) == (0, 0)
    (policy,) = fleet.config.parent.glob("policies/*.yaml")
    whole = policy.read_text()
    assert "serverSessionPermits: 4" in whole
    policy.write_text(whole.replace("serverSessionPermits: 4", "serverSessionPermits: 5"))
    says = "serverSessionPermits 5 (in force: 4)"
    checked = pooler("config", "check", fleet.config)
    assert (checked.code, says in checked.err) == (0, True)
    [warning] = json.loads(pooler("config", "check", "--json", fleet.config).out)["warnings"]
    assert says in warning
    reloaded = command("fleet", "reload")
    assert (reloaded.code, says in reloaded.err) == (0, True)
    policy.write_text(whole)
    assert command("fleet", "reload").code == 0
