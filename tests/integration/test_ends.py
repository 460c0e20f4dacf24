"""A fleet that is told to end, and one that is rolled, under load that does not stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import psycopg
import pytest

from pooler.demo.client import Disconnected, RawClient, ServerSaid, query
from pooler.demo.etcd import Etcd
from pooler.demo.fleet import http_status
from pooler.demo.postgres import Limits
from pooler.demo.serverlog import overlap_max, refusals_from_log, sessions_from_log
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database, MakeServer, make_database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

ENDS_WITHIN_SECONDS = 15.0
BUSY, ROLLED, WORKERS, CAP = 50, 30, 4, 20


def login(fleet: RunningFleet) -> RawClient:
    base = fleet.database
    return RawClient("127.0.0.1", fleet.port).login(base.user, base.password, base.dbname)


def last_word(client: RawClient) -> list[str]:
    """Every code that it hears, to the end of the connection."""
    codes = []
    try:
        while True:
            said = client.receive()
            if said.type == "E":
                codes.append(said.error().sqlstate)
    except (Disconnected, ConnectionError):
        return codes


class Work:
    """Clients that write one row in each transaction, without a pause, until they are ended."""

    def __init__(self, fleet: RunningFleet, *, again: bool) -> None:
        self._fleet, self._again = fleet, again
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.seen: Counter[str] = Counter()

    @contextmanager
    def going_on(self, clients: int) -> Iterator[None]:
        with ThreadPoolExecutor(clients) as threads:
            for _ in range(clients):
                threads.submit(self._come)
            try:
                yield
            finally:
                self._stop.set()

    def _come(self) -> None:
        base = self._fleet.database
        while not self._stop.is_set():
            try:
                with RawClient("127.0.0.1", self._fleet.port) as client:
                    self._work(client.login(base.user, base.password, base.dbname))
            except ServerSaid as said:  # at the login, or between two transactions
                self._count(said.sqlstate)
            except (Disconnected, OSError) as cut:
                self._count(f"cut: {cut!r}")
            if not self._again:
                return

    def _work(self, client: RawClient) -> None:
        """Until told to stop. Raises ServerSaid when it is ended."""
        while not self._stop.is_set():
            with suppress(OSError):  # it was ended before it has asked: its last word is still to be read
                client.send(query("begin; insert into done values (1); select pg_sleep(0.01); commit"))
            heard = [client.receive()]
            while heard[-1].type != "Z":
                if heard[-1].type == "E" and heard[-1].error().fields["S"] == "FATAL":
                    raise heard[-1].error()
                heard.append(client.receive())
            self._count("done" if all(said.type != "E" for said in heard) else "failed")

    def _count(self, what: str) -> None:
        with self._lock:
            self.seen[what] += 1


def written(database: Database) -> int:
    [(rows,)] = database.server.execute("select count(*) from done", database.dbname)
    return int(rows)


def create_table(database: Database) -> None:
    with database.server.connect(database.user, database.dbname, password=database.password) as owner:
        owner.execute("create table done (a int)")


def terminate(fleet: RunningFleet) -> int:
    """SIGTERM; the pid of the supervisor."""
    assert fleet.fleet.child is not None
    os.kill(fleet.fleet.child.pid, signal.SIGTERM)
    return fleet.fleet.child.pid


def exit_code(fleet: RunningFleet) -> int | None:
    assert fleet.fleet.child is not None
    return fleet.fleet.child.process.poll()


def test_constant_traffic_ends_at_the_next_boundary_and_no_transaction_is_cut(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    """R54."""
    database = make_database(postgres_newest.server)
    create_table(database)
    fleet = make_fleet(database, etcd, permits=10, workers=2)
    work = Work(fleet, again=False)
    with work.going_on(BUSY):
        wait_until(lambda: work.seen["done"] > 2 * BUSY, "all are at work", 60)
        began = time.monotonic()
        terminate(fleet)
        wait_until(lambda: exit_code(fleet) is not None, "the fleet has ended", ENDS_WITHIN_SECONDS)
    print(f"ended after {time.monotonic() - began:.1f} s: {dict(work.seen)}")  # noqa: T201
    assert exit_code(fleet) == 0
    assert work.seen["57P01"] == BUSY
    assert not work.seen.keys() - {"done", "57P01"}
    assert written(database) == work.seen["done"]


def test_an_end_is_seen_by_readiness_first_and_told_to_everybody_in_its_place(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    """R55. An idle client, one in a transaction, one that waits, one that comes; R61: one for the console."""
    fleet = make_fleet(postgres_newest, etcd, permits=1, workers=1)
    with ExitStack() as stack:
        idle, busy, waiting = (stack.enter_context(login(fleet)) for _ in range(3))
        busy.query("begin")
        waiting.send(query("select 7"))
        terminate(fleet)
        wait_until(lambda: http_status(fleet.fleet.ports.worker_http, "/readyz") == 503, "not ready", 5)
        assert last_word(idle) == ["57P01"]
        base = fleet.database
        with RawClient("127.0.0.1", fleet.port) as late, pytest.raises(ServerSaid, match="57P03"):
            late.login(base.user, base.password, base.dbname)
        with psycopg.connect(fleet.console(), autocommit=True) as console:
            assert console.execute("show version").fetchone()
        assert busy.query("select 1") == [["1"]]
        busy.send(query("commit"))
        assert [said.type for said in busy.until_ready()] == ["C", "Z"]
        assert last_word(busy) == ["57P01"]
        assert waiting.until_ready()[-1].type == "Z"
        assert last_word(waiting) == ["57P01"]
    wait_until(lambda: exit_code(fleet) is not None, "the fleet has ended", ENDS_WITHIN_SECONDS)
    assert exit_code(fleet) == 0


def test_a_second_sigterm_ends_it_at_once_whoever_is_in_a_transaction(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    """R55."""
    fleet = make_fleet(postgres_newest, etcd, permits=1, workers=1)
    with login(fleet) as busy:
        busy.query("begin")
        terminate(fleet)
        wait_until(lambda: http_status(fleet.fleet.ports.worker_http, "/readyz") == 503, "not ready", 5)
        assert busy.query("select 1") == [["1"]]
        terminate(fleet)
        assert len(last_word(busy)) <= 1
    wait_until(lambda: exit_code(fleet) is not None, "the fleet has ended", ENDS_WITHIN_SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rolling_restart_under_load_keeps_the_budget_and_work_goes_on(
    make_server: MakeServer, make_fleet: MakeFleet, etcd: Etcd
) -> None:
    """R86. Old and new workers live beside each other, at a server that has room for no more."""
    server = make_server(limits=Limits.exact(CAP, 2))
    database = make_database(server)
    create_table(database)
    fleet = make_fleet(database, etcd, permits=CAP, workers=WORKERS)
    before = set(fleet.fleet.worker_pids().values())
    work = Work(fleet, again=True)
    with psycopg.connect(server.dsn()), work.going_on(ROLLED):
        wait_until(lambda: work.seen["done"] > 10 * ROLLED, "all are at work", 60)
        done = fleet.fleet.command("fleet", "restart", "--rolling", timeout_seconds=150)
        assert done.returncode == 0, done.stdout + done.stderr
        at = work.seen["done"]
        wait_until(lambda: work.seen["done"] > at + 10 * ROLLED, "work goes on", 30)
    print(dict(work.seen))  # noqa: T201
    assert not before & set(fleet.fleet.worker_pids().values())
    assert refusals_from_log(server.log) == []
    most, _ = overlap_max([each for each in sessions_from_log(server.log) if each.user == database.user])
    assert most <= CAP
    assert not work.seen.keys() - {"done", "57P01"}
    assert written(database) == work.seen["done"]
