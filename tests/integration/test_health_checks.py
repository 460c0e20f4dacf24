"""Health checks of load balancers: they end before a login, and cost nothing whatever is going on."""

from __future__ import annotations

import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from pooler.demo.client import SSL_CODE, RawClient, ServerSaid, startup
from pooler.demo.etcd import Etcd
from pooler.demo.fleet import http_status
from pooler.demo.process import free_ports
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database, MakeServer, make_database
from tests.support.proxies import RunHAProxy
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

CHECKS = 30  # of each kind in each state
CHECKER = startup({"user": "checker"})
SSL_REQUEST = b"\0\0\0\x08" + SSL_CODE.to_bytes(4)
HAPROXY = """
global
    stats socket {socket}
defaults
    mode tcp
    timeout connect 2s
    timeout client 30s
    timeout server 30s
frontend in
    bind 127.0.0.1:{front}
    default_backend workers
backend workers
    option pgsql-check user checker
    server w 127.0.0.1:{back} check inter 100ms fall 1 rise 1
"""


class Checked:
    """A fleet of one worker and one session, with HAProxy in front that checks it ten times a second."""

    def __init__(self, fleet: RunningFleet, front: int, control: Path) -> None:
        self.fleet, self.front, self._control = fleet, front, control

    def haproxy(self) -> dict[str, str]:
        """What HAProxy says of the worker."""
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(str(self._control))
            control.sendall(b"show stat\n")
            said = b"".join(iter(lambda: control.recv(65_536), b"")).decode().lstrip("# ").splitlines()
        names = said[0].split(",")
        rows = [dict(zip(names, line.split(","), strict=True)) for line in said[1:] if line]
        return next(row for row in rows if row["svname"] == "w")

    def ask(self, said: bytes) -> bytes:
        """The first byte of the answer to a check, which then goes away by a reset or an end."""
        client = RawClient("127.0.0.1", self.fleet.port)
        client.send(said)
        first = client.socket.recv(1)
        client.abort() if said is CHECKER else client.socket.close()
        return first

    def check_all(self) -> None:
        """Checks of every kind find it up, and leave no line in the log, so no login at a server."""
        log, before = self.fleet.fleet.log, len(self.fleet.fleet.log.read_text().splitlines())
        for _ in range(CHECKS):
            assert self.ask(CHECKER) == b"R"
            assert self.ask(SSL_REQUEST) == b"N"
        wait_until(lambda: self.haproxy()["status"] == "UP", "HAProxy finds it up", 5)
        told = log.read_text().splitlines()[before:]
        assert [line for line in told if "client_" in line or "session_" in line] == []


@pytest.fixture
def server(make_server: MakeServer) -> Database:
    return make_database(make_server())


@pytest.fixture
def checked(make_fleet: MakeFleet, server: Database, etcd: Etcd, run_haproxy: RunHAProxy,
            tmp_path: Path) -> Checked:
    fleet = make_fleet(server, etcd, permits=1, workers=1, more={"pool": {"query_wait_timeout": "60s"}})
    front, control = free_ports(), tmp_path / "haproxy"
    run_haproxy(HAPROXY.format(socket=control, front=front, back=fleet.port), [front])
    return Checked(fleet, front, control)


def login(fleet: RunningFleet, port: int | None = None) -> RawClient:
    base = fleet.database
    return RawClient("127.0.0.1", port or fleet.port).login(base.user, base.password, base.dbname)


@pytest.mark.haproxy
def test_checks_find_it_up_and_leave_nothing_until_it_drains(checked: Checked, server: Database) -> None:
    """R87. Idle, with its only session in use, with the server down; and draining they find it down."""
    fleet = checked.fleet
    checked.check_all()
    assert server.server.execute(f"select 1 from pg_stat_activity where usename = '{server.user}'") == []
    with ExitStack() as stack:
        holder, waiter = (stack.enter_context(login(fleet, checked.front)) for _ in range(2))
        holder.query("begin")
        waiter.send(b"Q\0\0\0\x0dselect 7\0")
        checked.check_all()
        assert int(checked.haproxy()["chkfail"]) == 0
        assert server.server.execute(
            "select count(*) from pg_stat_activity where usename = 'checker'") == [(0,)]
        assert fleet.fleet.child is not None
        fleet.fleet.child.process.send_signal(signal.SIGTERM)
        wait_until(lambda: http_status(fleet.fleet.ports.worker_http, "/readyz") == 503, "not ready", 5)
        wait_until(lambda: checked.haproxy()["status"] == "DOWN", "HAProxy finds it down", 5)
        assert checked.ask(CHECKER) == b"E"
        with RawClient("127.0.0.1", fleet.port) as late, pytest.raises(ServerSaid, match="57P03"):
            late.login(server.user, server.password, server.dbname)
        assert holder.query("select 1") == [["1"]]
        holder.query("commit")


@pytest.mark.haproxy
def test_a_server_that_is_down_fails_no_check(checked: Checked, server: Database) -> None:
    """R87."""
    with login(checked.fleet) as client:
        client.query("select 1")
    server.server.stop(immediate=True)
    wait_until(lambda: "session_lost" in checked.fleet.fleet.log.read_text(), "the session is lost", 10)
    checked.check_all()
