"""Protocol 3.0, 3.2 and what is newer or unknown, as PostgreSQL 18 answers (R29); keys of every length."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import pq

from pooler.demo.client import Disconnected, Login, Message, RawClient, cancel_request, query, startup
from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.need import missing
from tests.support.postgres import Database
from tests.support.rawclient import OpenRaw
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]

RUNNING = "SELECT count(*) FROM pg_stat_activity WHERE query = 'select pg_sleep(31)' AND state = 'active'"


@pytest.fixture(scope="module")
def fleet(make_shared_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd) -> RunningFleet:
    return make_shared_fleet(postgres_newest, etcd, permits=4)


def version(major: int, minor: int) -> int:
    return major << 16 | minor


def hears(
    client: RawClient, database: Database, asked: int, **more: str
) -> tuple[str | None, bytes | None, list[str]]:
    """(SQLSTATE of a refusal, the body of NegotiateProtocolVersion, types after it that matter)."""
    client.send(startup({"user": database.user, "database": database.dbname, **more}, asked))
    login, types = Login(database.user, database.password), list[str]()
    negotiated: bytes | None = None
    while True:
        try:
            said: Message = client.receive()
        except Disconnected:
            return "closed", negotiated, types
        if said.type == "R":
            client.send(login.answer(said.body))
        elif said.type == "v":
            negotiated = said.body
        elif said.type == "E":
            return said.error().sqlstate, negotiated, types
        elif said.type == "Z":
            return None, negotiated, [*types, "Z"]


@pytest.mark.parametrize(("asked", "more"), [
    ((3, 0), {}), ((3, 2), {}), ((3, 3), {}), ((3, 9999), {}), ((3, 0), {"_pq_.foo": "1"}),
    ((3, 2), {"_pq_.foo": "1", "_pq_.bar": ""}), ((3, 9999), {"_pq_.test_protocol_negotiation": "x"}),
    ((4, 0), {}), ((5, 7), {}), ((3, 1), {}),
])
def test_each_version_is_answered_as_by_the_newest_server(
    fleet: RunningFleet, raw: OpenRaw, asked: tuple[int, int], more: dict[str, str]
) -> None:
    number = version(*asked)
    straight = hears(raw(fleet.database.port), fleet.database, number, **more)
    assert hears(raw(fleet.port), fleet.database, number, **more) == straight


@pytest.mark.parametrize("asked", [(1, 0), (2, 0)])
def test_what_is_older_than_messages_with_a_length_is_refused_by_a_fatal_error(
    fleet: RunningFleet, raw: OpenRaw, asked: tuple[int, int]
) -> None:
    """The server's own answer is in the older format, which nobody reads any more."""
    assert hears(raw(fleet.port), fleet.database, version(*asked)) == ("0A000", None, [])


@pytest.mark.parametrize(("asked", "secret_bytes"), [((3, 0), 4), ((3, 2), 32), ((3, 9999), 32)])
def test_a_key_is_as_long_as_the_version_allows_and_cancels_with_nothing_less(
    fleet: RunningFleet, raw: OpenRaw, asked: tuple[int, int], secret_bytes: int
) -> None:
    client = raw(fleet.port)
    assert hears(client, fleet.database, version(*asked))[0] is None
    pid, key = client.session.pid, client.session.key
    assert len(key) == secret_bytes
    client.send(query("select pg_sleep(31)"))
    wait_until(lambda: fleet.database.server.execute(RUNNING) == [(1,)], "it runs", 10)
    for wrong in (key[:-1] + bytes([key[-1] ^ 1]), key[:4] + b"\0" * 28, key + b"\0" * 224, b"\0" * 256):
        if wrong != key:
            sent(raw(fleet.port), cancel_request(pid, wrong))
    assert fleet.database.server.execute(RUNNING) == [(1,)]
    sent(raw(fleet.port), cancel_request(pid, key))
    assert [said.type for said in client.until_ready()][-2:] == ["E", "Z"]


def sent(client: RawClient, data: bytes) -> None:
    """Send it; nothing is answered, and the connection ends."""
    client.send(data)
    with pytest.raises(Disconnected):
        client.receive()


@pytest.mark.parametrize("size", [11, 12, 15, 276, 277, 1000])
def test_a_cancel_request_of_an_impossible_length_is_told_nothing_and_harms_nobody(
    fleet: RunningFleet, raw: OpenRaw, size: int
) -> None:
    client = raw(fleet.port)
    client.send(struct.pack("!ii", size, 80_877_102) + b"\0" * (size - 8))
    assert client.is_closed()
    with psycopg.connect(fleet.dsn()) as other:
        assert other.execute("select 1").fetchall() == [(1,)]


@pytest.fixture(params=["3.0", "3.2", "latest"])
def libpq(request: pytest.FixtureRequest, fleet: RunningFleet) -> Iterator[psycopg.Connection[Any]]:
    """A connection by libpq 18 with that max_protocol_version."""
    if pq.version() < 180_000:
        missing(f"libpq {pq.version()} does not know max_protocol_version")
    dsn = fleet.dsn(max_protocol_version=request.param)
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


def test_libpq_logs_in_and_cancels_by_each_version(
    libpq: psycopg.Connection[Any], fleet: RunningFleet
) -> None:
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(libpq.execute, "select pg_sleep(31)")
        wait_until(lambda: fleet.database.server.execute(RUNNING) == [(1,)], "it runs", 10)
        libpq.cancel_safe(timeout=10)
        with pytest.raises(psycopg.errors.QueryCanceled):
            running.result(10)
    assert libpq.execute("select 1").fetchall() == [(1,)]
