"""Replication connections through a whole fleet: on sessions of their own, under permits of their own, and
real tools work over them as straight at the server (R88)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from pooler.demo.client import RawClient, ServerSaid, cancel_request, message, query
from pooler.demo.etcd import Etcd
from pooler.demo.postgres import Role, Server, temporary_directory
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.need import missing
from tests.support.postgres import VERSIONS, Database, create_server, make_database
from tests.support.rawclient import OpenRaw
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]

SLOTS = 3
STREAMS_ONLY = "streams_only"  # the server lets it in for physical replication and for nothing else
WALSENDERS = "SELECT pid, application_name FROM pg_stat_activity WHERE backend_type = 'walsender'"


@dataclass(frozen=True, slots=True)
class Place:
    """A server that may be replicated, and two workers in front of it."""

    server: Server
    database: Database
    fleet: RunningFleet

    @property
    def replicator(self) -> dict[str, str]:
        return {"user": f"{self.database.user}_r", "password": "streams"}

    def dsn(self, **more: str) -> str:
        return self.fleet.dsn(None, **{**self.replicator, **more})

    def tool(self, *argv: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
        """A client program of the server's version, through the fleet."""
        return subprocess.run(
            self.argv(*argv), capture_output=True, text=True, timeout=60, check=False,
            env={"PGPASSWORD": self.replicator["password"], "PATH": "/usr/bin:/bin", "PGSSLMODE": "disable"},
            **more)

    def argv(self, name: str | Path, *rest: str | Path) -> list[str]:
        return [str(self.server.installation.program(str(name))), "-h", "127.0.0.1", "-p",
                str(self.fleet.port), "-U", self.replicator["user"], *map(str, rest)]

    def show(self, what: str) -> list[dict[str, Any]]:
        with psycopg.connect(self.fleet.console(), autocommit=True, row_factory=dict_row) as console:
            return console.execute(f"SHOW {what}").fetchall()

    def held(self) -> list[dict[str, Any]]:
        """Permits of kind replication."""
        return [row for row in self.show("LEDGER") if str(row["permit"]).startswith("replication/")]

    def is_quiet(self) -> bool:
        return not self.server.execute(WALSENDERS) and not self.held()


@pytest.fixture(scope="module", params=VERSIONS, ids=lambda version: f"pg{version}")
def place(
    request: pytest.FixtureRequest, make_shared_fleet: MakeFleet, etcd: Etcd
) -> Iterator[Place]:
    directory = temporary_directory("walsender")
    server = create_server(
        directory, request.param,
        settings={"wal_level": "logical", "max_wal_senders": "8", "wal_keep_size": "1GB"},
        hba=["host replication all 127.0.0.1/32 scram-sha-256",
             f"host all {STREAMS_ONLY} 127.0.0.1/32 reject"])
    try:
        database = make_database(server)
        replicator = Role(f"{database.user}_r", "streams", ("pg_read_all_data",))
        server.create_role(replicator)
        server.execute(f'ALTER ROLE "{replicator.name}" REPLICATION')
        server.create_role(Role(STREAMS_ONLY, replicator.password))
        server.execute(f'ALTER ROLE "{STREAMS_ONLY}" REPLICATION')
        fleet = make_shared_fleet(
            database, etcd, permits=4, policy={"replicationReserve": SLOTS},
            also=dict.fromkeys((replicator.name, STREAMS_ONLY), replicator.password))
        yield Place(server, database, fleet)
    finally:
        server.stop(immediate=True)


def login(place: Place, raw: OpenRaw, kind: str, **more: str) -> RawClient:
    client = raw(place.fleet.port)
    return client.login(place.replicator["user"], place.replicator["password"], place.database.dbname,
                        replication=kind, **more)


def position(place: Place, client: RawClient) -> str | None:
    """Where to stream from: in a segment that there is, as the end of a switched one may not be in yet."""
    place.server.execute("SELECT pg_logical_emit_message(true, 'test', 'a commit')")
    return client.query("IDENTIFY_SYSTEM")[0][2]


@pytest.mark.parametrize("kind", ["true", "database"])
def test_a_replication_connection_has_a_session_and_a_permit_that_end_with_it(
    place: Place, raw: OpenRaw, kind: str
) -> None:
    with psycopg.connect(place.dsn(), autocommit=True) as ordinary:
        ordinary.execute("select 1")
    client = login(place, raw, kind, application_name="receiver")
    (row,) = client.query("IDENTIFY_SYSTEM")
    control = place.server.execute("SELECT system_identifier::text FROM pg_control_system()")
    assert row[0] == control[0][0]
    (walsender,) = place.server.execute(WALSENDERS)
    (held,) = place.held()
    assert held["pid"] == walsender[0]
    name = "physical" if kind == "true" else "logical"
    for what in ("CLIENTS", "SERVERS"):
        (shown,) = [row for row in place.show(what) if row["replication"] != "none"]
        assert (shown["replication"], shown["user"]) == (name, place.replicator["user"])
    assert walsender[1] == "receiver" if kind == "database" else walsender[1].startswith("pooler:")
    client.close()
    wait_until(place.is_quiet, "its session is gone and its permit is back", 10)
    with psycopg.connect(place.dsn(), autocommit=True) as ordinary:
        assert ordinary.execute("select 1").fetchall() == [(1,)]  # by a session that takes SQL


