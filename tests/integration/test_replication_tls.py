"""Replication connections, and cancel requests between hosts, where everything is encrypted."""

from __future__ import annotations

import socket
import ssl
import struct
import subprocess
from pathlib import Path

import pytest

from pooler.demo.client import SSL_CODE, RawClient, cancel_request, query
from pooler.demo.etcd import Etcd
from pooler.demo.postgres import Role
from pooler.demo.process import free_ports
from tests.support.certificates import TLS_VERSION, Authority, give_tls
from tests.support.fleet import MakeFleet
from tests.support.postgres import Database, MakeServer, make_database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]

RUNNING = "SELECT count(*) FROM pg_stat_activity WHERE query = 'select pg_sleep(32)' AND state = 'active'"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


@pytest.fixture
def database(make_server: MakeServer, authority: Authority) -> Database:
    """At a server that lets nobody in who does not encrypt, with a role that replicates."""
    server = make_server(TLS_VERSION, hba=[
        "hostnossl all all 127.0.0.1/32 reject", "hostssl all,replication all 127.0.0.1/32 scram-sha-256"])
    give_tls(server, authority.host("127.0.0.1", file="server"), authority)
    made = make_database(server)
    server.create_role(Role("streamer", "streams"))
    server.execute("ALTER ROLE streamer REPLICATION")
    return made


def sections(authority: Authority, **fleet: str) -> dict[str, dict[str, str]]:
    pair = authority.host("localhost", "127.0.0.1", "127.0.0.2", file="pooler")
    return {"client_tls": {"sslmode": "require", "cert_file": str(pair.cert), "key_file": str(pair.key)},
            "server_tls": {"sslmode": "verify-full", "ca_file": str(authority.file)}, "fleet": fleet}


def test_a_base_backup_passes_encrypted_on_both_sides(
    make_fleet: MakeFleet, database: Database, etcd: Etcd, authority: Authority, tmp_path: Path
) -> None:
    fleet = make_fleet(database, etcd, permits=4, policy={"replicationReserve": 2},
                       also={"streamer": "streams"}, more=sections(authority))
    target = tmp_path / "copy"
    tool = database.server.installation.program("pg_basebackup")
    done = subprocess.run(
        [tool, "-d", f"host=localhost hostaddr=127.0.0.1 port={fleet.port} user=streamer sslmode=verify-full "
         f"sslrootcert={authority.file}", "-D", target, "-X", "stream", "--checkpoint=fast", "--no-sync"],
        capture_output=True, text=True, timeout=60, check=False,
        env={"PGPASSWORD": "streams", "PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    assert (target / "PG_VERSION").read_text().strip() == str(TLS_VERSION)
    walsenders = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'walsender'"
    wait_until(lambda: database.server.execute(walsenders) == [(0,)], "its sessions are gone", 10)


def test_a_cancel_from_another_host_is_passed_on_encrypted(
    make_fleet: MakeFleet, database: Database, etcd: Etcd, authority: Authority
) -> None:
    ports = (free_ports(), free_ports())
    fleets = [make_fleet(database, etcd, permits=4, workers=1, name="hosts",
                         more=sections(authority, listen=f"127.0.0.{number + 1}:{port}"))
              for number, port in enumerate(ports)]
    with RawClient("127.0.0.1", ports[0]) as client:
        encrypt(client, authority)
        client.login(database.user, database.password, database.dbname)
        client.send(query("select pg_sleep(32)"))
        wait_until(lambda: database.server.execute(RUNNING) == [(1,)], "it runs", 10)
        with socket.create_connection(("127.0.0.2", ports[1]), 10) as other_host:
            other_host.sendall(cancel_request(client.session.pid, client.session.key))
            assert other_host.recv(1) == b""
        assert client.until_ready()[-2].error().sqlstate == "57014"
    log = fleets[1].fleet.log.read_text(errors="replace")
    assert "cancel_not_delivered" not in log


def encrypt(client: RawClient, authority: Authority) -> None:
    """SSLRequest and the handshake."""
    client.send(struct.pack("!ii", 8, SSL_CODE))
    assert client.socket.recv(1) == b"S"
    context = ssl.create_default_context(cafile=str(authority.file))
    client.socket = context.wrap_socket(client.socket, server_hostname="localhost")
