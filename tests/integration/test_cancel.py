"""A cancel request finds its query from anywhere in the fleet, in whatever form it comes and however many
come, and never another one's (R20, R21, R22, R85)."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from pooler.demo.client import (
    SYNC,
    RawClient,
    bind,
    cancel_request,
    execute,
    message,
    parse,
    query,
)
from pooler.demo.etcd import Etcd
from pooler.demo.haproxy import plain, service
from pooler.demo.process import free_ports
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database
from tests.support.proxies import RunHAProxy
from tests.support.rawclient import OpenRaw
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]

SLEEPERS = 10
ROUNDS = 10
STORM = 2_000
RUNNING = "SELECT count(*) FROM pg_stat_activity WHERE query = 'select pg_sleep(30)' AND state = 'active'"

Connect = Callable[[], socket.socket]


def at(port: int, host: str = "127.0.0.1") -> Connect:
    return lambda: socket.create_connection((host, port), 10)


def send(connect: Connect, client: RawClient, after: bytes = b"") -> None:
    """A cancel request on a connection of its own, to its end; whatever the pooler says to it is a fault."""
    with connect() as sock:
        sock.sendall(cancel_request(client.session.pid, client.session.key) + after)
        with suppress(ConnectionResetError):
            assert sock.recv(100) == b""


def pooled(raw: OpenRaw, fleet: RunningFleet, port: int | None = None, host: str = "127.0.0.1") -> RawClient:
    database = fleet.database
    return raw(port or fleet.port, host).login(database.user, database.password, database.dbname)


def sleeping(database: Database, number: int) -> None:
    wait_until(lambda: database.server.execute(RUNNING) == [(number,)], f"{number} sleep", 15)


def cancelled_seconds(client: RawClient, connect: Connect) -> float:
    """From the sending of its cancel to the answer."""
    began = time.monotonic()
    send(connect, client)
    said = client.until_ready()
    assert said[-2].error().sqlstate == "57014"
    return time.monotonic() - began


def all_cancelled(database: Database, clients: list[RawClient], connect: Connect) -> list[float]:
    """Each sleeps, and is cancelled alone, ROUNDS times; how long each cancel took."""
    took: list[float] = []
    for _ in range(ROUNDS):
        for client in clients:
            client.send(query("select pg_sleep(30)"))
        sleeping(database, len(clients))
        took += [cancelled_seconds(client, connect) for client in clients]
    return took


def test_100_of_100_are_cancelled_within_a_second_behind_a_round_robin(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd, run_haproxy: RunHAProxy, raw: OpenRaw
) -> None:
    fleet = make_fleet(postgres_newest, etcd, permits=SLEEPERS + 2, workers=4)
    port = free_ports()
    workers = {f"w{n}": fleet.fleet.ports.primary + n for n in range(4)}
    balanced = service("sql", port, workers, "send-proxy").replace("leastconn", "roundrobin")
    run_haproxy(plain(balanced), [port])
    clients = [pooled(raw, fleet, port) for _ in range(SLEEPERS)]
    took = all_cancelled(postgres_newest, clients, at(port))
    print(f"{len(took)} cancels, the slowest {max(took) * 1000:.0f} ms")  # noqa: T201 - a figure for who reads it
    assert len(took) == SLEEPERS * ROUNDS
    assert max(took) < 1


def test_with_session_pooling_100_of_100_are_cancelled_through_another_worker(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd, run_haproxy: RunHAProxy, raw: OpenRaw
) -> None:
    """The process id of a key is the session's then, and says nothing of the worker."""
    fleet = make_fleet(postgres_newest, etcd, permits=SLEEPERS + 2, workers=4, service_mode="session")
    port = free_ports()
    workers = {f"w{n}": fleet.fleet.ports.primary + n for n in range(4)}
    balanced = service("sql", port, workers, "send-proxy").replace("leastconn", "roundrobin")
    run_haproxy(plain(balanced), [port])
    clients = [pooled(raw, fleet, port) for _ in range(SLEEPERS)]
    for client in clients:
        assert client.query("select pg_backend_pid()") == [[str(client.session.pid)]]
    took = all_cancelled(postgres_newest, clients, at(port))
    print(f"{len(took)} cancels, the slowest {max(took) * 1000:.0f} ms")  # noqa: T201 - a figure for who reads it
    assert len(took) == SLEEPERS * ROUNDS
    assert max(took) < 1


def test_cancels_reach_the_clients_of_workers_that_drain(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd, raw: OpenRaw
) -> None:
    fleet = make_fleet(postgres_newest, etcd, permits=12, workers=2)
    clients = [pooled(raw, fleet) for _ in range(8)]
    for client in clients:
        client.send(query("select pg_sleep(30)"))
    sleeping(postgres_newest, len(clients))
    with ThreadPoolExecutor(1) as thread:
        rolling = thread.submit(fleet.fleet.command, "fleet", "restart", "--rolling")
        wait_until(lambda: "retiring" in fleet.fleet.command("fleet", "status").stdout, "one drains", 30)
        assert max(cancelled_seconds(client, at(fleet.port)) for client in clients) < 1
        assert rolling.result(60).returncode == 0


