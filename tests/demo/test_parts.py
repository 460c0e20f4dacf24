"""The real parts the other tests stand on do what their docstrings say."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable

import psycopg
import pytest

from pooler.demo.etcd import Etcd
from pooler.demo.haproxy import plain, service
from pooler.demo.postgres import Limits, Role, Server
from pooler.demo.process import free_ports
from pooler.demo.serverlog import overlap_max, refusals_from_log, sessions_from_log
from tests.support.etcd import MakeEtcd
from tests.support.postgres import VERSIONS, Database, MakeServer
from tests.support.proxies import RunHAProxy, RunPgBouncer
from tests.support.rawclient import OpenRaw, ServerSaid, TrioRawClient


@pytest.mark.postgres
@pytest.mark.parametrize("version", VERSIONS)
def test_an_exact_server_takes_exactly_its_permits_beside_the_others(
    make_server: MakeServer, version: int
) -> None:
    server = make_server(version, limits=Limits.exact(permits=3, others=1))
    server.create_role(Role("app", "secret"))
    with server.connect():
        held = [psycopg.connect(server.dsn("app", password="secret")) for _ in range(3)]
        with pytest.raises(psycopg.OperationalError, match="remaining connection slots are reserved"):
            psycopg.connect(server.dsn("app", password="secret"))
        for connection in held:
            connection.close()
    [refusal] = refusals_from_log(server.log)
    assert refusal.user == "app"
    intervals = [i for i in sessions_from_log(server.log) if i.user == "app"]
    assert len(intervals) == 4
    assert overlap_max(intervals)[0] == 4  # the refused one did ask


@pytest.mark.postgres
def test_a_session_is_an_interval_with_its_startup_application_name(
    make_server: MakeServer,
) -> None:
    server = make_server()
    server.create_role(Role("app", "secret"))
    for number in range(3):
        dsn = server.dsn("app", password="secret", application_name=f"pooler:t:m{number}.7")
        with psycopg.connect(dsn) as connection:
            connection.execute("SET application_name = 'another|name'")
    assert server.child is not None
    server.child.wait_until(  # a backend writes its last line after its client has gone
        lambda: all(i.end is not None for i in sessions_from_log(server.log)), "every session has ended")
    found = [i for i in sessions_from_log(server.log) if i.user == "app"]
    assert [i.application_name for i in found] == [f"pooler:t:m{n}.7" for n in range(3)]
    assert all(i.end is not None and i.end >= i.start and i.database == "postgres" for i in found)


@pytest.mark.postgres
def test_a_standby_follows_and_takes_writes_after_promotion(
    make_server: MakeServer, make_standby: Callable[[Server], Server]
) -> None:
    primary = make_server()
    primary.execute("CREATE TABLE t AS SELECT 1 AS x")
    standby = make_standby(primary)
    assert standby.execute("SELECT pg_is_in_recovery()") == [(True,)]
    primary.stop()
    standby.promote()
    assert standby.execute("INSERT INTO t VALUES (2) RETURNING (SELECT count(*) FROM t)") == [(1,)]


@pytest.mark.postgres
def test_each_login_method_lets_the_raw_client_in(make_server: MakeServer, raw: OpenRaw) -> None:
    server = make_server()
    server.create_role(Role("by_scram", "one"))
    server.create_role(Role("with_md5", "two", ("by_md5",), encryption="md5"))
    server.create_role(Role("with_trust", "three", ("trusted",)))
    for user, password in (("by_scram", "one"), ("with_md5", "two"), ("with_trust", "")):
        client = raw(server.port).login(user, password, "postgres")
        assert client.query("SELECT current_user") == [[user]]
        assert client.session.pid
    with pytest.raises(ServerSaid, match="28P01"):
        raw(server.port).login("by_scram", "wrong", "postgres")


@pytest.mark.postgres
async def test_the_trio_client_reads_rows(postgres_newest: Database) -> None:
    client = await TrioRawClient.connect(postgres_newest.port)
    async with client.stream:
        await client.login(postgres_newest.user, postgres_newest.password, postgres_newest.dbname)
        assert await client.query("SELECT 1, NULL") == [["1", None]]


@pytest.mark.postgres
def test_the_module_database_answers_at_each_version(postgres: Database) -> None:
    with psycopg.connect(postgres.dsn()) as connection:
        assert connection.execute("SELECT current_user::text").fetchone() == (postgres.user,)


@pytest.mark.etcd
def test_the_shared_etcd_counts_requests_itself(etcd: Etcd) -> None:
    assert etcd.requests() >= 0
    assert etcd.members[0].is_healthy()


@pytest.mark.etcd
def test_three_members_outlive_one_and_data_outlives_all(make_etcd: MakeEtcd) -> None:
    own = make_etcd(members=3)
    own.members[0].kill()
    assert own.members[0].child is not None
    assert not own.members[0].child.is_alive()
    own.start()
    assert all(member.is_healthy() for member in own.members)


@pytest.mark.haproxy
@pytest.mark.postgres
def test_haproxy_relays_to_what_it_is_given(
    run_haproxy: RunHAProxy, postgres_newest: Database, raw: OpenRaw
) -> None:
    port = free_ports()
    run_haproxy(plain(service("pg", port, {"one": postgres_newest.port})), [port])
    client = raw(port).login(postgres_newest.user, postgres_newest.password, postgres_newest.dbname)
    assert client.query("SELECT 1") == [["1"]]


@pytest.mark.postgres
def test_pgbouncer_stands_in_front_of_a_database(
    run_pgbouncer: RunPgBouncer, postgres_newest: Database, raw: OpenRaw
) -> None:
    bouncer = run_pgbouncer(postgres_newest)
    client = raw(bouncer.port).login(
        postgres_newest.user, postgres_newest.password, postgres_newest.dbname)
    assert client.query("SELECT 1") == [["1"]]


def test_a_child_ends_with_the_process_that_started_it(tmp_path: os.PathLike[str]) -> None:
    code = (
        "import sys; from pathlib import Path; from pooler.demo.process import Child;"
        f"child = Child(['sleep', '600'], Path({str(tmp_path)!r}) / 'log'); print(child.pid, flush=True);"
        "sys.stdin.read()"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        watched = os.pidfd_open(pid)
        starter.kill()
    ready, _, _ = select.select([watched], [], [], 10)
    os.close(watched)
    assert ready, "the child went on"
