"""What the console and the metrics count goes back when its cause does, and more load than there is room for
only waits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random

import pytest

from pooler.demo.client import Disconnected, RawClient, ServerSaid, cancel_request, query
from pooler.demo.etcd import Etcd
from pooler.demo.fleet import http_get
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database, make_database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]

CHURN_SECONDS = float(os.environ.get("POOLER_CHURN_SECONDS", "5"))  # the field report had 10 minutes
LOAD_SECONDS = 3.0
POOL, SHORT_WAIT_SECONDS = 4, 1
GAUGES = ("cl_active", "cl_waiting", "cl_active_cancel_req", "cl_waiting_cancel_req", "sv_active",
          "sv_active_cancel", "sv_being_canceled", "sv_login", "maxwait")


def login(fleet: RunningFleet, password: str = "") -> RawClient:
    base = fleet.database
    client = RawClient("127.0.0.1", fleet.port)
    try:
        return client.login(base.user, password or base.password, base.dbname)
    except BaseException:
        client.close()
        raise


class Console:
    """Of a fleet, over one connection."""

    def __init__(self, fleet: RunningFleet) -> None:
        self._client = RawClient("127.0.0.1", fleet.port).login("admin", "console", "pooler")
        self._dbname = fleet.database.dbname

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def pool(self) -> dict[str, int]:
        """The gauges of the only pool."""
        names, rows = self._client.table("show pools")
        (row,) = [row for row in rows if row[names.index("database")] == self._dbname]
        return {name: int(row[names.index(name)] or 0) for name in (*GAUGES, "sv_idle", "sv_used")}

    def users(self) -> dict[str, int]:
        """Clients by user."""
        names, rows = self._client.table("show users")
        at = names.index("current_client_connections")
        return {str(row[0]): int(row[at] or 0) for row in rows}


@pytest.fixture
def fleet(make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd) -> RunningFleet:
    database = make_database(postgres_newest.server)
    return make_fleet(database, etcd, permits=POOL, workers=1, more={
        "pool": {"query_wait_timeout": f"{SHORT_WAIT_SECONDS}s"}})


def test_the_longest_wait_is_that_of_who_waits_now(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    """R65."""
    fleet = make_fleet(postgres_newest, etcd, permits=1, workers=1)
    with login(fleet) as holder, login(fleet) as waiter, Console(fleet) as console:
        holder.query("begin")
        assert console.pool()["maxwait"] == 0
        waiter.send(query("select 1"))
        wait_until(lambda: console.pool()["maxwait"] >= 2, "it has waited for two seconds", 10)
        assert console.pool()["cl_waiting"] == 1
        holder.query("commit")
        waiter.until_ready()
        assert [console.pool()[name] for name in ("maxwait", "cl_waiting")] == [0, 0]


def leave_by_reset(fleet: RunningFleet) -> None:
    client = login(fleet)
    client.send(query("select pg_sleep(0.2)"))
    client.abort()


def fail_to_log_in(fleet: RunningFleet) -> None:
    with pytest.raises(ServerSaid):
        login(fleet, "wrong")


def cancel(fleet: RunningFleet) -> None:
    with login(fleet) as client, RawClient("127.0.0.1", fleet.port) as asker:
        client.send(query("select pg_sleep(0.3)"))
        asker.send(cancel_request(client.session.pid, client.session.key))
        client.until_ready()


def wait_too_long(fleet: RunningFleet) -> None:
    with login(fleet) as client:
        client.send(query("begin; select pg_sleep(1.3); rollback"))
        client.until_ready()


def lose_its_server(fleet: RunningFleet) -> None:
    with login(fleet) as client, suppress(Disconnected, ServerSaid):
        client.query("select pg_terminate_backend(pg_backend_pid())")


WAYS: list[Callable[[RunningFleet], None]] = [
    leave_by_reset, fail_to_log_in, cancel, wait_too_long, lose_its_server]


def test_after_any_churn_the_gauges_are_at_rest_and_equal_what_the_server_and_the_ledger_say(
    fleet: RunningFleet,
) -> None:
    """R64."""
    end = time.monotonic() + CHURN_SECONDS
    done: list[str] = []

    def churn(seed: int) -> None:
        chance = Random(seed)
        while time.monotonic() < end:
            way = chance.choice(WAYS)
            with suppress(Disconnected, ServerSaid):
                way(fleet)
            done.append(way.__name__)

    with ThreadPoolExecutor(3 * POOL) as threads:
        for running in [threads.submit(churn, seed) for seed in range(3 * POOL)]:
            running.result()
    assert {way.__name__ for way in WAYS} <= set(done)
    ours = f"select count(*) from pg_stat_activity where usename = '{fleet.database.user}'"
    with Console(fleet) as console:
        wait_until(lambda: not any(console.pool()[name] for name in GAUGES), f"{console.pool()}", 10)
        assert console.users().get(fleet.database.user, 0) == 0

        def agree() -> bool:
            [(sessions,)] = fleet.database.server.execute(ours)
            shown = console.pool()
            return bool(shown["sv_idle"] + shown["sv_used"] == sessions)

        wait_until(agree, "the server has the sessions that are shown", 10)
    assert fleet.fleet.command("ledger", "audit", fleet.database.dbname).returncode == 0
    status, page = http_get(fleet.fleet.ports.worker_http, "/metrics")
    assert status == 200
    waiting = [line for line in page.splitlines() if "waiting" in line and not line.startswith("#")]
    assert waiting
    assert all(float(line.rpartition(" ")[2]) == 0 for line in waiting if "_total" not in line), waiting


def transactions(fleet: RunningFleet, clients: int) -> tuple[int, int]:
    """How many so many clients get done in LOAD_SECONDS; and those of who got fewest."""
    stop = threading.Event()

    def work() -> int:
        count = 0
        with login(fleet) as client:
            while not stop.is_set():
                client.query("select pg_sleep(0.01)")
                count += 1
        return count

    with ThreadPoolExecutor(clients) as threads:
        running = [threads.submit(work) for _ in range(clients)]
        time.sleep(LOAD_SECONDS)  # noqa: TID251 - what is measured is what gets done in a time
        stop.set()
    counts = [each.result() for each in running]
    return sum(counts), min(counts)


def test_more_load_than_there_is_room_for_waits_in_turn_and_slows_nothing(fleet: RunningFleet) -> None:
    """R69."""
    peak, _ = transactions(fleet, POOL)
    for clients in (POOL + 1, 4 * POOL, 10 * POOL):
        done, fewest = transactions(fleet, clients)
        print(f"{clients} clients: {done} transactions, {fewest} of who got fewest; {peak} by {POOL}")  # noqa: T201
        assert done > peak / 2
        assert fewest > done / clients / 3