@pytest.fixture(params=["transaction", "session"])
def two_hosts(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd, request: pytest.FixtureRequest
) -> tuple[RunningFleet, RunningFleet]:
    """One fleet of two hosts: the same name and etcd, a loopback address each."""
    fleets = []
    for host in ("127.0.0.1", "127.0.0.2"):
        port = free_ports()
        made = make_fleet(
            postgres_newest, etcd, permits=SLEEPERS + 4, workers=2, name="twohosts",
            more={"fleet": {"listen": f"{host}:{port}"}, "pool": {"pool_mode": request.param}})
        fleets.append((made, port))
    for made, port in fleets:
        object.__setattr__(made.fleet.ports, "listen", port)
    return fleets[0][0], fleets[1][0]


def test_100_of_100_are_cancelled_within_a_second_from_another_host(
    two_hosts: tuple[RunningFleet, RunningFleet], raw: OpenRaw
) -> None:
    here, there = two_hosts
    clients = [pooled(raw, here) for _ in range(SLEEPERS // 2)]
    others = [pooled(raw, there, host="127.0.0.2") for _ in range(SLEEPERS // 2)]
    took = []
    for mine, elsewhere in ((clients, at(there.port, "127.0.0.2")), (others, at(here.port))):
        took += all_cancelled(here.database, mine, elsewhere)
    print(f"{len(took)} cancels, the slowest {max(took) * 1000:.0f} ms")  # noqa: T201 - a figure for who reads it
    assert len(took) == SLEEPERS * ROUNDS
    assert max(took) < 1
    for client in (*clients, *others):
        assert client.query("select 1") == [["1"]]


@pytest.fixture(scope="module")
def one_session(make_shared_fleet: MakeFleet, postgres: Database, etcd: Etcd) -> RunningFleet:
    """One session, two workers: clients wait for each other."""
    return make_shared_fleet(postgres, etcd, permits=1, workers=1)


@pytest.mark.parametrize("form", ["query", "extended"])
def test_who_waits_is_told_at_once_and_nothing_of_it_runs(
    one_session: RunningFleet, raw: OpenRaw, form: str
) -> None:
    holder, waiter = pooled(raw, one_session), pooled(raw, one_session)
    holder.query("create table if not exists waited (a int)")
    holder.query("begin")
    text = "insert into waited values (1)"
    waiter.send(query(text) if form == "query" else parse(text) + bind() + execute() + SYNC)
    time_before = time.monotonic()
    send(at(one_session.port), waiter)
    said = waiter.until_ready()
    assert [each.type for each in said] == ["E", "Z"]
    assert said[0].error().sqlstate == "57014"
    assert time.monotonic() - time_before < 1
    holder.query("commit")
    assert waiter.query("table waited") == []


def test_a_late_cancel_does_nothing(one_session: RunningFleet, raw: OpenRaw) -> None:
    """However late: its client has nothing running, another one has its session."""
    idle, busy = pooled(raw, one_session), pooled(raw, one_session)
    idle.query("select 1")
    for _ in range(20):
        busy.send(query("select pg_sleep(0.05)"))
        send(at(one_session.port), idle)
        assert [said.type for said in busy.until_ready()] == ["T", "D", "C", "Z"]
    assert idle.query("select 2") == [["2"]]


FORMS = {"alone": b"", "followed by Terminate": message(b"X"), "followed by noise": b"\xa5" * 1024}


@pytest.mark.parametrize("form", [*FORMS, "closed at once", "kept open", "cut in two"])
def test_the_right_key_cancels_in_every_form(one_session: RunningFleet, raw: OpenRaw, form: str) -> None:
    client = pooled(raw, one_session)
    client.send(query("select pg_sleep(30)"))
    sleeping(one_session.database, 1)
    request = cancel_request(client.session.pid, client.session.key)
    with socket.create_connection(("127.0.0.1", one_session.port), 10) as sock:
        if form == "cut in two":
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(request[:5])
            time.sleep(0.05)  # noqa: TID251 - so that both parts arrive by themselves
            request = request[5:]
        sock.sendall(request + FORMS.get(form, b""))
        if form == "closed at once":
            sock.close()
        assert client.until_ready()[-2].error().sqlstate == "57014"
        if form == "kept open":
            assert sock.recv(100) == b"", "the pooler closes"
    assert client.query("select 1") == [["1"]]


def test_a_wrong_key_and_the_key_of_a_client_that_left_do_nothing(
    one_session: RunningFleet, raw: OpenRaw
) -> None:
    gone, client = pooled(raw, one_session), pooled(raw, one_session)
    gone.close()
    client.send(query("select pg_sleep(0.5)"))
    for pid, key in ((gone.session.pid, gone.session.key), (client.session.pid, b"\0\1\2\3"),
                     (client.session.pid ^ 0x7FFF8000, client.session.key), (0, b"\0" * 4),
                     (client.session.pid, client.session.key + b"\0")):
        with socket.create_connection(("127.0.0.1", one_session.port), 10) as sock:
            sock.sendall(cancel_request(pid, key))
            assert sock.recv(100) == b""
    assert [said.type for said in client.until_ready()] == ["T", "D", "C", "Z"]


def test_a_loop_of_hosts_ends(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd, raw: OpenRaw
) -> None:
    """Both hosts are told each other's address for their own: a request goes so far and no further."""
    ports = (free_ports(), free_ports())
    fleets = [
        make_fleet(postgres_newest, etcd, permits=4, workers=1, name="loop", more={"fleet": {
            "listen": f"127.0.0.{n + 1}:{ports[n]}",
            "cancel_address": f"127.0.0.{2 - n}:{ports[1 - n]}"}})
        for n in range(2)]
    client = pooled(raw, fleets[1], ports[1], "127.0.0.2")
    client.send(query("select pg_sleep(30)"))
    sleeping(postgres_newest, 1)
    for connect in (at(ports[0]), at(ports[0])):
        send(connect, client)
    for made in fleets:
        assert made.fleet.child is not None
        assert made.fleet.is_ready()
    send(at(ports[1], "127.0.0.2"), client)
    assert client.until_ready()[-2].error().sqlstate == "57014"


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def connections_to(port: int, pids: list[int]) -> int:
    """Connections of these processes to a loopback port that stand, or are being made."""
    remote = f"0100007F:{port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {f"socket:[{words[9]}]" for words in rows if words[2] == remote and words[3] in ("01", "02")}
    links = [link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()]
    found = set()
    for link in links:
        with suppress(OSError):  # closed since it was listed
            found.add(os.readlink(link))
    return len(inodes & found)


@pytest.mark.parametrize("whose", ["its own worker's", "another worker's", "nobody's"])
def test_a_storm_of_cancels_is_bounded_and_others_are_served(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd, raw: OpenRaw, whose: str
) -> None:
    fleet = make_fleet(postgres_newest, etcd, permits=4, workers=2)
    primary = fleet.fleet.ports.primary
    client = raw(primary)
    client.send(b"PROXY UNKNOWN\r\n")
    client.login(postgres_newest.user, postgres_newest.password, postgres_newest.dbname)
    client.send(query("select pg_sleep(30)"))
    sleeping(postgres_newest, 1)
    target = primary + 1 if whose == "another worker's" else primary
    key = b"\xff\xee\xdd\xcc" if whose == "nobody's" else client.session.key
    pid = client.session.pid ^ (0x3F << 15) if whose == "nobody's" else client.session.pid
    pids = list(fleet.fleet.worker_pids().values())
    before = max(map(resident_kib, pids))
    with psycopg.connect(fleet.dsn(), autocommit=True) as other:
        other.execute("select 1")
        usual = connections_to(postgres_newest.port, pids)
        most, slowest = watched(
            lambda: storm(target, pid, key), lambda: connections_to(postgres_newest.port, pids), other)
    grown = max(map(resident_kib, pids)) - before
    print(f"{whose}: {most - usual} more connections, {grown} KiB, slowest of the others {slowest:.3f} s")  # noqa: T201
    assert most - usual <= 4
    assert grown < 64 * 1024
    assert slowest < 1.5
    if whose == "nobody's":
        send_straight(primary, client)
    assert client.until_ready()[-2].error().sqlstate == "57014"
    assert client.query("select 1") == [["1"]]


def send_straight(port: int, client: RawClient) -> None:
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        sock.sendall(b"PROXY UNKNOWN\r\n" + cancel_request(client.session.pid, client.session.key))
        sock.recv(1)


def storm(port: int, pid: int, key: bytes) -> None:
    """STORM cancel requests at once, all open before the first is awaited."""
    request = b"PROXY UNKNOWN\r\n" + cancel_request(pid, key)
    opened = []
    for _ in range(STORM):
        sock = socket.create_connection(("127.0.0.1", port), 30)
        sock.sendall(request)
        opened.append(sock)
    for sock in opened:
        with suppress(OSError):
            assert sock.recv(1) == b""
        sock.close()


def watched(
    act: Callable[[], None], count: Callable[[], int], other: psycopg.Connection[tuple[object, ...]]
) -> tuple[int, float]:
    """(the most of what is counted, slowest query of `other` in seconds) while `act` goes on."""
    thread = threading.Thread(target=act)
    thread.start()
    most, slowest = 0, 0.0
    while thread.is_alive():
        began = time.monotonic()
        other.execute("select 1")
        slowest = max(slowest, time.monotonic() - began)
        most = max(most, count())
    thread.join()
    return most, slowest


