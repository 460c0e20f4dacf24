"""A server connection that ends at the pooler's side only: its permit is not free before the server shows
that the session is gone."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import psycopg
import pytest

from chaos.cable import Cable
from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.need import missing
from tests.support.postgres import MakeServer, make_database
from tests.support.wait import wait_until
from tests.support.watching import proofs, stay_unknown, unknown, watch_of

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

LEASE_SECONDS = 2.0
MORE = {"etcd": {"lease_ttl": f"{LEASE_SECONDS:g}s"}, "pool": {"server_idle_timeout": "1h"}}
HELD_SECONDS = 4 * LEASE_SECONDS


def destroy(port: int, peer_port: int) -> bool:
    """The kernel aborts a loopback TCP socket; False where it cannot, or we may not."""
    if shutil.which("ss") is None:
        return False
    done = subprocess.run(
        ["ss", "-K", "-t", "src", "127.0.0.1", "sport", "=", str(port), "dst", "127.0.0.1", "dport", "=",
         str(peer_port)], capture_output=True, text=True, check=False)
    return done.returncode == 0 and str(port) in done.stdout


def can_destroy() -> bool:
    """Tried on a connection of our own."""
    with (socket.create_server(("127.0.0.1", 0)) as server,
          socket.create_connection(server.getsockname(), 5) as near, server.accept()[0] as far):
        if not destroy(near.getsockname()[1], far.getsockname()[1]):
            return False
        far.settimeout(5)
        try:
            return far.recv(1) != b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def in_transaction(
    fleet: RunningFleet, stack: ExitStack
) -> tuple[psycopg.Connection[tuple[int, int]], int, int]:
    """A client inside a transaction, its backend's pid, and the port of the pooler's socket there."""
    client = stack.enter_context(psycopg.connect(fleet.dsn()))
    row = client.execute("select pg_backend_pid(), inet_client_port()").fetchone()
    assert row is not None
    return client, row[0], row[1]


@pytest.mark.timeout(120)
def test_a_destroyed_server_socket_leaves_the_permit_taken_until_the_backend_is_absent(
    make_fleet: MakeFleet, make_server: MakeServer, etcd: Etcd, etcd_prefix: str
) -> None:
    if os.geteuid() != 0:
        missing("ss -K is root's")
    if not can_destroy():
        pytest.skip("no `ss`, or a kernel that destroys no sockets (CONFIG_INET_DIAG_DESTROY): the reset "
                    "below shows the same")
    database = make_database(make_server())
    fleet = make_fleet(database, etcd, permits=2, workers=1, more=MORE)
    watch = watch_of(fleet, etcd, etcd_prefix)
    with ExitStack() as stack:
        client, pid, port = in_transaction(fleet, stack)
        with stopped(pid):  # so that it does not hear of the reset
            assert destroy(port, database.port)
            with pytest.raises(psycopg.OperationalError):
                client.execute("select 1")
            wait_until(lambda: any(each.pid == pid for each in unknown(watch).values()), "it is unknown", 20)
            permits = {name for name, each in unknown(watch).items() if each.pid == pid}
            stay_unknown(watch, permits, HELD_SECONDS)
            told = fleet.fleet.command("ledger", "explain", database.dbname, *permits).stdout
            assert "absent" in told, told
        wait_until(lambda: not permits & unknown(watch).keys(), "it is free", 30)
    assert proofs(fleet, permits) == {"absent": 1}


@pytest.mark.timeout(120)
def test_a_reset_that_only_the_pooler_hears_leaves_the_permit_taken_until_the_backend_is_absent(
    make_fleet: MakeFleet, make_server: MakeServer, etcd: Etcd, etcd_prefix: str
) -> None:
    database = make_database(make_server())
    with ExitStack() as stack:
        cable = Cable(database.port)
        stack.callback(cable.close)
        fleet = make_fleet(database, etcd, permits=2, workers=1, more=MORE, hosts=(cable.endpoint,))
        watch = watch_of(fleet, etcd, etcd_prefix)
        client, pid, _ = in_transaction(fleet, stack)
        cable.reset_callers()
        with pytest.raises(psycopg.OperationalError):
            client.execute("select 1")
        wait_until(lambda: any(each.pid == pid for each in unknown(watch).values()), "it is unknown", 20)
        permits = {name for name, each in unknown(watch).items() if each.pid == pid}
        with psycopg.connect(database.dsn()) as server:
            stay_unknown(watch, permits, HELD_SECONDS)
            there = server.execute("select count(*) from pg_stat_activity where pid = %s", (pid,)).fetchone()
            assert there == (1,), "the server knows nothing of it"
        cable.heal()
        wait_until(lambda: not permits & unknown(watch).keys(), "it is free", 40)
    assert proofs(fleet, permits) == {"absent": 1}
