"""The coordinator process with a real etcd and a real PostgreSQL."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trio

from coordinator.ledger.record import Kind, Permit
from coordinator.link import LinkRefused
from coordinator.link_values import parse_permit
from coordinator.remembered import FILE_NAME
from pooler.demo.etcd import Etcd
from tests.coordinator.parts import (
    DB,
    Worker,
    coordinator,
    log_events,
    make_spec,
    open_session,
    policy_text,
    serves,
    until_logged,
)
from tests.support.etcd import MakeEtcd
from tests.support.postgres import Database, MakeServer, make_database

pytestmark = [pytest.mark.etcd, pytest.mark.postgres]


@pytest.fixture
def spec(tmp_path: Path, etcd: Etcd, etcd_prefix: str, postgres_newest: Database) -> dict[str, Any]:
    database = postgres_newest
    return make_spec(
        tmp_path, hosts=[database.address], endpoints=list(etcd.endpoints), prefix=etcd_prefix,
        dbname=database.dbname, monitor={"user": database.monitor, "password": database.monitor_password})


async def open_under(worker: Worker, granted: dict[str, Any], database: Database) -> psycopg.Connection[Any]:
    """A real session under a granted permit, recorded as OPEN."""
    permit = granted["permit"]
    tag = Permit(Kind(permit[0]), *permit[1:]).birth_tag(granted["tag"])
    connection, pid, start_us, backend = open_session(database.dsn(), tag)
    await worker.call("open", db=DB, permit=permit, pid=pid, backend_start_us=start_us, backend=backend)
    return connection


async def test_a_worker_registers_reserves_opens_and_releases(
    spec: dict[str, Any], postgres_newest: Database
) -> None:
    async with coordinator(spec) as supervisor:
        await supervisor.serving()
        assert stat.S_IMODE(os.stat(supervisor.socket_path).st_mode) == 0o600
        async with Worker().at(supervisor.socket_path) as worker:
            assert (await worker.call("heartbeat"))["alive"]
            ledger = worker.ledgers[DB]
            assert (ledger["state"], ledger["epoch"]["number"]) == ("ACTIVE", 1)
            granted = await worker.reserve()
            permit = granted["permit"]
            assert granted["address"] == postgres_newest.address
            connection = await open_under(worker, granted, postgres_newest)
            await worker.call("closing", db=DB, permit=permit)
            connection.close()
            assert await worker.release(permit, "eof")
            assert not await worker.release(permit, "eof")


async def test_a_reload_that_names_another_database_goes_on_over_the_same_etcd(
    postgres_newest: Database, tmp_path: Path
) -> None:
    spec = make_spec(tmp_path, hosts=[postgres_newest.address], dbname=postgres_newest.dbname)
    with socket.create_server(("127.0.0.1", 0)) as http:
        spec["http_fd"] = http.fileno()
        async with coordinator(spec) as supervisor:
            await supervisor.serving()
            async with Worker().at(supervisor.socket_path) as worker:
                granted = await worker.reserve()
            late = "late/write"
            spec["databases"] = [*spec["databases"], {
                **spec["databases"][0], "db": late, "name": "late", "policy": policy_text(db=late)}]
            await supervisor.link.call("reload")
            async with Worker(worker.boot_id, permits=worker.permits).at(supervisor.socket_path) as again:
                await again.until(lambda w: serves(w.ledgers.get(late)))
                assert await again.release(granted["permit"], "eof")
                await again.reserve(10.0, db=late)
            async with await trio.open_tcp_stream(*http.getsockname()) as health:
                await health.send_all(b"GET /healthz HTTP/1.0\r\n\r\n")
                assert b" 200 " in await health.receive_some(100)
        assert len([each for each in log_events(tmp_path) if each["event"] == "etcd_started"]) == 1


async def test_a_full_ledger_refuses_and_a_waiter_gets_what_is_freed(spec: dict[str, Any]) -> None:
    async with coordinator(spec) as supervisor:
        await supervisor.serving()
        async with Worker().at(supervisor.socket_path) as worker:
            granted = [await worker.reserve() for _ in range(4)]
            with pytest.raises(LinkRefused) as refused:
                await worker.reserve()
            assert refused.value.code == "full"
            async with trio.open_nursery() as nursery:
                nursery.start_soon(worker.reserve, 20.0)
                assert await worker.release(granted[0]["permit"])


async def test_a_dead_workers_session_is_freed_only_when_its_backend_is_gone(
    spec: dict[str, Any], postgres_newest: Database, tmp_path: Path
) -> None:
    async with coordinator(spec) as supervisor:
        await supervisor.serving()
        async with Worker().at(supervisor.socket_path) as worker:
            granted = await worker.reserve()
            connection = await open_under(worker, granted, postgres_newest)
        # the link is gone: that is no death
        kind, slot, generation = granted["permit"]
        permit = f"{kind}/{slot}.{generation}"
        async with Worker().at(supervisor.socket_path) as other:
            rows = (await other.call("ledger_rows"))["rows"]
            assert [row["state"] for row in rows] == ["OPEN"]
            await supervisor.link.call("worker_exited", boot_id=worker.boot_id, how="signal 9", at_us=1)
            await until_logged(tmp_path, "session_permit_unknown", permit=permit)
            rows = (await other.call("ledger_rows"))["rows"]
            assert [row["state"] for row in rows] == ["SESSION_UNKNOWN"]  # its backend lives
            connection.close()
            released = await until_logged(tmp_path, "session_permit_released", permit=permit)
            assert (released["proof"], released["observer"]) == ("absent", "host-a")
            assert (await other.call("ledger_rows"))["rows"] == []
            await until_logged(tmp_path, "worker_forgotten", worker=worker.boot_id)


async def test_a_permit_that_never_got_a_session_is_freed_as_never_born(
    etcd: Etcd, etcd_prefix: str, make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server(settings={"authentication_timeout": "1s"})
    database = make_database(server)
    spec = make_spec(
        tmp_path, hosts=[database.address], endpoints=list(etcd.endpoints), prefix=etcd_prefix,
        monitor={"user": database.monitor, "password": database.monitor_password})
    async with coordinator(spec) as supervisor:
        await supervisor.serving()
        async with Worker().at(supervisor.socket_path) as worker:
            await worker.reserve()
        await supervisor.link.call("worker_exited", boot_id=worker.boot_id, how="signal 9", at_us=1)
        released = await until_logged(tmp_path, "session_permit_released", owner=worker.boot_id)
        assert released["proof"] == "never_born"
        assert released["unknown_seconds"] >= 2.0


async def test_a_lease_outlives_the_coordinator_and_what_a_worker_does_not_list_is_given_back(
    spec: dict[str, Any]
) -> None:
    async with coordinator(spec) as supervisor:
        await supervisor.serving()
        worker = Worker()
        async with worker.at(supervisor.socket_path):
            kept, dropped = await worker.reserve(), await worker.reserve()
            ordinal = (await worker.hello())["ordinal"]
    del worker.permits[DB, parse_permit(dropped["permit"])]
    async with coordinator(spec) as supervisor:
        await supervisor.serving()
        async with worker.at(supervisor.socket_path):
            assert (await worker.hello())["ordinal"] == ordinal
            rows = (await worker.call("ledger_rows"))["rows"]
            assert [row["slot"] for row in rows] == [kept["permit"][1]]
            worker.permits[DB, parse_permit(dropped["permit"])] = "OPEN"
            assert (await worker.hello())["gone"] == [[DB, dropped["permit"]]]


async def test_while_etcd_is_away_workers_are_served_and_growth_resumes_by_itself(
    make_etcd: MakeEtcd, postgres_newest: Database, tmp_path: Path
) -> None:
    own = make_etcd()
    database = postgres_newest
    spec = make_spec(
        tmp_path, hosts=[database.address], endpoints=list(own.endpoints), ttl_seconds=1.0,
        monitor={"user": database.monitor, "password": database.monitor_password})
    async with coordinator(spec) as supervisor:
        await supervisor.serving()
        async with Worker().at(supervisor.socket_path) as worker:
            first = await worker.reserve()
            own.kill()
            await worker.until(lambda w: not w.ledgers[DB]["reachable"])
            with pytest.raises(LinkRefused) as refused:
                await worker.reserve(wait_seconds=0.5)
            assert refused.value.code == "ledger_unavailable"
            assert not (await worker.call("heartbeat"))["alive"]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(worker.reserve, 25.0)  # waits, and gets its permit once etcd is back
                own.start()  # here: it ends with the thread that started it
            await worker.until(lambda w: bool(w.ledgers[DB]["reachable"]))
            with trio.fail_after(20):
                while (await worker.hello())["registered"] is not True:
                    await worker.news.wait()
            assert await worker.release(first["permit"])


async def test_an_unreachable_etcd_at_start_is_one_line_and_no_reason_to_fall(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, hosts=["127.0.0.1:1"], endpoints=["127.0.0.1:1"])
    async with coordinator(spec) as supervisor:
        await supervisor.serving()
        worker = Worker()
        async with worker.linked(await trio.open_unix_socket(supervisor.socket_path)):
            with pytest.raises(LinkRefused) as refused:
                await worker.hello()
            assert refused.value.code == "ledger_unavailable"
        await until_logged(tmp_path, "ledger_unreachable")
        lines = [line for line in log_events(tmp_path) if line["event"] == "ledger_unreachable"]
        assert len(lines) == 1


async def test_an_embedded_etcd_keeps_its_data_and_ends_with_its_coordinator(
    postgres_newest: Database, tmp_path: Path
) -> None:
    database = postgres_newest
    spec = make_spec(tmp_path, hosts=[database.address],
                     monitor={"user": database.monitor, "password": database.monitor_password})
    async with coordinator(spec) as supervisor:
        await supervisor.serving()
        async with Worker().at(supervisor.socket_path) as worker:
            tag = worker.ledgers[DB]["tag"]
        started = await until_logged(tmp_path, "etcd_started")
        supervisor.process.kill()
        await trio.to_thread.run_sync(supervisor.process.wait)
        with trio.fail_after(10), suppress(ProcessLookupError):
            pidfd = os.pidfd_open(started["pid"])
            await trio.lowlevel.wait_readable(pidfd)
            os.close(pidfd)
    spec["databases"][0]["policy"] = policy_text(9)
    async with coordinator(spec) as supervisor:
        await supervisor.serving()
        async with Worker().at(supervisor.socket_path) as worker:
            assert worker.ledgers[DB]["tag"] == tag
            assert worker.ledgers[DB]["policy"]["serverSessionPermits"] == 4
        await until_logged(tmp_path, "policy_differs", database=DB)


async def test_its_pages_show_health_readiness_metrics_and_the_ledger(spec: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        async with coordinator(spec | {"http_fd": listening.fileno()}) as supervisor:
            await supervisor.serving()
            async with Worker().at(supervisor.socket_path) as worker:
                await worker.reserve()
                assert await get(port, "/healthz") == (200, "alive\n")
                status, ready = await get(port, "/readyz")
                assert (status, ready.splitlines()[0]) == (200, "ready")
                assert "fsync p99" in ready
                _, metrics = await get(port, "/metrics")
                state = f'{{database="{DB}",kind="main",state="SESSION_RESERVED"}}'
                assert f"pooler_session_permits{state} 1.0" in metrics
                assert "pooler_coordinator_leader 1.0" in metrics
                assert "pooler_etcd_requests_total{kind=" in metrics
                assert "pooler_etcd_quota_bytes{member=" in metrics
                _, ledger = await get(port, "/api/ledger")
                shown = json.loads(ledger)
                assert shown["ledgers"][0]["line"] == "4 slots: 1 reserved, 3 free; reserve 0/0; epoch 1"
                assert shown["sessions"][0]["owner"] == worker.boot_id


async def test_the_token_is_asked_of_all_its_pages_but_the_health_pages(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, hosts=["127.0.0.1:1"], endpoints=["127.0.0.1:1"]) | {"http_token": "s3cret-ü"}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        async with coordinator(spec | {"http_fd": listening.fileno()}) as supervisor:
            await supervisor.serving()
            assert await get(port, "/healthz") == (200, "alive\n")
            assert (await get(port, "/readyz"))[0] == 503  # without a token, and with the reason
            for path in ("/metrics", "/api/ledger"):
                for words in ("", "Bearer", "Bearer wrong", "Basic s3cret"):
                    status, body = await get(port, path, words)
                    assert (status, body) == (401, "a bearer token is needed\n")
                assert (await get(port, path, "bearer s3cret-ü"))[0] != 401
    assert "s3cret" not in (tmp_path / "coordinator.log").read_text()


async def get(port: int, path: str, authorization: str = "") -> tuple[int, str]:
    """(status, body)."""
    words = f"Authorization: {authorization}\r\n" if authorization else ""
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{words}\r\n"
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(request.encode())
        answer = b""
        async for part in stream:
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


async def test_a_policy_for_which_the_real_server_has_no_room_is_not_published(
    spec: dict[str, Any], tmp_path: Path, postgres_newest: Database
) -> None:
    with psycopg.connect(postgres_newest.dsn()) as connection:
        settings: dict[str, int] = dict(connection.execute(
            "SELECT name, setting::int FROM pg_settings"
            " WHERE name IN ('max_connections', 'superuser_reserved_connections', 'reserved_connections')"
        ).fetchall())
    most = settings.pop("max_connections")
    reserved = sum(settings.values())
    room = most - reserved
    spec["databases"][0]["policy"] = policy_text(room)  # and an admin reserve of 1
    async with coordinator(spec) as supervisor:
        await supervisor.serving()
        said = await until_logged(tmp_path, "policy_refused", database=DB)
        assert f"has room for {room} sessions (max_connections {most}, {reserved} of them" in said["why"]
        assert f"{DB} {room + 1} sessions" in said["why"]


async def test_it_stops_on_the_supervisors_word_and_on_sigterm(spec: dict[str, Any]) -> None:
    for stop in ("call", "signal"):
        async with coordinator(spec) as supervisor:
            await supervisor.serving()
            if stop == "call":
                assert await supervisor.link.call("stop") == {}
            else:
                supervisor.process.send_signal(signal.SIGINT)  # a terminal's: not for us
                assert (await supervisor.link.call("status"))["workers"] == 0
                supervisor.process.terminate()
            with trio.fail_after(10):
                assert await trio.to_thread.run_sync(supervisor.process.wait) == 0


async def test_a_specification_that_cannot_be_used_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, hosts=["127.0.0.1:1"], endpoints=["127.0.0.1:1"])
    del spec["lease_ttl_seconds"]
    async with coordinator(spec) as supervisor:
        with trio.fail_after(10):
            assert await trio.to_thread.run_sync(supervisor.process.wait) == 2
    assert "lacks 'lease_ttl_seconds'" in log_events(tmp_path)[-1]["why"]


@pytest.mark.parametrize("embedded", [True, False])
async def test_a_broken_memory_of_the_ledgers_is_one_line_and_exit_code_2(
    tmp_path: Path, embedded: bool
) -> None:
    (tmp_path / FILE_NAME).write_text('{"shop/wr')
    spec = make_spec(tmp_path, hosts=["127.0.0.1:1"], endpoints=None if embedded else ["127.0.0.1:1"])
    async with coordinator(spec) as supervisor:
        with trio.fail_after(10):
            assert await trio.to_thread.run_sync(supervisor.process.wait) == 2
    assert f"{tmp_path / FILE_NAME} cannot be read" in log_events(tmp_path)[-1]["why"]
    assert "Traceback" not in (tmp_path / "coordinator.log").read_text()


def two_hosts(
    tmp_path: Path, etcd: Etcd, prefix: str, database: Database, **spec: Any
) -> list[dict[str, Any]]:
    """The specifications of two hosts of one fleet."""
    made = []
    for host in ("host-a", "host-b"):
        (tmp_path / host).mkdir()
        one = make_spec(
            tmp_path / host, hosts=[database.address], endpoints=list(etcd.endpoints), prefix=prefix,
            monitor={"user": database.monitor, "password": database.monitor_password}, **spec)
        made.append(one | {"host": host})
    return made


async def test_when_the_leader_dies_another_hosts_coordinator_leads_and_frees(
    etcd: Etcd, etcd_prefix: str, postgres_newest: Database, tmp_path: Path
) -> None:
    a, b = two_hosts(tmp_path, etcd, etcd_prefix, postgres_newest, ttl_seconds=1.0)
    async with coordinator(a) as first:
        await first.serving()
        await until_logged(tmp_path / "host-a", "leader_elected")
        async with coordinator(b) as second:
            await second.serving()
            async with Worker().at(second.socket_path) as stays, Worker().at(first.socket_path) as worker:
                assert stays.ledgers[DB]["tag"] == worker.ledgers[DB]["tag"]
                connection = await open_under(worker, await worker.reserve(), postgres_newest)
                first.process.kill()  # its worker's lease is kept alive by nobody now
                await trio.to_thread.run_sync(first.process.wait)
                await until_logged(tmp_path / "host-b", "session_permit_unknown", owner=worker.boot_id)
                connection.close()
                released = await until_logged(tmp_path / "host-b", "session_permit_released")
                assert (released["proof"], released["observer"]) == ("absent", "host-b")


async def test_a_waiter_gets_what_another_hosts_worker_gives_back(
    etcd: Etcd, etcd_prefix: str, postgres_newest: Database, tmp_path: Path
) -> None:
    a, b = two_hosts(tmp_path, etcd, etcd_prefix, postgres_newest, slots=1)
    async with coordinator(a) as first, coordinator(b) as second:
        await first.serving()
        await second.serving()
        async with Worker().at(first.socket_path) as here, Worker().at(second.socket_path) as there:
            held = await here.reserve()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(there.reserve, 20.0)
                assert await here.release(held["permit"])
            assert len(there.permits) == 1
