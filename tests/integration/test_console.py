"""The console's commands on a real fleet of two workers: what each is told to do has been done."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
import pytest

from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

CUT_OFF_SECONDS = 5.0  # when a worker that is asked for a row is waited for no longer


@pytest.fixture
def fleet(make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd) -> RunningFleet:
    """Two workers, four sessions, places for ten clients, who may come in by a worker's own port."""
    more = {"pool": {"max_client_conn": 10}, "fleet": {"proxy_protocol_from": []}}
    return make_fleet(postgres_newest, etcd, permits=4, workers=2, more=more)


def _console(fleet: RunningFleet) -> psycopg.Connection[Any]:
    return psycopg.connect(fleet.console(), autocommit=True)


def _rows(console: psycopg.Connection[Any], text: str) -> list[dict[str, Any]]:
    return console.cursor(row_factory=psycopg.rows.dict_row).execute(text.encode()).fetchall()


@contextmanager
def _clients_of_both_workers(fleet: RunningFleet) -> Iterator[list[psycopg.Connection[Any]]]:
    """Two of the first worker, one of the second, by the workers' own ports."""
    ports = [fleet.fleet.ports.primary + worker for worker in (0, 0, 1)]
    with ExitStack() as open_ones:
        yield [open_ones.enter_context(psycopg.connect(fleet.dsn(port), autocommit=True)) for port in ports]


def _started(pool: ThreadPoolExecutor, fleet: RunningFleet, text: str) -> Future[float]:
    """A command on a console of its own; when it was answered."""
    def say() -> float:
        with _console(fleet) as console:
            console.execute(text.encode())
        return time.monotonic()

    return pool.submit(say)


def test_a_pause_and_a_wait_for_closing_last_as_long_as_a_transaction_does(fleet: RunningFleet) -> None:
    began = time.monotonic()
    with psycopg.connect(fleet.dsn()) as busy, ThreadPoolExecutor(2) as pool, _console(fleet) as console:
        busy.execute("SELECT 1")
        console.execute("RECONNECT")
        waits = [_started(pool, fleet, "WAIT_CLOSE"), _started(pool, fleet, "PAUSE")]
        wait_until(lambda: _rows(console, "SHOW DATABASES")[0]["paused"] == 1, "paused", 15)
        assert [row["close_needed"] for row in _rows(console, "SHOW SERVERS")] == [1]
        over = began + CUT_OFF_SECONDS + 0.5
        wait_until(lambda: time.monotonic() > over, "longer than an answer may take", 15)
        assert not any(each.done() for each in waits)
        at = time.monotonic()
        busy.commit()
        assert all(each.result(timeout=5) > at for each in waits)
        console.execute("RESUME")
        assert busy.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_whoever_waits_for_a_pause_may_cancel_it_or_leave(
    fleet: RunningFleet, end: str
) -> None:
    with psycopg.connect(fleet.dsn()) as busy, _console(fleet) as watcher:
        busy.execute("SELECT 1")
        console = _console(fleet)
        said: list[str | None] = []

        def pause() -> None:
            with pytest.raises(psycopg.Error) as ended:
                console.execute("PAUSE")
            said.append(ended.value.sqlstate)

        thread = threading.Thread(target=pause)
        thread.start()
        wait_until(lambda: _rows(watcher, "SHOW STATE")[1]["value"] == "yes", "paused", 15)
        if end == "cancel":
            while thread.is_alive():  # it may be sent before the command has come there
                console.cancel()
                thread.join(0.2)
            assert said == ["57014"]
            assert console.execute("SHOW VERSION").fetchone()
            console.close()
        else:
            shut_down(console)
            thread.join(10)
            assert not thread.is_alive()
        watcher.execute("RESUME")
        busy.commit()


def shut_down(console: psycopg.Connection[Any]) -> None:
    """Both ways, under the thread that reads it."""
    with socket.socket(fileno=socket.dup(console.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)


def test_a_client_of_either_worker_is_killed_by_its_id(fleet: RunningFleet) -> None:
    with _clients_of_both_workers(fleet) as clients, _console(fleet) as console:
        rows = _rows(console, "SHOW CLIENTS")
        assert len({row["id"] for row in rows}) == len(rows) == len(clients)
        for row in rows:
            console.execute(f"KILL_CLIENT {row['id']}".encode())
            with pytest.raises(psycopg.Error, match="no client has the id"):
                console.execute(f"KILL_CLIENT {row['id']}".encode())
        assert _rows(console, "SHOW CLIENTS") == []
        for client in clients:
            with pytest.raises(psycopg.errors.AdminShutdown):
                client.execute("SELECT 1")


def test_lists_count_the_places_of_the_fleet_once(fleet: RunningFleet) -> None:
    def lists(console: psycopg.Connection[Any]) -> dict[str, int]:
        return {row["list"]: row["items"] for row in _rows(console, "SHOW LISTS")}

    with _console(fleet) as console:
        free = lists(console)["free_clients"]
        assert free == 10 - 1, "a console is a client too"
        with _clients_of_both_workers(fleet):
            found = lists(console)
        assert (found["used_clients"], found["free_clients"]) == (3, free - 3)
        assert (found["pools"], found["users"]) == (1, 1)


def test_an_administrator_comes_in_though_every_place_and_every_session_is_taken(
    fleet: RunningFleet,
) -> None:
    """R61."""
    with ExitStack() as open_ones:
        clients = [open_ones.enter_context(psycopg.connect(fleet.dsn())) for _ in range(10)]
        for client in clients[:4]:
            client.execute("SELECT 1")
        with pytest.raises(psycopg.OperationalError, match="max_client_conn"):
            psycopg.connect(fleet.dsn())
        with _console(fleet) as console:
            assert _rows(console, "SHOW POOLS")[0]["sv_active"] == 4


def test_a_setting_holds_in_every_worker_until_the_reload(
    fleet: RunningFleet, until_ready: Callable[[RunningFleet], None]
) -> None:
    def limits(console: psycopg.Connection[Any]) -> set[tuple[str, str]]:
        return {(row["value"], row["source"]) for row in _rows(console, "SHOW CONFIG WORKERS")
                if row["key"] == "max_client_conn"}

    with _console(fleet) as console:
        with pytest.raises(psycopg.Error, match="max_client_conn: "):
            console.execute("SET max_client_conn = many")
        console.execute("SET max_client_conn = 3")
        assert limits(console) == {("3", "runtime")}
    fleet.kill_worker(0)
    until_ready(fleet)
    with _console(fleet) as console:
        assert limits(console) == {("3", "runtime")}
        console.execute("RELOAD")
        assert limits(console) == {("10", "file")}


@pytest.fixture
def until_ready() -> Callable[[RunningFleet], None]:
    """Both workers answer the console."""
    def wait(fleet: RunningFleet) -> None:
        def both() -> bool:
            try:
                with _console(fleet) as console:
                    rows = _rows(console, "SHOW WORKERS")
            except psycopg.Error:
                return False
            return len(rows) == 2 and all(row["linked"] for row in rows)

        wait_until(both, "both workers are linked", 30)

    return wait
