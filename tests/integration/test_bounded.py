"""What one client can make a worker hold: however much it asks for, and however slowly it takes it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pooler.demo.client import SYNC, RawClient, bind, execute, parse, query
from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]

RESULT_MB = int(os.environ.get("POOLER_RESULT_MB", "100"))  # the field report had 500
STILL_SECONDS = float(os.environ.get("POOLER_STILL_SECONDS", "3"))  # and 60
STATEMENTS = int(os.environ.get("POOLER_STATEMENTS", "10000"))  # and 200,000
NAMES_MAX = 10_000  # prepared by a client and not closed
STEP = 1_000
GROWTH_MAX = 24 << 20
SERVER_GROWTH_MAX = 48 << 20
NAMES_HELD_MAX = 700  # bytes of a worker for a name of a client that never closes it, with its text
WAIT_SECONDS_MAX = 2.0


@pytest.fixture
def fleet(make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd) -> RunningFleet:
    return make_fleet(postgres_newest, etcd, permits=3, workers=1)


def login(fleet: RunningFleet) -> RawClient:
    base = fleet.database
    return RawClient("127.0.0.1", fleet.port, 120).login(base.user, base.password, base.dbname)


def rss(pid: int) -> int:
    """Bytes, without what is shared with other processes."""
    resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def others_served(fleet: RunningFleet) -> Iterator[list[float]]:
    """Another client asks all the time; how long each answer took."""
    stop, took = threading.Event(), [0.0]

    def work() -> None:
        with login(fleet) as client:
            while not stop.is_set():
                began = time.monotonic()
                client.query("select 1")
                took.append(time.monotonic() - began)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield took
    finally:
        stop.set()
        thread.join(20)


def test_a_result_that_nobody_reads_is_left_with_the_server(fleet: RunningFleet) -> None:
    """R42."""
    worker = fleet.fleet.worker_pids()[0]
    with others_served(fleet) as took, login(fleet) as client:
        client.query("select 1")
        before = rss(worker)
        rows = RESULT_MB * 10
        client.send(query(f"select n, repeat('x', 100000) from generate_series(1, {rows}) n"))
        end = time.monotonic() + STILL_SECONDS
        wait_until(lambda: time.monotonic() > end, "it has not been read for so long", STILL_SECONDS + 5)
        most = rss(worker)
        got = 0
        while (said := client.receive()).type != "Z":
            got += said.type == "D"
            if not got % 100:
                most = max(most, rss(worker))
        assert got == rows
    print(f"{RESULT_MB} MB, grown by {(most - before) >> 10} KiB; others {max(took):.2f} s")  # noqa: T201
    assert most - before < GROWTH_MAX
    assert max(took) < WAIT_SECONDS_MAX
    assert len(took) > 100


def prepare(client: RawClient, numbers: range) -> None:
    """Named statements that are never closed."""
    for start in range(numbers.start, numbers.stop, STEP):
        client.send(b"".join(
            parse(f"select {n}::int8 -- {n:0200d}", f"s{n}") for n in range(start, start + STEP)) + SYNC)
        assert all(said.type in "1Z" for said in client.until_ready())


def run(client: RawClient, name: str) -> list[str]:
    client.send(bind(name=name) + execute() + SYNC)
    said = client.until_ready()
    assert said[-2].type == "C", said[-2].error()
    return [each.body[6:].decode() for each in said if each.type == "D"]


def backend(fleet: RunningFleet) -> int:
    [(pid,)] = fleet.database.server.execute(
        f"select pid from pg_stat_activity where usename = '{fleet.database.user}'")
    return int(pid)


@pytest.mark.timeout(900)
def test_a_client_that_prepares_without_end_meets_a_limit_and_costs_what_it_has_not_closed(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    """R72. The first works at the end as at the beginning; all is free when they are deallocated, and one too
    many is refused by a code of its own (docs/limits.md)."""
    fleet = make_fleet(postgres_newest, etcd, permits=1, workers=1)
    worker = fleet.fleet.worker_pids()[0]
    with login(fleet) as client:
        prepare(client, range(STEP))
        at_server, first = backend(fleet), rss(worker)
        server_first = rss(at_server)
        prepare(client, range(STEP, NAMES_MAX))
        each = (rss(worker) - first) / (NAMES_MAX - STEP)
        print(f"{NAMES_MAX} statements: {each:.0f} bytes each in the worker, "  # noqa: T201
              f"{(rss(at_server) - server_first) >> 10} KiB in the server")
        assert each < NAMES_HELD_MAX
        assert rss(at_server) - server_first < SERVER_GROWTH_MAX
        for name in ("s0", f"s{NAMES_MAX - 1}", "s1"):
            assert run(client, name) == [name[1:]]
        client.query("deallocate all")
        held = rss(worker)
        for start in range(0, STATEMENTS, STEP):
            prepare(client, range(start, start + STEP))
            client.query("deallocate all")
        print(f"{STATEMENTS} deallocated: {(rss(worker) - held) >> 10} KiB, "  # noqa: T201
              f"{(rss(at_server) - server_first) >> 10} KiB in the server")
        assert rss(worker) <= held + GROWTH_MAX
        assert rss(at_server) - server_first < SERVER_GROWTH_MAX
        client.send(bind(name="s0") + SYNC)
        assert client.until_ready()[0].error().sqlstate == "26000"
        prepare(client, range(NAMES_MAX))
        client.send(parse("select 1", "one too many") + SYNC)
        assert client.receive().error().sqlstate == "53400"
    with login(fleet) as other:
        assert other.query("select 1") == [["1"]]
