"""Bad input of every kind: one clear error for whoever gave it, and nobody else notices."""

from __future__ import annotations

import socket
import struct
import time

import psycopg
import pytest

from pooler.demo.etcd import Etcd
from pooler.demo.process import free_ports
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]


@pytest.fixture
def fleet(make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd) -> RunningFleet:
    """One worker, two sessions."""
    more = {"pool": {"client_login_timeout": "2s", "query_wait_timeout": "3s"}}
    return make_fleet(postgres_newest, etcd, permits=2, workers=1, more=more)


def _serves(fleet: RunningFleet) -> bool:
    with psycopg.connect(fleet.dsn()) as connection:
        return connection.execute("select 1").fetchone() == (1,)


def _refusal(dsn: str) -> str:
    with pytest.raises(psycopg.OperationalError) as refused:
        psycopg.connect(dsn)
    return str(refused.value)


def test_wrong_password_and_unknown_user_are_told_alike(fleet: RunningFleet) -> None:
    wrong = _refusal(fleet.dsn(password="not it"))
    unknown = _refusal(fleet.dsn(user="nobody_here", password="not it"))
    assert "password authentication failed" in wrong
    assert wrong.replace(fleet.database.user, "USER") == unknown.replace("nobody_here", "USER")
    assert _serves(fleet)


def test_an_unknown_database_is_named(fleet: RunningFleet) -> None:
    assert 'database "not_here" does not exist' in _refusal(fleet.dsn(dbname="not_here"))
    assert _serves(fleet)


GARBAGE = {
    "rubbish": b"GET / HTTP/1.1\r\n\r\n",
    "a huge startup packet": struct.pack(">II", 1 << 30, 196608) + b"x" * 100,
    "a negative length": struct.pack(">iI", -5, 196608),
    "an old protocol": struct.pack(">II", 8, 131072),
    "nothing but zeros": b"\0" * 64,
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_before_login_is_refused_and_the_rest_unaffected(fleet: RunningFleet, what: str) -> None:
    with socket.create_connection(("127.0.0.1", fleet.port), timeout=10) as client:
        client.sendall(GARBAGE[what])
        answer = b""
        while data := client.recv(4096):
            answer += data
        assert answer[:1] in (b"E", b""), answer  # an ErrorResponse, or closed without a word
    assert _serves(fleet)


def test_a_half_open_client_is_ended_by_client_login_timeout(fleet: RunningFleet) -> None:
    with socket.create_connection(("127.0.0.1", fleet.port), timeout=10) as client:
        began = time.monotonic()
        client.sendall(b"\0\0")  # and not a byte more
        answer = b""
        while data := client.recv(4096):
            answer += data
        assert time.monotonic() - began < 8
        assert b"client_login_timeout" in answer
    assert _serves(fleet)


def test_a_server_that_cannot_be_reached_is_said_within_the_wait(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    nobody = f"127.0.0.1:{free_ports()}"
    more = {"pool": {"client_login_timeout": "3s", "query_wait_timeout": "2s"}}
    fleet = make_fleet(postgres_newest, etcd, workers=1, hosts=(nobody,), more=more, start=False)
    fleet.fleet.launch()
    wait_until(lambda: "no_backend_found" in fleet.fleet.log.read_text(), "the log says so", 30)
    wait_until(lambda: _listens(fleet), "the port is open", 10)
    assert "no server was found" in _refusal(fleet.dsn())


def test_etcd_that_cannot_be_reached_is_one_line_and_clients_are_told(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    nobody = f"127.0.0.1:{free_ports()}"
    more = {"etcd": {"endpoints": [nobody]},
            "pool": {"client_login_timeout": "3s", "query_wait_timeout": "2s"}}
    fleet = make_fleet(postgres_newest, etcd, permits=2, workers=1, more=more, start=False)
    fleet.fleet.launch()
    wait_until(lambda: "ledger_unreachable" in fleet.fleet.log.read_text(), "the log says so", 30)
    wait_until(lambda: _listens(fleet), "the port is open", 10)
    assert "ledger" in _refusal(fleet.dsn())
    lines = [line for line in fleet.fleet.log.read_text().splitlines() if "ledger_unreachable" in line]
    assert len(lines) == 1, lines
    assert "Traceback" not in fleet.fleet.log.read_text()


def _listens(fleet: RunningFleet) -> bool:
    try:
        socket.create_connection(("127.0.0.1", fleet.port), timeout=1).close()
    except OSError:
        return False
    return True


def _startup(user: bytes, dbname: str, application_name: bytes = b"") -> bytes:
    pairs = (b"user", user, b"database", dbname.encode(), b"application_name", application_name)
    body = b"".join(each + b"\0" for each in pairs) + b"\0"
    return struct.pack(">II", len(body) + 8, 196608) + body


def test_names_that_are_not_utf_8_are_refused_or_shown_and_end_nobody(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    more = {"auth": {"type": "trust"}}
    fleet = make_fleet(postgres_newest, etcd, permits=2, workers=1, more=more)
    pids = fleet.fleet.worker_pids()
    user, dbname = fleet.database.user, fleet.database.dbname
    with socket.create_connection(("127.0.0.1", fleet.port), timeout=10) as stranger:
        stranger.sendall(_startup(b"caf\xe9", dbname))
        answer = b""
        while data := stranger.recv(4096):
            answer += data
        assert b'role "caf\xe9" does not exist' in answer
    with socket.create_connection(("127.0.0.1", fleet.port), timeout=10) as client:
        client.sendall(_startup(user.encode(), dbname, b"caf\xe9"))
        answer = b""
        while not answer.endswith(b"Z\0\0\0\x05I"):
            answer += client.recv(4096)
        with psycopg.connect(fleet.console(), autocommit=True) as console:
            shown = console.pgconn.exec_(b"SHOW CLIENTS")
        row = {shown.fname(at): shown.get_value(0, at) for at in range(shown.nfields)}
        assert row[b"application_name"] == b"caf\xe9"
    assert _serves(fleet)
    assert fleet.fleet.worker_pids() == pids
