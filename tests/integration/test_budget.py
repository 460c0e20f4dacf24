"""The budget holds at the server while logins storm and workers are killed; nothing is lost afterwards."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from pooler.demo.etcd import Etcd
from pooler.demo.postgres import Limits, Server
from pooler.demo.serverlog import overlap_max, refusals_from_log, sessions_from_log
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import MakeServer, make_database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]

PERMITS = 10
CLIENTS = 100
LOGINS = 1_000
SECONDS = float(os.environ.get("POOLER_STORM_SECONDS", "20"))
ADMIN_RESERVE = 1
KILL_SECONDS = (5.0, 9.0)  # rarer than five times a minute each: a worker that dies so often stays down


class Storm:
    """Clients that log in, work and leave until told to stop; each outcome is counted."""

    def __init__(self, fleet: RunningFleet) -> None:
        self._fleet = fleet
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()

    def run(self, seconds: float) -> None:
        """All clients at once, then stop."""
        with ThreadPoolExecutor(CLIENTS) as threads:
            for number in range(CLIENTS):
                threads.submit(self._client, number)
            self._killer(seconds)
            self._stop.set()

    def _client(self, number: int) -> None:
        while not self._stop.is_set():
            outcome = "lost"
            with contextlib.suppress(psycopg.Error):
                with psycopg.connect(self._fleet.dsn(), autocommit=True) as connection:
                    self._count("login")
                    for _ in range(1 + number % 7):
                        connection.execute("select pg_sleep(0.002)")
                        self._count("transaction")
                outcome = "finished"
            self._count(outcome)

    def _count(self, what: str) -> None:
        with self._lock:
            self.outcomes[what] += 1

    def _killer(self, seconds: float) -> None:
        chance = random.Random(7)
        end = time.monotonic() + seconds
        while time.monotonic() < end or self.outcomes["login"] < LOGINS:
            assert time.monotonic() < end + 120, f"too slow: {self.outcomes}"
            if not self._stop.wait(chance.uniform(*KILL_SECONDS)):
                pids = self._fleet.fleet.worker_pids()
                if len(pids) == self._fleet.fleet.plan.workers:  # the other one serves meanwhile
                    self._fleet.kill_worker(chance.choice(sorted(pids)))
                    self._count("killed")


@pytest.mark.timeout(400)
def test_the_server_never_has_a_session_too_many_and_all_permits_come_back(
    make_server: MakeServer, make_fleet: MakeFleet, etcd: Etcd
) -> None:
    # while the reaper's one session and the parked admin ones are there, exactly PERMITS are left to give
    server: Server = make_server(18, limits=Limits.exact(PERMITS, 1 + ADMIN_RESERVE))
    database = make_database(server)
    fleet = make_fleet(database, etcd, permits=PERMITS, admin_reserve=ADMIN_RESERVE)
    storm = Storm(fleet)
    began = time.monotonic()
    with psycopg.connect(server.dsn()):  # takes the admin reserve's place
        storm.run(SECONDS)
    print(f"storm took {time.monotonic() - began:.0f} s: {dict(storm.outcomes)}")  # noqa: T201
    ours = [s for s in sessions_from_log(server.log) if s.user == database.user]
    most, _ = overlap_max(ours)
    assert most <= PERMITS
    assert refusals_from_log(server.log) == []
    assert storm.outcomes["login"] >= LOGINS
    assert storm.outcomes["killed"] >= 1

    def audited() -> bool:
        done = fleet.fleet.command("ledger", "audit", database.dbname)
        print(done.stdout, done.stderr)  # noqa: T201
        return done.returncode == 0

    wait_until(audited, "the audit is clean", 60)
    shown = fleet.fleet.command("ledger", "show", database.dbname, "--state", "SESSION_UNKNOWN", "--json")
    assert shown.returncode == 0
    assert "SESSION_UNKNOWN" not in shown.stdout.partition("rows")[2]
    assert fleet.fleet.stop() == set()
    wait_until(lambda: all(s.end for s in sessions_from_log(server.log) if s.user == database.user),
               "every session of the fleet has ended", 20)