def test_logical_connections_take_sql_and_settings_of_their_own(place: Place, raw: OpenRaw) -> None:
    client = login(place, raw, "database", options="-c work_mem=7MB")
    assert client.query("SHOW work_mem") == [["7MB"]]
    with pytest.raises(ServerSaid, match="no_such_thing"):
        login(place, raw, "database", options="-c no_such_thing=1")


def test_what_the_server_refuses_is_told_in_its_own_words(place: Place, raw: OpenRaw) -> None:
    database = place.database
    with pytest.raises(ServerSaid) as straight:
        raw(database.port).login(database.user, database.password, database.dbname, replication="database")
    with pytest.raises(ServerSaid) as pooled:
        raw(place.fleet.port).login(
            database.user, database.password, database.dbname, replication="database")
    assert pooled.value.fields == straight.value.fields
    wait_until(place.is_quiet, "its permit is back", 10)


def test_physical_replication_says_what_it_needs_besides(place: Place, raw: OpenRaw) -> None:
    with pytest.raises(ServerSaid, match="needs an ordinary session of user 'streams_only'") as refused:
        raw(place.fleet.port).login(
            STREAMS_ONLY, place.replicator["password"], place.database.dbname, replication="true")
    assert refused.value.sqlstate == "28000"
    wait_until(place.is_quiet, "its permit is back", 10)


def test_more_than_there_are_permits_are_refused_in_words(place: Place, raw: OpenRaw) -> None:
    clients = [login(place, raw, "database") for _ in range(SLOTS)]
    with pytest.raises(ServerSaid, match="replication permits") as refused:
        login(place, raw, "database")
    assert refused.value.sqlstate == "53300"
    clients[0].close()
    assert login(place, raw, "database").query("select 1") == [["1"]]


