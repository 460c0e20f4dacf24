"""A primary that dies and a standby that is promoted, with nobody to give the pooler a command."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pooler.demo.etcd import Etcd
from pooler.demo.postgres import Server
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.load import Clients
from tests.support.postgres import Database, MakeServer, make_database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

PERMITS = 8
MORE = {"pool": {"query_wait_timeout": "60s"}, "etcd": {"lease_ttl": "2s"},
        "failover": {"drain_timeout": "5s"}}
LOST = {"08006", "08007", "57P01"}  # the last is the old primary's own word, while it could


class Writers(Clients):
    """They write a token in each transaction, on connections they keep: `acknowledged`, in their order."""

    def __init__(self, dsn: str, count: int = 12) -> None:
        super().__init__(dsn, count)
        self.acknowledged: list[str] = []

    def work(self, number: int) -> None:
        count = 0
        while not self.over.is_set():
            try:
                with psycopg.connect(self.dsn, autocommit=True) as connection:
                    while not self.over.is_set():
                        count += 1
                        token = f"{number}-{count}"
                        connection.execute("insert into tokens values (%s)", (token,))
                        self.acknowledged.append(token)
                        self.over.wait(0.02)
            except psycopg.Error as fault:
                self.faults.append(fault.sqlstate or str(fault))


@dataclass
class Pair:
    """A primary with its streaming standby, and the application's database on both."""

    primary: Server
    standby: Server
    database: Database

    @property
    def hosts(self) -> tuple[str, str]:
        return f"127.0.0.1:{self.primary.port}", f"127.0.0.1:{self.standby.port}"


MakePair = Callable[[], Pair]


@pytest.fixture
def make_pair(make_server: MakeServer, make_standby: Callable[[Server], Server]) -> MakePair:
    def make() -> Pair:
        primary = make_server(settings={"authentication_timeout": "1s"})  # never_born waits for twice of it
        database = make_database(primary)
        primary.execute("create table tokens (token text primary key)", database.dbname)
        primary.execute("grant all on tokens to public", database.dbname)
        standby = make_standby(primary)
        primary.execute("alter system set synchronous_standby_names = '*'")  # what is acknowledged is at both
        primary.execute("select pg_reload_conf()")
        return Pair(primary, standby, database)

    return make


