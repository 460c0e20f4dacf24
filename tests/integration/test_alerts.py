"""Who is told what, on real parts: a leak, an old checkout, strangers, a look that may not see, a stopped
worker. Times are judged by the log's own."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from pooler.demo.etcd import Etcd
from pooler.demo.faults import environment
from pooler.demo.fleet import http_get
from pooler.demo.postgres import Limits
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database, MakeServer, make_database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

TTL_SECONDS = 2.0
SHORT = {"etcd": {"lease_ttl": "2s"}}
LIMIT_SECONDS = 1.0
CLASSES = {"executionClasses": {"interactive": {"permits": 4, "maxQueue": 100, "transactionLimit": "1s"}}}
SLACK_SECONDS = 1.0  # of two loaded processors, and a log


def lines(fleet: RunningFleet, event: str, **values: Any) -> list[dict[str, Any]]:
    """The fleet's log lines of this event with these values."""
    found = [json.loads(line) for line in fleet.fleet.log.read_text(errors="replace").splitlines()
             if line.startswith("{") and f'"{event}"' in line]
    return [line for line in found if line["event"] == event and values.items() <= line.items()]


def first(fleet: RunningFleet, event: str, **values: Any) -> dict[str, Any]:
    """The first such line, once there is one."""
    wait_until(lambda: lines(fleet, event, **values), f"{event} is told", 30)
    return lines(fleet, event, **values)[0]


def at(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["timestamp"]).timestamp()


def unknown(fleet: RunningFleet) -> list[dict[str, Any]]:
    """The permits in SESSION_UNKNOWN."""
    shown = fleet.fleet.command("ledger", "show", fleet.database.dbname, "--state", "unknown", "--json")
    assert shown.returncode == 0, shown.stderr
    return list(json.loads(shown.stdout)["permits"])


def alert_metrics(fleet: RunningFleet) -> list[str]:
    status, text = http_get(fleet.fleet.ports.http, "/metrics")
    assert status == 200
    return [line for line in text.splitlines() if line.startswith("pooler_session_alert_age_seconds{")]


def is_clean(fleet: RunningFleet) -> bool:
    return fleet.fleet.command("ledger", "audit", fleet.database.dbname).returncode == 0


def test_a_leaked_permit_is_told_within_two_lease_cycles(
    tmp_path: Path, etcd: Etcd, make_fleet: MakeFleet, postgres_newest: Database
) -> None:
    fleet = make_fleet(postgres_newest, etcd, permits=4, workers=1, more=SHORT,
                       env=environment("leak", tmp_path))
    with psycopg.connect(fleet.dsn(), autocommit=True) as client:
        client.execute("select 1")
        given_back = time.time()  # and the first session is in no pool from here on
        told = first(fleet, "session_leaked")
        assert at(told) - given_back <= 2 * TTL_SECONDS + SLACK_SECONDS
        (row,) = [each for each in json.loads(fleet.fleet.command(
            "ledger", "show", fleet.database.dbname, "--json").stdout)["permits"]
            if each["permit"] == told["permit"]]
        assert {name: told[name] for name in ("owner", "pid", "host")} == {
            name: row[name] for name in ("owner", "pid", "host")}
        assert row["state"] == "OPEN_IDLE" or row["state"] == "OPEN_BUSY"
        (metric,) = [line for line in alert_metrics(fleet) if 'alert="leaked"' in line]
        assert f'pid="{told["pid"]}"' in metric
        assert len(lines(fleet, "session_leaked")) == 1


