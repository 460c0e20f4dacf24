"""What is known of the end of a session of our own: only what was read from its socket."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from coordinator.server_session import OpenFailed, ServerSession
from tests.support.postgres import Database

NO_TLS = {"user": "app", "dbname": "app", "sslmode": "disable", "gssencmode": "disable"}


def login(database: Database, **changes: str) -> dict[str, str]:
    return {"user": database.user, "password": database.password, "dbname": database.dbname, **changes}


def opened(port: int, parameters: dict[str, str], host: str = "127.0.0.1") -> ServerSession:
    return ServerSession.open(host, port, parameters, timeout_seconds=2, close_timeout_seconds=0.3)


def failed(port: int, parameters: dict[str, str]) -> OpenFailed:
    with pytest.raises(OpenFailed) as raised:
        opened(port, parameters)
    return raised.value


@contextmanager
def peer(behaves: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that does this with the one connection it accepts; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def accept() -> None:
            connection, _ = listener.accept()
            with connection:
                behaves(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(10)


@pytest.mark.postgres
def test_a_session_that_was_closed_is_gone_at_the_server_when_its_end_was_read(postgres: Database) -> None:
    session = opened(postgres.port, login(postgres), host="localhost")
    row = session.connection.execute("SELECT pg_backend_pid()").fetchone()
    assert row is not None
    assert session.close(5)
    with psycopg.connect(postgres.dsn()) as other:
        assert other.execute("SELECT FROM pg_stat_activity WHERE pid = %s", row).fetchall() == []


@pytest.mark.postgres
@pytest.mark.parametrize("wrong", [{"password": "wrong"}, {"dbname": "not_there"}])
def test_a_fatal_answer_and_its_orderly_end_leave_nothing(postgres: Database, wrong: dict[str, str]) -> None:
    fault = failed(postgres.port, login(postgres, **wrong))
    assert fault.ended
    assert "FATAL" in str(fault)
    assert postgres.password not in str(fault)


def test_a_port_where_nobody_listens_was_never_connected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    fault = failed(port, NO_TLS)
    assert fault.ended
    assert "refused" in str(fault)


def test_a_unix_socket_that_is_not_there_was_never_connected(tmp_path: Path) -> None:
    with pytest.raises(OpenFailed) as raised:
        opened(5432, NO_TLS, host=str(tmp_path))
    assert raised.value.ended


def test_a_server_that_stays_silent_may_have_a_session() -> None:
    release = threading.Event()

    def silent(connection: socket.socket) -> None:
        release.wait(10)

    with peer(silent) as port:
        try:
            assert not failed(port, NO_TLS).ended
        finally:
            release.set()


def test_a_reset_is_no_end() -> None:
    def reset(connection: socket.socket) -> None:
        connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with peer(reset) as port:
        assert not failed(port, NO_TLS).ended