def shown(fleet: RunningFleet, db: str = "") -> Any:
    done = fleet.fleet.command("ledger", "show", db or fleet.database.dbname, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def logged(fleet: RunningFleet, event: str) -> list[dict[str, Any]]:
    found = []
    for line in fleet.fleet.log.read_text().splitlines():
        with suppress(ValueError):
            entry = json.loads(line[line.index("{"):])
            if entry.get("event") == event:
                found.append(entry)
    return found


def is_clean(fleet: RunningFleet) -> bool:
    return fleet.fleet.command("ledger", "audit", fleet.database.dbname).returncode == 0


def sessions_at(server: Server, user: str) -> int:
    with server.connect() as connection:
        [(count,)] = connection.execute(
            "select count(*)::int from pg_stat_activity where usename = %s", (user,)).fetchall()
    return int(count)


def tokens_at(server: Server, dbname: str) -> set[str]:
    return {token for (token,) in server.execute("select token from tokens", dbname)}


def processes_of(server: Server) -> list[int]:
    """The postmaster and its children, which have sessions of their own."""
    assert server.child is not None
    postmaster = server.child.process.pid
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text()
    return [postmaster, *map(int, children.split())]


def signal_all(server: Server, number: signal.Signals) -> None:
    for pid in processes_of(server):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.mark.timeout(240)
def test_clients_are_carried_over_when_a_standby_is_promoted_in_the_place_of_a_primary_that_was_killed(
    make_pair: MakePair, make_fleet: MakeFleet, etcd: Etcd
) -> None:
    pair = make_pair()
    fleet = make_fleet(pair.database, etcd, permits=PERMITS, hosts=pair.hosts, more=MORE)
    load, user = Writers(fleet.dsn()), pair.database.user
    with psycopg.connect(fleet.dsn(), autocommit=True) as idle, load.running():
        idle.execute("select 1")
        wait_until(lambda: len(load.acknowledged) > 100, "the load runs", 30)
        pair.primary.kill()
        pair.standby.promote()
        at = len(load.acknowledged)
        wait_until(lambda: len(load.acknowledged) > at + 300, "the load goes on", 60)
        assert sessions_at(pair.standby, user) <= PERMITS
        idle.execute("insert into tokens values ('idle')")  # it has heard nothing of it
    assert set(load.faults) <= LOST
    assert len(load.faults) <= PERMITS  # who was in a transaction
    assert {*load.acknowledged, "idle"} <= tokens_at(pair.standby, pair.database.dbname)
    [moved] = logged(fleet, "epoch_failed_over")
    assert (moved["epoch"], moved["backend"], moved["before"]) == (2, *reversed(pair.hosts))

    pair.primary.start()  # as it was: a primary, on the timeline of before
    wait_until(lambda: is_clean(fleet), "what was at the old one is proven gone", 60)
    wait_until(lambda: logged(fleet, "failover_over"), "nothing is left of the old epoch", 30)
    with psycopg.connect(fleet.dsn(), autocommit=True) as client:
        client.execute("insert into tokens values ('later')")
    assert "later" in tokens_at(pair.standby, pair.database.dbname)
    assert sessions_at(pair.primary, user) == 0
    assert len(logged(fleet, "epoch_failed_over")) == 1


def states_of_epoch(fleet: RunningFleet, number: int) -> set[str]:
    return {row["state"] for row in shown(fleet)["permits"] if row["epoch"] == number}


@pytest.mark.timeout(240)
def test_a_primary_that_falls_silent_is_left_and_its_sessions_keep_their_permits_until_they_are_proven_gone(
    make_pair: MakePair, make_fleet: MakeFleet, etcd: Etcd
) -> None:
    pair = make_pair()
    fleet = make_fleet(pair.database, etcd, permits=PERMITS, hosts=pair.hosts, more=MORE,
                       policy={"failoverPermits": PERMITS // 2})
    load, user = Writers(fleet.dsn()), pair.database.user  # more than there are sessions
    with load.running():
        wait_until(lambda: len(load.acknowledged) > 100, "the load runs", 30)
        signal_all(pair.primary, signal.SIGSTOP)
        try:
            pair.standby.promote()
            at = len(load.acknowledged)
            wait_until(lambda: len(load.acknowledged) > at + 300, "the load goes on", 60)
            assert sessions_at(pair.standby, user) <= PERMITS
            wait_until(lambda: states_of_epoch(fleet, 1) == {"SESSION_UNKNOWN"}, "they are UNKNOWN", 30)
            assert len(shown(fleet)["permits"]) <= PERMITS
            assert not logged(fleet, "failover_over")
        finally:
            signal_all(pair.primary, signal.SIGCONT)
    pair.primary.kill()
    pair.primary.start()
    wait_until(lambda: logged(fleet, "failover_over"), "all of the old one are proven gone", 60)
    assert set(load.faults) <= LOST
    assert set(load.acknowledged) <= tokens_at(pair.standby, pair.database.dbname)
    assert sessions_at(pair.primary, user) == 0


@pytest.mark.timeout(240)
def test_a_node_that_is_confirmed_off_gives_its_permits_back_without_coming_back(
    make_pair: MakePair, make_fleet: MakeFleet, etcd: Etcd, tmp_path: Path
) -> None:
    pair, ran = make_pair(), tmp_path / "ran"
    fence = f'echo "$POOLER_FENCE_ADDRESS" >> {ran}'  # what is stopped for good is as good as off
    fleet = make_fleet(pair.database, etcd, permits=PERMITS, hosts=pair.hosts,
                       more={**MORE, "failover": {"drain_timeout": "2s", "fence_command": fence}})
    load = Writers(fleet.dsn(), PERMITS // 2)
    with load.running():
        wait_until(lambda: len(load.acknowledged) > 100, "the load runs", 30)
        signal_all(pair.primary, signal.SIGSTOP)
        try:
            pair.standby.promote()
            wait_until(lambda: logged(fleet, "fence_confirmed"), "it is confirmed off", 30)
            wait_until(lambda: states_of_epoch(fleet, 1) == set(), "nothing of it is left", 60)
            freed = logged(fleet, "session_permit_released")
            assert [each["proof"] for each in freed].count("fenced") >= 1
            assert ran.read_text().split() == [pair.hosts[0]]
        finally:
            signal_all(pair.primary, signal.SIGKILL)
    assert set(load.acknowledged) <= tokens_at(pair.standby, pair.database.dbname)


READ_POLICY = """
schema: dbAdmissionPolicy.v1
database: replicas/read
generation: 1
serverSessionPermits: 4
adminReserve: 1
executionClasses:
  interactive: {permits: 4, maxQueue: 100}
fairness: weighted-deficit-v2
"""


def delay(standby: Server, seconds: int) -> None:
    with standby.connect() as connection:
        connection.execute(f"alter system set recovery_min_apply_delay = '{seconds}s'")
        connection.execute("select pg_reload_conf()")


@contextmanager
def writing(server: Server, dbname: str) -> Iterator[None]:
    """Somebody writes there all the time, so that a standby that replays nothing falls behind."""
    over = threading.Event()

    def write() -> None:
        with server.connect(dbname=dbname) as connection:
            while not over.wait(0.1):
                connection.execute("insert into tokens values (gen_random_uuid()::text)")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.timeout(240)
def test_a_read_pool_goes_from_standby_to_standby_as_they_fall_behind_or_are_promoted(
    make_server: MakeServer, make_standby: Callable[[Server], Server], make_fleet: MakeFleet, etcd: Etcd,
    tmp_path: Path,
) -> None:
    primary = make_server()
    database = make_database(primary)
    primary.execute("create table tokens (token text primary key)", database.dbname)
    standbys = [make_standby(primary) for _ in range(2)]
    one, other = standbys
    (tmp_path / "read.yaml").write_text(READ_POLICY)
    replicas = {
        "hosts": [f"127.0.0.1:{each.port}" for each in standbys], "dbname": database.dbname, "role": "read",
        "max_replica_lag": "3s", "policy": str(tmp_path / "read.yaml"),
        "monitor": {"user": database.monitor, "password": database.monitor_password}}
    fleet = make_fleet(database, etcd, more={**MORE, "databases": {"replicas": replicas}})
    with psycopg.connect(fleet.dsn(dbname="replicas"), autocommit=True) as client:

        def is_at(server: Server) -> bool:
            row = client.execute("select inet_server_port()").fetchone()
            return row == (server.port,)

        with writing(primary, database.dbname):
            wait_until(lambda: is_at(one), "it begins at the first", 20)
            delay(one, 3_600)
            wait_until(lambda: is_at(other), "it leaves the one that falls behind", 40)
            delay(one, 0)
            other.promote()
            wait_until(lambda: is_at(one), "it leaves the one that was promoted", 40)
        moves = [(each["before"], each["backend"]) for each in logged(fleet, "epoch_failed_over")]
        first, second = replicas["hosts"]
        assert moves == [(first, second), (second, first)]


class Rest:
    """Patroni's REST interface as far as it is asked: the cluster, with the leader that a test names."""

    def __init__(self, members: Mapping[str, int]) -> None:
        self.leader = next(iter(members))
        rest = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = [{"name": name, "role": "leader" if name == rest.leader else "replica",
                          "host": "127.0.0.1", "port": port} for name, port in members.items()]
                body = json.dumps({"members": found}).encode()
                self.send_response(200 if self.path == "/cluster" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[Rest]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


@pytest.mark.timeout(240)
def test_of_two_primaries_the_one_that_patroni_names_serves_and_nobody_loses_a_transaction(
    make_pair: MakePair, make_fleet: MakeFleet, etcd: Etcd
) -> None:
    pair = make_pair()
    members = {"a": pair.primary.port, "b": pair.standby.port}
    with Rest(members).running() as rest:
        fleet = make_fleet(pair.database, etcd, permits=PERMITS, hosts=pair.hosts, more={
            **MORE, "failover": {"drain_timeout": "5s", "detect": "patroni", "patroni": [rest.url]}})
        with psycopg.connect(fleet.dsn(), autocommit=True) as client:
            client.execute("select 1")
            pair.standby.promote()
            client.execute("select 1")
            assert not logged(fleet, "epoch_failed_over")
            rest.leader = "b"

            def is_at_the_other() -> bool:
                return client.execute("select inet_server_port()").fetchone() == (pair.standby.port,)

            wait_until(is_at_the_other, "it is served where Patroni says", 30)
        [moved] = logged(fleet, "epoch_failed_over")
        assert moved["why"] == f"Patroni names {pair.hosts[1]}; {pair.hosts[1]} was promoted"
        wait_until(lambda: sessions_at(pair.primary, pair.database.user) == 0, "the old ones are closed", 30)


@pytest.mark.timeout(240)
def test_without_anybody_to_look_a_server_in_recovery_is_still_never_written_to(
    make_pair: MakePair, make_fleet: MakeFleet, etcd: Etcd
) -> None:
    pair = make_pair()
    dbname = pair.database.dbname
    blind = {"hosts": [pair.hosts[1]], "dbname": dbname, "policy": f"policies/{dbname}.yaml"}
    fleet = make_fleet(pair.database, etcd, more={
        "databases": {dbname: blind}, "pool": {"query_wait_timeout": "3s"}})
    with pytest.raises(psycopg.OperationalError), psycopg.connect(fleet.dsn()) as client:
        client.execute("select 1")
    [why, *_] = [each["reason"] for each in logged(fleet, "session_open_failed")]
    assert why == f"server {pair.hosts[1]} is in recovery: it takes no writes"
    assert sessions_at(pair.standby, pair.database.user) == 0
    rows = shown(fleet)["permits"]
    assert rows == []  # each attempt gave its permit back