def test_a_checkout_past_its_transaction_limit_is_told_within_two_lease_cycles_and_over_with_it(
    etcd: Etcd, make_fleet: MakeFleet, postgres_newest: Database
) -> None:
    fleet = make_fleet(
        postgres_newest, etcd, permits=4, workers=1, more=SHORT, policy=CLASSES,
        tenants=({"match": {"user": "*"}, "tenant": "acme", "class": "interactive"},))
    with psycopg.connect(fleet.dsn()) as client:
        began = time.time()
        client.execute("select 1")
        told = first(fleet, "checkout_late")
        late_at = began + LIMIT_SECONDS
        assert late_at <= at(told) <= late_at + 2 * TTL_SECONDS + SLACK_SECONDS
        assert (told["tenant"], told["limit_seconds"]) == ("acme", LIMIT_SECONDS)
        assert "idle in transaction, waits for its client" in told["holder"]
        with psycopg.connect(fleet.console(), autocommit=True, row_factory=dict_row) as console:
            (leak,) = (row for row in console.execute("show leaks") if row["late"] == "yes")
        assert (leak["pid"], leak["tenant"]) == (told["pid"], "acme")
        (pid,) = client.execute("select pg_backend_pid()").fetchone() or (0,)
        assert (told["pid"], told["ticket"] != "") == (pid, True)
        assert any('tenant="acme"' in line for line in alert_metrics(fleet))
        client.commit()
        wait_until(lambda: not alert_metrics(fleet), "the alert is over", 10)
    assert lines(fleet, "session_alert_over", alert="late_checkout")


def test_a_session_pooled_client_that_rests_is_not_late(
    etcd: Etcd, make_fleet: MakeFleet, postgres_newest: Database
) -> None:
    fleet = make_fleet(postgres_newest, etcd, permits=4, workers=1, policy=CLASSES,
                       more={**SHORT, "pool": {"pool_mode": "session"}})
    with psycopg.connect(fleet.dsn(), autocommit=True) as resting, psycopg.connect(fleet.dsn()) as working:
        resting.execute("select 1")
        (pid,) = working.execute("select pg_backend_pid()").fetchone() or (0,)
        assert first(fleet, "checkout_late")["pid"] == pid
        time.sleep(2 * TTL_SECONDS)  # noqa: TID251 - what must not be told within that
        assert len(lines(fleet, "checkout_late")) == 1


def test_a_stranger_that_eats_the_reserve_is_paged_by_name(
    etcd: Etcd, make_fleet: MakeFleet, make_server: MakeServer
) -> None:
    database = make_database(make_server(limits=Limits(max_connections=14, superuser_reserved=3)))
    fleet = make_fleet(database, etcd, permits=4, admin_reserve=2, more=SHORT,
                       policy={"otherClients": 2})
    with ExitStack() as stack:
        stack.enter_context(psycopg.connect(database.dsn(application_name="cron-job")))
        first(fleet, "leader_elected")
        time.sleep(2 * TTL_SECONDS)  # noqa: TID251 - what must not be told within that
        assert lines(fleet, "strangers_over_other_clients") + lines(fleet, "admin_reserve_eaten") == []
        for _ in range(9):  # of 11 for ordinary roles; the reaper's counts as the reserve's
            stack.enter_context(psycopg.connect(database.dsn(application_name="cron-job")))
        page = first(fleet, "admin_reserve_eaten")
        assert (page["user"], page["application_name"]) == (database.user, "cron-job")
        assert (page["address"], page["sessions"], page["level"]) == ("127.0.0.1", 10, "critical")
        assert (page["free"], page["admin_reserve"], page["node"]) == (1, 2, database.address)
        warned = first(fleet, "strangers_over_other_clients")
        assert (warned["strangers"] > 2, warned["other_clients"]) == (True, 2)  # at the third, most likely
        _, metrics = http_get(fleet.fleet.ports.http, "/metrics")
        assert f'pooler_admin_reserve_eaten{{node="{database.address}"}} 1.0' in metrics

    def is_over() -> bool:
        return 'pooler_admin_reserve_eaten{node="' + database.address + '"} 0.0' in http_get(
            fleet.fleet.ports.http, "/metrics")[1]

    wait_until(is_over, "the page is over", 10)


