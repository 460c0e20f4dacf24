"""Many clients at the same moment: two sessions at a time are opened for them, by all workers together."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psycopg
import pytest

from pooler.demo.client import RawClient, query, rows_of
from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database
from tests.support.relays import Relay, Typed
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

CLIENTS, POOL, IDLE, GATE = 200, 40, 4, 2
HELD_SECONDS = 0.05
NAMES = {"user", "database", "worker"}  # of the columns


class Door(Relay):
    """In front of the server: each start-up answer to this user comes late, and the open ones are counted."""

    def __init__(self, port: int, user: str) -> None:
        self.user = user
        self.waiting = self.waiting_max = self.let_in = 0
        self.counting = threading.Lock()
        super().__init__(port)

    def typed(self) -> Typed:
        return AtTheDoor(self)


class AtTheDoor(Typed):
    """One connection: at the door from its start-up packet to the first ReadyForQuery."""

    def __init__(self, door: Door) -> None:
        super().__init__(door)
        self._door = door
        self._state = "before"

    def asked(self, data: bytes) -> bytes:
        if self._state == "before" and b"user\0" + self._door.user.encode() + b"\0" in data:
            self._state = "waits"
            with self._door.counting:
                self._door.waiting += 1
                self._door.waiting_max = max(self._door.waiting_max, self._door.waiting)
        return super().asked(data)

    def said(self, data: bytes) -> bytes:
        out = super().said(data)
        if self._state == "waits" and b"Z\0\0\0\x05" in out:
            time.sleep(HELD_SECONDS)  # noqa: TID251 - this is what a slow server does
            self._state = "in"
            with self._door.counting:
                self._door.waiting -= 1
                self._door.let_in += 1
        return out


def logged_in(fleet: RunningFleet) -> RawClient:
    client = RawClient("127.0.0.1", fleet.port, 60)
    return client.login(fleet.database.user, fleet.database.password, fleet.database.dbname)


def sessions(fleet: RunningFleet) -> int:
    with psycopg.connect(fleet.console(), autocommit=True) as console:
        rows = console.execute("show pools").fetchall()
    return sum(int(row[6]) + int(row[9]) for row in rows if row[1] == fleet.database.user)


def scaling(fleet: RunningFleet) -> dict[str, int]:
    with psycopg.connect(fleet.console(), autocommit=True) as console:
        answer = console.execute("show pool_scaling")
        names = [column.name for column in answer.description or ()]
        rows = [dict(zip(names, row, strict=True)) for row in answer.fetchall()]
    found = [row for row in rows if row["user"] == fleet.database.user]
    assert len(found) == 1
    assert found[0]["worker"]
    return {name: int(value) for name, value in found[0].items() if name not in NAMES}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_two_hundred_at_once_have_two_sessions_opened_at_a_time_and_are_all_answered(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd, workers: int
) -> None:
    database = postgres_newest
    door = Door(database.port, database.user)
    with ExitStack() as stack:
        stack.callback(door.close)
        fleet = make_fleet(database, etcd, hosts=(f"127.0.0.1:{door.port}",), permits=POOL, workers=workers,
                           more={"pool": {"default_pool_size": POOL, "max_client_conn": 2 * CLIENTS,
                                          "server_idle_timeout": 0}})
        stack.callback(fleet.fleet.stop)
        with ThreadPoolExecutor(16) as threads:
            clients = list(threads.map(lambda _: stack.enter_context(logged_in(fleet)), range(CLIENTS)))
        some = clients[:IDLE]
        for client in some:
            client.send(query("begin; select pg_sleep(0.3); commit"))
        for client in some:
            client.until_ready()
        wait_until(lambda: sessions(fleet) >= IDLE, "some sessions are idle", 20)
        before = door.let_in
        for client in clients:
            client.send(query("select pg_sleep(0.02)::text || 'done'"))
        assert [rows_of(client.until_ready()) for client in clients] == [[["done"]]] * CLIENTS
        wait_until(lambda: not door.waiting and not scaling(fleet)["inflight"], "none is under way", 20)
        assert door.waiting_max <= GATE
        assert 0 < door.let_in - before <= POOL - IDLE
        counted = scaling(fleet)
        assert counted["creates"] == door.let_in
        assert counted["create_fallback"] > 0
        print(f"{workers} workers: {counted}, {door.waiting_max} at once")  # noqa: T201 - part of the result
