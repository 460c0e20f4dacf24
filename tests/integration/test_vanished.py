"""Clients that go without a word, and probes that never were clients."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from pooler.demo.client import SSL_CODE, RawClient, query, startup
from pooler.demo.etcd import Etcd
from tests.support.certificates import Authority
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.need import missing
from tests.support.postgres import Database, make_database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

TCP_REPAIR = 19  # Linux: a socket that is closed in this mode sends nothing (tcp(7) has it not; CRIU uses it)
PROBES = 100
SLEEP = "select pg_sleep(600)"
LOGIN_SECONDS = 2


@pytest.fixture(scope="module")
def fleet(make_shared_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd) -> RunningFleet:
    """One session, and peers that are silent for a second are asked whether they are there."""
    return make_shared_fleet(postgres_newest, etcd, permits=1, workers=1, more={
        "pool": {"tcp_keepidle": "1s", "tcp_keepintvl": "1s", "tcp_keepcnt": 2}})


def login(fleet: RunningFleet) -> RawClient:
    base = fleet.database
    return RawClient("127.0.0.1", fleet.port).login(base.user, base.password, base.dbname)


def drop_silently(client: RawClient) -> None:
    """As a host that lost its power and is up again: it sends nothing, and answers a probe by a reset."""
    try:
        client.socket.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
    except PermissionError:
        client.close()
        missing("only root may drop a connection silently")
    client.socket.close()


WAYS: dict[str, Callable[[RawClient], None]] = {
    "a reset": RawClient.abort, "an end": lambda client: client.socket.close(), "not a word": drop_silently}


def running(database: Database) -> bool:
    return bool(database.server.execute(
        f"select 1 from pg_stat_activity where usename = '{database.user}' and state <> 'idle'"))


@pytest.mark.parametrize("way", WAYS)
def test_the_query_of_a_client_that_is_gone_is_cancelled_and_its_session_serves_the_next(
    fleet: RunningFleet, way: str
) -> None:
    """R47."""
    client = login(fleet)
    client.send(query(SLEEP))
    wait_until(lambda: running(fleet.database), "the query runs", 10)
    WAYS[way](client)
    wait_until(lambda: not running(fleet.database), "the query is cancelled", 10)
    with login(fleet) as other:
        assert other.query("select 1") == [["1"]]


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_is_gone_in_its_transaction_is_rolled_back_and_its_session_freed(
    fleet: RunningFleet, way: str
) -> None:
    """R67, R46."""
    client = login(fleet)
    client.query("begin")
    client.query("create table vanished ()")
    WAYS[way](client)
    with login(fleet) as other:
        assert other.query("select to_regclass('vanished')") == [[None]]


# ---- probes


def hello(first: bytes) -> bytes:
    """What a TLS client says first, behind `first`."""
    outgoing = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["postgresql"])
    talk = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="db.test")
    with suppress(ssl.SSLWantReadError):
        talk.do_handshake()
    return first + outgoing.read()


SSL_REQUEST = b"\0\0\0\x08" + SSL_CODE.to_bytes(4)


def test_probes_cost_no_login_at_the_server_no_place_no_descriptor_and_no_warning(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd, tmp_path: Path
) -> None:
    """R48. And those that keep silent are closed when a login would be."""
    database = make_database(postgres_newest.server)
    pair = Authority(tmp_path).host("127.0.0.1")
    fleet = make_fleet(database, etcd, permits=2, workers=1, more={
        "pool": {"client_login_timeout": f"{LOGIN_SECONDS}s", "max_client_conn": 20},
        "client_tls": {"sslmode": "allow", "cert_file": str(pair.cert), "key_file": str(pair.key)}})
    worker = fleet.fleet.worker_pids()[0]
    before = len(list(Path(f"/proc/{worker}/fd").iterdir()))
    lines = len(fleet.fleet.log.read_text().splitlines())
    start = startup({"user": fleet.database.user, "database": fleet.database.dbname})
    for said, waits in ((b"", False), (SSL_REQUEST, False), (SSL_REQUEST, True), (start, False),
                        (start, True), (hello(b""), False), (hello(b""), True), (start[:9], False)):
        for _ in range(PROBES):
            with socket.create_connection(("127.0.0.1", fleet.port), 10) as probe:
                probe.sendall(said)
                if waits:
                    assert probe.recv(1)
    with socket.create_connection(("127.0.0.1", fleet.port), 10) as silent:
        assert silent.recv(1000)[:1] in (b"", b"E")
    wait_until(lambda: len(list(Path(f"/proc/{worker}/fd").iterdir())) <= before, "descriptors are free", 10)
    assert database.server.execute(
        f"select 1 from pg_stat_activity where usename = '{database.user}'") == []
    told = fleet.fleet.log.read_text().splitlines()[lines:]
    assert [line for line in told if "client_login_timeout" not in line] == []
    with login(fleet) as client:
        assert client.query("select 1") == [["1"]]
