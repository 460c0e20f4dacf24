"""One session of our own at a server, of which it is known when the server has ended it.

libpq closes its socket without waiting for the server. A second handle on the same socket outlives it, and
reads the orderly end (RFC 9293, FIN) that PostgreSQL sends once the backend has given up its slot. Blocking:
for use in a thread.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo
from psycopg.rows import TupleRow

_READ_BYTES = 65_536
_CLOSE_WAIT = 8  # TCP_CLOSE_WAIT of linux/tcp_states.h: the peer's FIN came, and ours was not sent


class OpenFailed(psycopg.OperationalError):
    """The session was not opened. `ended`: certainly nothing of the attempt is left at the server."""

    def __init__(self, text: str, *, ended: bool) -> None:
        super().__init__(text)
        self.ended = ended


class ServerSession:
    """An open session; `connection` is psycopg's, in autocommit."""

    def __init__(self, connection: psycopg.Connection[TupleRow], handles: list[socket.socket]) -> None:
        self.connection = connection
        self._handles = handles

    @classmethod
    def open(
        cls, host: str, port: int, parameters: Mapping[str, Any], *, timeout_seconds: float,
        close_timeout_seconds: float,
    ) -> ServerSession:
        """At the first address of `host` (a name, an address, or a unix socket's directory) that accepts.

        Raises OpenFailed; OSError for a name that is not known.
        """
        deadline = time.monotonic() + timeout_seconds
        refused: OpenFailed | None = None
        for address in _addresses(host, port):
            attempt = _Attempt(make_conninfo(host=host, port=port, **address, **parameters))
            try:
                return cls(attempt.run(deadline), attempt.handles)
            except psycopg.Error as failed:
                ended = attempt.end(close_timeout_seconds)
                refused = OpenFailed(str(failed), ended=ended)
                if attempt.connected:
                    break  # it was heard: another address would be another attempt
        raise refused or OpenFailed(f"{host} has no address", ended=True)

    def close(self, timeout_seconds: float) -> bool:
        """Terminate; True if the server was then seen to end the session, in order and in time."""
        self.connection.close()
        return _read_ends(self._handles, timeout_seconds)


class _Attempt:
    """One connect to one address. `connected`: it was accepted, so that something may have been sent."""

    def __init__(self, conninfo: str) -> None:
        self.handles: list[socket.socket] = []
        self.connected = False
        self._conninfo = conninfo
        self._conn: pq.abc.PGconn | None = None

    def run(self, deadline: float) -> psycopg.Connection[TupleRow]:
        """Raises psycopg.Error."""
        conn = self._conn = pq.PGconn.connect_start(self._conninfo.encode())
        self._keep_handle(conn)
        while True:
            if conn.status == pq.ConnStatus.BAD:
                raise psycopg.OperationalError(conn.get_error_message())
            if not self.connected and conn.status == pq.ConnStatus.STARTED:
                self._finish_connect(deadline)
                self.connected = True  # from here on it may send
            polled = conn.connect_poll()
            self._keep_handle(conn)
            if polled == pq.PollingStatus.OK:
                break
            if polled == pq.PollingStatus.FAILED:
                raise psycopg.OperationalError(conn.get_error_message())
            _wait(conn.socket, deadline, reading=polled == pq.PollingStatus.READING)
        conn.nonblocking = 1
        connection: psycopg.Connection[TupleRow] = psycopg.Connection(conn)
        connection.autocommit = True
        return connection

    def end(self, timeout_seconds: float) -> bool:
        """Closes it; True if nothing of it is left at the server."""
        if self._conn is not None:
            self._conn.finish()
        if self.connected:
            return _read_ends(self.handles, timeout_seconds)
        for handle in self.handles:
            handle.close()
        return True

    def _finish_connect(self, deadline: float) -> None:
        handle = self.handles[-1]
        _wait(handle.fileno(), deadline, reading=False)
        error = handle.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise psycopg.OperationalError(f"connection failed: {os.strerror(error)}")

    def _keep_handle(self, conn: pq.abc.PGconn) -> None:
        """Another socket means that libpq tries again otherwise (without TLS): both must end."""
        if conn.status not in (pq.ConnStatus.BAD, pq.ConnStatus.STARTED, pq.ConnStatus.NEEDED):
            self.connected = True
        try:
            number = conn.socket
        except psycopg.OperationalError:
            return
        if number < 0:
            return
        if not self.handles or not os.path.sameopenfile(number, self.handles[-1].fileno()):
            self.handles.append(socket.socket(fileno=os.dup(number)))


def _addresses(host: str, port: int) -> list[dict[str, str]]:
    if host.startswith("/"):
        return [{}]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [{"hostaddr": address} for address in dict.fromkeys(str(each[4][0]) for each in found)]


def _wait(number: int, deadline: float, *, reading: bool) -> None:
    poll = select.poll()
    poll.register(number, select.POLLIN if reading else select.POLLOUT)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise psycopg.OperationalError("connection timeout expired")


def _read_ends(handles: list[socket.socket], timeout_seconds: float) -> bool:
    """Whether every one of these sockets is read to an orderly end; closes them. A reset proves nothing."""
    deadline, orderly = time.monotonic() + timeout_seconds, bool(handles)
    for handle in handles:
        with handle:
            orderly = _read_end(handle, deadline) and orderly
    handles.clear()
    return orderly


def _read_end(handle: socket.socket, deadline: float) -> bool:
    try:
        while (left := deadline - time.monotonic()) > 0:
            handle.settimeout(left)
            if not handle.recv(_READ_BYTES):
                return _is_orderly(handle)
    except OSError:
        return False
    return False


def _is_orderly(handle: socket.socket) -> bool:
    """A reset that libpq has read reads as an end here: the connection's state tells them apart (tcp(7))."""
    if handle.family not in (socket.AF_INET, socket.AF_INET6):
        return True  # a unix socket: whoever had the other end closed it
    return handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSE_WAIT