def test_pg_basebackup_and_pg_receivewal_work(place: Place, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    target = tmp_path / "copy"
    done = place.tool("pg_basebackup", "-D", target, "-X", "stream", "--checkpoint=fast", "--no-sync")
    assert done.returncode == 0, done.stderr
    assert (target / "PG_VERSION").read_text().strip() == str(place.server.installation.version)
    (lsn,) = place.server.execute("SELECT pg_switch_wal(), pg_current_wal_lsn()::text")
    into = tmp_path / "wal"
    into.mkdir()
    end = place.server.execute("SELECT pg_current_wal_lsn()::text")[0][0]
    receiving = place.tool("pg_receivewal", "-D", into, "--no-loop", "--no-sync", "-E", end)
    assert receiving.returncode == 0, receiving.stderr
    assert any(into.iterdir())
    assert lsn
    wait_until(place.is_quiet, "all sessions are gone and all permits are back", 10)


def test_pg_recvlogical_streams_changes(place: Place, tmp_path: Path) -> None:
    out = tmp_path / "changes"
    dbname = place.database.dbname
    slot = ["-d", dbname, "-S", "through_the_fleet"]
    made = place.tool("pg_recvlogical", *slot, "--create-slot", "-P", "test_decoding")
    if "test_decoding" in made.stderr:
        missing("no test_decoding in this installation")
    assert made.returncode == 0, made.stderr
    try:
        with psycopg.connect(place.fleet.dsn(), autocommit=True) as writer:
            writer.execute("create table if not exists changed (a int primary key)")
            writer.execute("insert into changed select generate_series(1, 1000)")
        end = place.server.execute("SELECT pg_current_wal_lsn()::text")[0][0]
        done = place.tool("pg_recvlogical", *slot, "--start", "-f", out, "--no-loop", "-E", end)
        assert done.returncode == 0, done.stderr
        assert out.read_text().count("INSERT") == 1000
    finally:
        place.tool("pg_recvlogical", *slot, "--drop-slot")
    wait_until(place.is_quiet, "all sessions are gone and all permits are back", 10)


def test_a_stream_goes_both_ways_and_a_cancel_ends_what_runs(place: Place, raw: OpenRaw) -> None:
    client = login(place, raw, "true")
    lsn = position(place, client)
    client.send(query(f"START_REPLICATION PHYSICAL {lsn}"))
    assert client.receive().type == "W"
    place.server.execute("CREATE TABLE IF NOT EXISTS noise (a int)")
    place.server.execute("INSERT INTO noise SELECT generate_series(1, 100)")
    said = client.receive()
    assert said.type == "d"
    client.send(message(b"d", b"r" + bytes(8 * 4) + b"\1"))  # a status that asks for an answer
    assert client.receive().type == "d"
    client.send(message(b"c"))  # CopyDone: the server ends its own side
    types = [each.type for each in client.until_ready()]
    assert types[-3:] == ["c", "C", "Z"] or "c" in types


def test_a_cancel_reaches_a_replication_connection(place: Place, raw: OpenRaw) -> None:
    client = login(place, raw, "database")
    client.send(query("select pg_sleep(30)"))
    asleep = "SELECT 1 FROM pg_stat_activity WHERE query LIKE '%pg_sleep(30)%' AND backend_type = 'walsender'"
    wait_until(lambda: place.server.execute(asleep), "it sleeps", 10)
    canceller = raw(place.fleet.port)
    canceller.send(cancel_request(client.session.pid, client.session.key))
    assert [each.type for each in client.until_ready()][-2:] == ["E", "Z"]
    assert client.query("select 1") == [["1"]]


@pytest.mark.parametrize("how", ["closes", "leaves half a message", "leaves in a base backup"])
def test_however_a_client_leaves_its_permit_comes_back(place: Place, raw: OpenRaw, how: str) -> None:
    client = login(place, raw, "true")
    if how == "leaves half a message":
        client.send(query("IDENTIFY_SYSTEM")[:9])
    elif how == "leaves in a base backup":
        client.send(query("BASE_BACKUP ( CHECKPOINT 'fast' )"))
        while client.receive().type != "d":
            pass
    client.close()
    wait_until(place.is_quiet, "its session is gone and its permit is back", 15)


def test_a_reader_that_stops_reading_holds_up_its_own_stream_alone(place: Place, raw: OpenRaw) -> None:
    client = login(place, raw, "true")
    client.send(query("BASE_BACKUP ( CHECKPOINT 'fast' )"))
    with psycopg.connect(place.fleet.dsn(), autocommit=True) as other:
        for _ in range(50):
            assert other.execute("select 1").fetchall() == [(1,)]
    received = 0
    with suppress(ServerSaid):
        while (said := client.receive()).type != "Z":
            received += len(said.body)
    assert received > 1_000_000


def test_without_a_reserve_they_are_refused_clearly(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd, raw: OpenRaw
) -> None:
    fleet = make_fleet(postgres_newest, etcd, permits=4)
    for kind in ("true", "database"):
        with pytest.raises(ServerSaid, match="replicationReserve") as refused:
            raw(fleet.port).login(postgres_newest.user, postgres_newest.password, postgres_newest.dbname,
                                  replication=kind)
        assert refused.value.sqlstate == "0A000"


def test_the_audit_finds_each_walsender_under_its_permit(place: Place, raw: OpenRaw) -> None:
    clients = [login(place, raw, kind, application_name="receiver") for kind in ("true", "database")]
    done = place.fleet.fleet.command("ledger", "audit", place.fleet.fleet.plan.ledger)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [client.query("IDENTIFY_SYSTEM")[0][0] for client in clients]


def test_a_server_that_ends_a_stream_is_heard_and_its_permit_comes_back(place: Place, raw: OpenRaw) -> None:
    client = login(place, raw, "true")
    lsn = position(place, client)
    client.send(query(f"START_REPLICATION PHYSICAL {lsn}"))
    assert client.receive().type == "W"
    place.server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                         "WHERE backend_type = 'walsender'")
    while (said := client.receive()).type != "E":
        assert said.type in "dc"
    assert said.error().sqlstate == "57P01"
    assert client.is_closed()
    wait_until(place.is_quiet, "its permit is back", 10)


def test_a_rolling_restart_ends_streams_at_once_and_keeps_base_backups(
    place: Place, raw: OpenRaw
) -> None:
    stream, backup = login(place, raw, "true"), login(place, raw, "true")
    lsn = position(place, stream)
    stream.send(query(f"START_REPLICATION PHYSICAL {lsn}"))
    assert stream.receive().type == "W"
    backup.send(query("BASE_BACKUP ( CHECKPOINT 'fast' )"))
    while backup.receive().type != "d":
        pass
    with ThreadPoolExecutor(2) as threads:
        reading = threads.submit(backup.until_ready)  # they may be on two workers, which drain in turn
        rolling = threads.submit(
            place.fleet.fleet.command, "fleet", "restart", "--rolling", "--timeout", "40s")
        while (said := stream.receive()).type != "E":
            assert said.type == "d"
        assert said.error().sqlstate == "57P01", said.error()
        assert sum(said.type == "d" for said in reading.result(60)) > 10
        assert rolling.result(60).returncode == 0
    wait_until(place.is_quiet, "all permits are back", 10)


def test_the_permits_of_killed_workers_are_proven_free(place: Place, raw: OpenRaw) -> None:
    clients = [login(place, raw, kind) for kind in ("true", "database")]
    assert len(place.held()) == len(clients)
    for index in place.fleet.fleet.worker_pids():
        place.fleet.kill_worker(index)
    for client in clients:
        client.abort()
    wait_until(place.fleet.fleet.is_ready, "new workers serve", 30)
    wait_until(place.is_quiet, "what they held was proven gone", 30)
    assert login(place, raw, "true").query("IDENTIFY_SYSTEM")
