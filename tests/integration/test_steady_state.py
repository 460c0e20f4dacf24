"""A saturated fleet in which no session comes or goes asks etcd for no more than an idle one."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from pooler.demo.etcd import Etcd
from tests.support.etcd import MakeEtcd
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]

CLIENTS = 24
STILL_SECONDS = 3.0
SECONDS = 10.0
PHASE = 3  # reads by the clock that fall into one time and not into the other: one of views, two of passes


def load(fleet: RunningFleet, stop: threading.Event) -> int:
    """Transactions until told to stop; how many."""
    done = 0
    with psycopg.connect(fleet.dsn(), autocommit=True) as connection:
        while not stop.is_set():
            connection.execute("select pg_sleep(0.005)")
            done += 1
    return done


def sessions(database: Database) -> set[int]:
    """Server processes of the pool's sessions."""
    rows = database.server.execute(
        f"SELECT pid FROM pg_stat_activity WHERE usename = '{database.user}'")
    return {int(pid) for pid, in rows}


def settled(database: Database) -> bool:
    """Whether no session came or went for a while."""
    before = sessions(database)
    time.sleep(STILL_SECONDS)  # noqa: TID251 - stillness is made of time
    return len(before) > 1 and sessions(database) == before


def requests(etcd: Etcd, seconds: float) -> float:
    before = etcd.requests()
    time.sleep(seconds)  # noqa: TID251 - what is measured is what happens in a time
    return etcd.requests() - before


@pytest.mark.parametrize(("permits", "seats"), [(20, 6), (6, 20)], ids=["seats are short", "slots are short"])
def test_load_asks_nothing_of_etcd_while_no_session_comes_or_goes(
    postgres_newest: Database, make_etcd: MakeEtcd, make_fleet: MakeFleet, permits: int, seats: int
) -> None:
    etcd = make_etcd()
    fleet = make_fleet(postgres_newest, etcd, permits=permits, workers=2, more={
        "pool": {"default_pool_size": seats}, "etcd": {"lease_ttl": "2s"}})
    stop = threading.Event()
    with ThreadPoolExecutor(CLIENTS) as threads:
        clients = [threads.submit(load, fleet, stop) for _ in range(CLIENTS)]
        try:
            wait_until(lambda: settled(postgres_newest), "the workers have their shares", 60)
            before = sessions(postgres_newest)
            loaded = requests(etcd, SECONDS)
            assert sessions(postgres_newest) == before
        finally:
            stop.set()
    moved = sum(client.result() for client in clients)
    idle = requests(etcd, SECONDS)
    print(f"{loaded:g} requests under load, {idle:g} idle, {moved} transactions")  # noqa: T201
    assert moved > 1000
    assert idle > 0
    assert loaded <= idle + PHASE