def test_while_pg_monitor_is_revoked_nothing_is_released_and_after_the_grant_all_is_proven(
    etcd: Etcd, make_fleet: MakeFleet, make_server: MakeServer
) -> None:
    database = make_database(make_server())
    fleet = make_fleet(database, etcd, permits=6, more=SHORT)
    with ExitStack() as stack:
        clients = [stack.enter_context(given_up(fleet)) for _ in range(6)]
        for client in clients:
            client.execute("select 1")
        database.server.execute(f'REVOKE pg_monitor FROM "{database.monitor}"')
        for index in fleet.fleet.worker_pids():
            fleet.kill_worker(index)
        wait_until(lambda: len(unknown(fleet)) == 6, "every session is unknown", 20)
        void = first(fleet, "look_void")
        assert "GRANT pg_monitor" in void["why"]
        wait_until(lambda: not sessions(database), "the server has ended them all", 10)
        time.sleep(3 * TTL_SECONDS)  # noqa: TID251 - what must not happen within that
        assert len(unknown(fleet)) == 6
        assert lines(fleet, "session_permit_released") == []
        (line, *_) = fleet.fleet.command("ledger", "show", database.dbname).stdout.splitlines()
        assert "6 unknown (oldest " in line
        assert f"waits for absent on {database.address}" in line
        database.server.execute(f'GRANT pg_monitor TO "{database.monitor}"')
        wait_until(lambda: not unknown(fleet), "all of them are proven gone", 20)
    proofs = {line["proof"] for line in lines(fleet, "session_permit_released")}
    assert proofs == {"absent"}
    wait_until(lambda: is_clean(fleet), "the audit is clean", 20)


def sessions(database: Database) -> set[int]:
    """Server processes of the pool's role."""
    rows = database.server.execute(
        f"SELECT pid FROM pg_stat_activity WHERE usename = '{database.user}'")
    return {int(pid) for pid, in rows}


@contextmanager
def given_up(fleet: RunningFleet) -> Iterator[psycopg.Connection[Any]]:
    """A client whose connection will not last."""
    connection = psycopg.connect(fleet.dsn())
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_reconcile_terminate_ends_the_session_of_a_stopped_worker_and_needs_the_proof_all_the_same(
    etcd: Etcd, make_fleet: MakeFleet, postgres_newest: Database
) -> None:
    database = make_database(postgres_newest.server)
    fleet = make_fleet(database, etcd, permits=4, workers=1, more={
        **SHORT, "failover": {"reconcile": "terminate", "unknown_terminate_after": "3s"}})
    with given_up(fleet) as client:
        (pid,) = client.execute("select pg_backend_pid()").fetchone() or (0,)
        with stopped(fleet.fleet.worker_pids()[0]):
            marked = first(fleet, "session_permit_unknown", pid=pid)
            refused = first(fleet, "session_termination_failed")
            assert ("permission denied" in refused["why"], "GRANT pg_signal_backend" in refused["hint"]) == (
                True, True)
            assert pid in sessions(database)
            database.server.execute(f'GRANT pg_signal_backend TO "{database.monitor}"')
            wait_until(lambda: pid not in sessions(database), "the server ended it", 30)
            freed = first(fleet, "session_permit_released", permit=marked["permit"])
        ordered = first(fleet, "session_permit_terminating", permit=marked["permit"])
        assert at(ordered) - at(marked) >= 3.0 - SLACK_SECONDS
        assert (freed["proof"], freed["pid"], at(freed) >= at(ordered)) == ("absent", pid, True)
        with pytest.raises(psycopg.Error):
            client.execute("select 1")
    wait_until(lambda: is_clean(fleet), "the audit is clean", 20)


def test_observing_a_stopped_worker_ends_nothing_and_it_takes_its_session_back(
    etcd: Etcd, make_fleet: MakeFleet, postgres_newest: Database
) -> None:
    fleet = make_fleet(postgres_newest, etcd, permits=4, workers=1, more=SHORT)
    with psycopg.connect(fleet.dsn()) as client:
        client.execute("select 1")
        with stopped(fleet.fleet.worker_pids()[0]):
            marked = first(fleet, "session_permit_unknown", ticket="1")  # what was opened beside it has none
            told = first(fleet, "session_permit_stuck", permit=marked["permit"])
            assert at(told) - at(marked) <= 2 * TTL_SECONDS + SLACK_SECONDS
            assert (told["tenant"], told["ticket"]) == (postgres_newest.user, "1")
            assert [row["ticket"] for row in unknown(fleet) if row["ticket"]] == [told["ticket"]]
        client.execute("select 1")
        wait_until(lambda: not unknown(fleet), "it took its session back", 20)


