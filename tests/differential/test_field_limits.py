"""Faults that were reported about poolers: limits, refusals, and half a start."""

from __future__ import annotations

import secrets
import socket
import struct
from contextlib import suppress

import pytest

from pooler.demo.client import (
    FLUSH,
    SYNC,
    Disconnected,
    RawClient,
    ServerSaid,
    query,
)
from pooler.demo.etcd import Etcd
from tests.differential.conftest import Rig
from tests.differential.field import heard_until_end, login
from tests.differential.scripts import group
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database, make_database

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]


@pytest.fixture(scope="module")
def limited(make_shared_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd) -> RunningFleet:
    """One worker, one session, short limits."""
    database = make_database(postgres_newest.server)
    return make_shared_fleet(database, etcd, permits=3, workers=1, more={"pool": {
        "default_pool_size": 1, "query_wait_timeout": "2s", "idle_transaction_timeout": "1s",
        "query_timeout": "3s", "client_idle_timeout": "3s"}})


def test_a_wait_that_ends_is_one_error_and_ready_comes_only_for_a_sync(limited: RunningFleet) -> None:
    """R37."""
    with login(limited) as holder, login(limited) as waiter:
        holder.send(query("select pg_sleep(2.6)"))
        waiter.send(group("select 1") + FLUSH)
        said = waiter.receive()
        assert said.type == "E"
        waiter.socket.settimeout(0.3)
        with pytest.raises(TimeoutError):
            waiter.receive()
        waiter.socket.settimeout(15)
        waiter.send(SYNC)
        assert waiter.receive().type == "Z"
        holder.until_ready()
        assert waiter.query("select 2") == [["2"]]


def test_a_transaction_that_works_is_not_idle(limited: RunningFleet) -> None:
    """R51. Only the gap is punished."""
    with login(limited) as client:
        for text in ("begin", "select pg_sleep(0.9)", "select pg_sleep(1.5)", "rollback"):
            client.query(text)
        client.query("begin")
        (said,) = heard_until_end(client)
        assert said.error().fields["S"] == "FATAL"


def test_the_limit_of_a_query_counts_one_query(limited: RunningFleet) -> None:
    """R53. Not five behind each other, nor what is idle between them; one that is too long ends."""
    with login(limited) as client:
        client.send(b"".join(group(f"select {n} from pg_sleep(0.9)") + SYNC for n in range(5)))
        for _ in range(5):
            assert [said.type for said in client.until_ready()] == ["1", "2", "D", "C", "Z"]
        client.send(query("select pg_sleep(20)"))
        assert heard_until_end(client)[-1].type == "E"


def test_a_client_that_has_asked_once_is_idle_all_the_same(limited: RunningFleet) -> None:
    """R52."""
    with login(limited) as client:
        client.query("select 1")
        (said,) = heard_until_end(client)
        assert said.error().fields["S"] == "FATAL"


# ---- what cannot be served


def test_a_permanent_refusal_of_the_server_is_told_to_everybody_at_once(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    """R59. The server's own error, for the first and for those who come later."""
    base = postgres_newest
    fleet = make_fleet(base, etcd, permits=3, workers=1, more={
        "databases": {f"{base.dbname}_gone": {
            "hosts": [base.address], "dbname": f"gone_{secrets.token_hex(3)}", "role": "write",
            "policy": f"policies/{base.dbname}.yaml"}}})
    for _ in range(10):
        codes = []
        with suppress(Disconnected):
            client = RawClient("127.0.0.1", fleet.port, 5)
            try:
                client.login(base.user, base.password, f"{base.dbname}_gone").query("select 1")
            except ServerSaid as said:
                codes.append(said.sqlstate)
            client.close()
        assert codes == ["3D000"]
    with login(fleet) as client:
        assert client.query("select 1") == [["1"]]


def test_a_reset_in_the_middle_of_a_start_up_packet_costs_nothing(newest: Rig) -> None:
    """R46. Nor does one in the middle of a message after it."""
    for size in (1, 7, 8, 30):
        with socket.create_connection(("127.0.0.1", newest.fleet.ports.listen), 10) as sock:
            sock.sendall(struct.pack("!ii", 60, 196_608)[:size] + b"user\0x\0" * (size > 8))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with newest.pooled("_one") as client:
        assert client.query("select 1") == [["1"]]
