"""A fleet that encrypts on both sides: real clients, cancels, big data, the console, and new certificates."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from psycopg import errors

from pooler.demo.etcd import Etcd
from pooler.demo.postgres import Server, temporary_directory
from tests.support.certificates import TLS_VERSION, Authority, give_tls
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database, create_server, make_database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]


@dataclass
class Place:
    """An encrypting server, a fleet before it, and the authority of both."""

    authority: Authority
    database: Database
    start: Callable[..., RunningFleet]
    folder: Path
    client_tls: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """It lets nobody in who does not encrypt."""
    base = temporary_directory("tls")
    hba = ["hostnossl all all 127.0.0.1/32 reject", "hostssl all all 127.0.0.1/32 scram-sha-256"]
    made = create_server(base / "server", TLS_VERSION, hba=hba)
    yield made
    made.stop()
    shutil.rmtree(base)


@pytest.fixture
def place(make_fleet: MakeFleet, server: Server, etcd: Etcd, tmp_path: Path) -> Place:
    authority = Authority(tmp_path / "tls")
    give_tls(server, authority.host("127.0.0.1", file="server"), authority)
    database = make_database(server)
    pair = authority.host("localhost", "127.0.0.1", file="pooler")
    ours = {"sslmode": "require", "cert_file": str(pair.cert), "key_file": str(pair.key)}
    theirs = {"sslmode": "verify-full", "ca_file": str(authority.file)}

    def start(*, workers: int = 1, permits: int = 4, **sections: Any) -> RunningFleet:
        more = {"client_tls": ours, "server_tls": theirs, **sections}
        return make_fleet(database, etcd, permits=permits, workers=workers, more=more)

    return Place(authority, database, start, tmp_path / "tls", ours)


def connect(fleet: RunningFleet, place: Place, **more: str) -> psycopg.Connection[Any]:
    given: dict[str, Any] = {"host": "localhost", "hostaddr": "127.0.0.1", "sslmode": "verify-full",
             "sslrootcert": str(place.authority.file), **more}
    return psycopg.connect(fleet.dsn(**given), autocommit=True)


def test_verifying_clients_are_served_by_sessions_that_are_encrypted_and_verified(place: Place) -> None:
    fleet = place.start()
    for negotiation in ("postgres", "direct"):
        with connect(fleet, place, sslnegotiation=negotiation) as client:
            assert client.pgconn.ssl_in_use
            row = client.execute(
                "SELECT ssl, version FROM pg_stat_ssl WHERE pid = pg_backend_pid()").fetchone()
            assert row == (True, "TLSv1.3")
    with connect(fleet, place) as client, psycopg.connect(
        fleet.console().replace("sslmode=disable", "sslmode=require"), autocommit=True,
    ) as console:
        client.execute("SELECT 1")
        for item in ("CLIENTS", "SERVERS"):
            cursor = console.execute(f"SHOW {item}")
            assert cursor.description is not None
            at = [column.name for column in cursor.description].index("tls")
            shown = {row[at] for row in cursor.fetchall()}
            assert all(text.startswith("TLSv1.3/TLS_") for text in shown), (item, shown)
    plain = place.database.server.execute(
        "SELECT a.application_name FROM pg_stat_activity a JOIN pg_stat_ssl s USING (pid) "
        "WHERE NOT s.ssl AND a.client_addr IS NOT NULL")
    assert plain == []  # the coordinator's own looks neither


def test_clear_text_is_refused_with_postgresqls_code(place: Place) -> None:
    fleet = place.start()
    with pytest.raises(psycopg.OperationalError, match="no encryption"):
        connect(fleet, place, sslmode="disable").close()


def test_a_cancel_reaches_its_query_encrypted_and_in_clear(place: Place) -> None:
    fleet = place.start(permits=1)
    with connect(fleet, place) as client:
        for cancel in (client.cancel_safe, client.cancel):
            failed: list[BaseException] = []

            def run(failed: list[BaseException] = failed) -> None:
                try:
                    client.execute("SELECT pg_sleep(60)")
                except psycopg.Error as error:
                    failed.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            wait_until(lambda: place.database.server.execute(
                "SELECT 1 FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(60)' AND state = 'active'"),
                "the query runs", 10)
            cancel()
            thread.join(20)
            assert not thread.is_alive()
            assert isinstance(failed[0], errors.QueryCanceled)
        assert client.execute("SELECT 1").fetchone() == (1,)


def test_50_mb_go_in_and_come_out_again(place: Place) -> None:
    fleet = place.start()
    block = os.urandom(500_000).hex().encode()  # 1 MB
    with connect(fleet, place) as client:
        client.execute("CREATE TABLE big (n int, line text)")
        with client.cursor().copy("COPY big FROM STDIN") as copy:
            for number in range(50):
                copy.write(b"%d\t%s\n" % (number, block))
        with client.cursor().copy("COPY (SELECT line FROM big ORDER BY n) TO STDOUT") as copy:
            lines = 0
            for line in copy:
                assert bytes(line) == block + b"\n"
                lines += 1
        assert lines == 50
        row = client.execute("SELECT string_agg(line, '' ORDER BY n) FROM big").fetchone()
        assert row == (block.decode() * 50,)
        assert client.execute("SELECT length(%s::text)", [block.decode() * 20]).fetchone() == (20_000_000,)


def test_a_client_that_ends_by_a_fatal_alert_is_rolled_back_and_its_session_freed(place: Place) -> None:
    """R67: nothing but an alert comes, no Terminate and no end of the connection."""
    fleet = place.start(permits=1)
    client = connect(fleet, place)
    client.execute("BEGIN")
    client.execute("CREATE TABLE half_way ()")
    with socket.socket(fileno=os.dup(client.pgconn.socket)) as wire:
        wire.sendall(b"\x15\x03\x03\x00\x02\x02\x50")  # in clear, so that it cannot be read: fatal to us
        with connect(fleet, place) as next_one:
            assert next_one.execute("SELECT to_regclass('half_way')").fetchone() == (None,)
    client.pgconn.finish()


def serial(fleet: RunningFleet, place: Place) -> str:
    """The certificate that a new client is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(place.authority.file)
    context.set_alpn_protocols(["postgresql"])
    with (
        socket.create_connection(("127.0.0.1", fleet.port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        der = secured.getpeercert(binary_form=True)
    assert der is not None
    return hashlib.sha256(der).hexdigest()


def test_a_new_certificate_is_for_new_clients_and_a_broken_one_for_nobody(place: Place) -> None:
    """R27."""
    fleet = place.start(workers=2, pool={"pool_mode": "session"})
    first = serial(fleet, place)
    with connect(fleet, place) as old:
        old.execute("SELECT 1")
        session = old.execute("SELECT pg_backend_pid()").fetchone()
        _reload(fleet)  # nothing changed
        assert serial(fleet, place) == first
        place.authority.host("localhost", "127.0.0.1", file="pooler")
        _reload(fleet)
        second = serial(fleet, place)
        assert second != first
        assert old.execute("SELECT pg_backend_pid()").fetchone() == session
        Path(place.client_tls["key_file"]).write_bytes(place.authority.user("x").key.read_bytes())
        words = _reload(fleet, refused=True)
        assert "is not the key of the certificate" in words
        assert serial(fleet, place) == second
        fleet.kill_worker(0)  # the one that comes in its place has the certificate in use, too
        wait_until(lambda: len(fleet.fleet.worker_pids()) == 2, "the worker is back", 20)
        assert serial(fleet, place) == second
        with connect(fleet, place) as new:
            assert new.execute("SELECT 3").fetchone() == (3,)


def test_another_mode_towards_servers_replaces_sessions_and_the_same_does_not(place: Place) -> None:
    fleet = place.start(permits=1)
    with connect(fleet, place) as client:
        before = client.execute("SELECT pg_backend_pid()").fetchone()
        _reload(fleet)
        assert client.execute("SELECT pg_backend_pid()").fetchone() == before
        config = yaml.safe_load(fleet.config.read_text())
        config["server_tls"]["sslmode"] = "verify-ca"
        fleet.config.write_text(yaml.safe_dump(config))
        _reload(fleet)
        assert client.execute("SELECT pg_backend_pid()").fetchone() != before


def _reload(fleet: RunningFleet, *, refused: bool = False) -> str:
    done = fleet.fleet.command("fleet", "reload")
    words = done.stdout + done.stderr
    assert bool(done.returncode) is refused, words
    return words


def test_a_server_that_cannot_be_verified_is_told_to_clients_and_nothing_is_sent_to_it(
    place: Place, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path / "stranger")
    fleet = place.start(
        server_tls={"sslmode": "verify-full", "ca_file": str(place.authority.file)},
        pool={"client_login_timeout": "5s", "query_wait_timeout": "5s"})
    with connect(fleet, place) as client:
        client.execute("SELECT 1")
    give_tls(place.database.server, stranger.host("127.0.0.1"), stranger)
    with psycopg.connect(
        fleet.console().replace("sslmode=disable", "sslmode=require"), autocommit=True) as console:
        console.execute("RECONNECT")
    with connect(fleet, place) as client, pytest.raises(psycopg.Error, match="certificate refused"):
        client.execute("SELECT 1")
