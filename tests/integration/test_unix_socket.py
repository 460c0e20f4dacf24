"""The unix socket of a fleet: where it cannot be, who has it already, and who comes by it."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pooler.demo.client import SSL_CODE, RawClient
from pooler.demo.etcd import Etcd
from tests.support.certificates import Authority
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

STARTS_OR_SAYS_SECONDS = 30
PG_INT4, PG_INT8, PG_NUMERIC = 23, 20, 1700


def socket_of(folder: Path, **fleet: Any) -> dict[str, Any]:
    return {"fleet": {"unix_socket_dir": str(folder), **fleet}}


def refusal(fleet: RunningFleet) -> str:
    """What a fleet says that does not start. It ends with an exit code."""
    fleet.fleet.launch()
    child = fleet.fleet.child
    assert child is not None
    wait_until(lambda: not child.is_alive(), "it does not start", STARTS_OR_SAYS_SECONDS)
    assert child.process.returncode not in (0, None)
    said = fleet.fleet.log.read_text()
    assert "Traceback" not in said
    return said


def served(fleet: RunningFleet, folder: Path) -> bool:
    with psycopg.connect(fleet.dsn(host=str(folder))) as connection:
        return connection.execute("select 1").fetchone() == (1,)


def test_listen_proxy_asks_no_header_of_who_comes_by_the_unix_socket(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd, tmp_path: Path
) -> None:
    more = socket_of(tmp_path, listen_proxy=True)
    fleet = make_fleet(postgres_newest, etcd, permits=2, workers=1, more=more)
    assert served(fleet, tmp_path)
    with pytest.raises(psycopg.OperationalError, match="PROXY header"):
        psycopg.connect(fleet.dsn())


@pytest.mark.parametrize("why", ["no such directory", "no permission", "a path that is too long"])
def test_a_socket_that_cannot_be_made_is_one_clear_line_and_no_start(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd, tmp_path: Path, why: str
) -> None:
    """R78."""
    folder = {"no such directory": tmp_path / "gone", "no permission": Path("/proc/1/fdinfo"),
              "a path that is too long": tmp_path / ("x" * 100)}[why]
    if why.startswith("a path"):
        folder.mkdir()
    fleet = make_fleet(postgres_newest, etcd, permits=2, workers=1, more=socket_of(folder), start=False)
    said = refusal(fleet)
    assert "fleet.unix_socket_dir" in said
    assert str(folder) in said
    assert len(said.splitlines()) <= 2, said


def test_a_socket_that_a_killed_fleet_left_is_taken_and_that_of_a_living_one_is_not(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd, tmp_path: Path
) -> None:
    """R78."""
    more = socket_of(tmp_path, unix_socket_port=6543)
    first = make_fleet(postgres_newest, etcd, permits=2, workers=1, more=more)
    path = tmp_path / ".s.PGSQL.6543"
    second = make_fleet(postgres_newest, etcd, permits=2, workers=1, more=more, start=False)
    assert "already in use by another process" in refusal(second)
    with psycopg.connect(first.dsn(6543, host=str(tmp_path))) as connection:
        assert connection.execute("select 1").fetchone() == (1,)
    assert first.fleet.child is not None
    before = first.fleet.processes()
    first.fleet.child.stop(signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in before), "all of it is gone", 20)
    assert path.exists()
    second.fleet.start()
    with psycopg.connect(second.dsn(6543, host=str(tmp_path))) as connection:
        assert connection.execute("select 1").fetchone() == (1,)
    second.fleet.stop()
    assert not path.exists()


def test_encryption_is_declined_on_the_socket_though_tcp_requires_it(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd, tmp_path: Path
) -> None:
    """R78."""
    pair = Authority(tmp_path / "tls").host("127.0.0.1")
    fleet = make_fleet(postgres_newest, etcd, permits=2, workers=1, more={
        **socket_of(tmp_path),
        "client_tls": {"sslmode": "require", "cert_file": str(pair.cert), "key_file": str(pair.key)}})
    base = postgres_newest
    with RawClient(str(tmp_path), fleet.port) as client:
        client.send(b"\0\0\0\x08" + SSL_CODE.to_bytes(4))
        assert client.socket.recv(1) == b"N"
        assert client.login(base.user, base.password, base.dbname).query("select 1") == [["1"]]
    with pytest.raises(psycopg.OperationalError, match="no encryption"):
        psycopg.connect(fleet.dsn())


def test_numbers_of_a_client_of_the_socket_are_shown_as_numbers(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd, tmp_path: Path
) -> None:
    """R79. Each column has one type, whichever way its client came."""
    fleet = make_fleet(postgres_newest, etcd, permits=2, workers=1, more=socket_of(tmp_path))
    with (psycopg.connect(fleet.dsn(host=str(tmp_path))) as by_socket, psycopg.connect(fleet.dsn()) as by_tcp,
          psycopg.connect(fleet.console(), autocommit=True) as console):
        for client in (by_socket, by_tcp):
            client.execute("select 1")
        for item in ("CLIENTS", "SERVERS", "SOCKETS", "ACTIVE_SOCKETS"):
            shown = console.execute(f"SHOW {item}".encode())
            assert shown.description is not None
            rows, types = shown.fetchall(), {column.name: column.type_code for column in shown.description}
            assert rows
            for at, (name, kind) in enumerate(types.items()):
                if name == "port" or name.endswith("_port") or kind in (PG_INT4, PG_INT8, PG_NUMERIC):
                    assert kind != 25, (item, name)
                    assert all(row[at] is None or isinstance(row[at], int) for row in rows), (item, name)


def test_a_fleet_that_ends_in_order_leaves_no_socket(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd, tmp_path: Path
) -> None:
    fleet = make_fleet(postgres_newest, etcd, permits=2, workers=1, more=socket_of(tmp_path))
    assert served(fleet, tmp_path)
    assert fleet.fleet.stop() == set()
    assert [name for name in os.listdir(tmp_path) if name.startswith(".s.")] == []
    with socket.socket(socket.AF_UNIX) as probe:
        assert probe.connect_ex(str(tmp_path / f".s.PGSQL.{fleet.port}")) != 0
