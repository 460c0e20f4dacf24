"""Looks at real servers of both versions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import psycopg
import pytest
import trio

from coordinator.ledger.proofs import Awaiting, Look, Proven, proof_of_absence
from coordinator.ledger.record import Backend, Kind, Session
from coordinator.ledger.states import Proof, SessionState
from coordinator.looks import Door, Looker, LookFailed
from coordinator.spec import Monitor
from tests.coordinator.parts import open_session
from tests.support.postgres import Database, MakeServer, make_database

pytestmark = pytest.mark.postgres
TAG = "abcd1234"


@asynccontextmanager
async def looking(database: Database, user: str = "", password: str = "") -> AsyncIterator[Looker]:
    monitor = Monitor(user or database.monitor, password or database.monitor_password)
    looker = Looker(lambda _: Door(monitor, database.dbname, f"pooler:{TAG}:reaper"))
    try:
        yield looker
    finally:
        await looker.close()


def permit(database: Database, pid: int, start_us: int, backend: Backend) -> Session:
    return Session(
        kind=Kind.MAIN, slot=0, generation=5, state=SessionState.UNKNOWN, owner="w", host="h",
        dbname=database.dbname, user=database.user, seat=0, request_id="r", epoch=1, policy_generation=1,
        backend=backend, pid=pid, backend_start_us=start_us)


async def test_a_session_is_shown_with_its_start_and_is_absent_once_it_ended(postgres: Database) -> None:
    connection, pid, start_us, _ = open_session(postgres.dsn(), "mine")
    async with looking(postgres) as looker:
        look = await looker.look(postgres.address)
        assert (look.void, look.is_local) == (None, True)
        assert look.backend.system_identifier
        (found,) = [row for row in look.rows if row.pid == pid]
        assert (found.backend_start_us, found.application_name, found.is_client) == (start_us, "mine", True)
        held = permit(postgres, pid, start_us, look.backend)
        assert isinstance(proof_of_absence(held, look, ledger_tag=TAG), Awaiting)
        connection.close()
        with trio.fail_after(10):
            while isinstance(verdict := proof_of_absence(held, look, ledger_tag=TAG), Awaiting):
                look = await looker.look(postgres.address)
        assert verdict.proof is Proof.ABSENT


async def test_looks_share_one_connection_unless_a_fresh_one_is_asked_for(postgres: Database) -> None:
    async with looking(postgres) as looker:
        first, second = await looker.look(postgres.address), await looker.look(postgres.address)
        assert first.connection == second.connection
        third = await looker.look(postgres.address, fresh=True)
        assert third.connection != first.connection
        assert not [row for row in third.rows if row.application_name == f"pooler:{TAG}:reaper"]


async def test_a_role_without_the_grant_sees_only_void_looks(postgres: Database) -> None:
    with psycopg.connect(postgres.dsn(), autocommit=True):
        async with looking(postgres, postgres.user, postgres.password) as looker:
            look = await looker.look(postgres.address)
            assert look.void is not None
            assert "GRANT" in look.void


async def test_terminate_ends_exactly_that_session(postgres: Database) -> None:
    connection, pid, start_us, _ = open_session(postgres.dsn(), "victim")
    async with looking(postgres) as looker:
        assert not await looker.terminate(postgres.address, pid, start_us + 1)
        assert connection.execute("SELECT 1").fetchone() == (1,)
    connection.close()


async def test_a_backend_that_waits_in_its_start_up_is_shown_without_a_name(postgres: Database) -> None:
    """It has no birth tag yet, but pg_locks, or a row in state starting, shows that there is somebody."""
    postgres.server.create_database("renamed", postgres.user)
    with psycopg.connect(postgres.server.dsn(), autocommit=True) as admin:
        admin.execute("BEGIN")
        admin.execute("ALTER DATABASE renamed RENAME TO other")  # whoever connects to it waits
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_connect_in_thread, postgres.server.dsn(
                postgres.user, "renamed", password=postgres.password, application_name=f"pooler:{TAG}:m0.5"))
            with trio.fail_after(10):
                while not (look := await _look(postgres)).anonymous:
                    pass
            (starting,) = look.anonymous
            held = replace(permit(postgres, 0, 0, look.backend), abandoned=True)
            first = replace(look, at_us=0, connection=0)
            verdict = proof_of_absence(held, replace(look, at_us=10**12), ledger_tag=TAG, first=first)
            assert isinstance(verdict, Awaiting)
            assert str(starting) in verdict.reason
            admin.execute("ROLLBACK")
    postgres.server.execute("DROP DATABASE renamed")


async def _look(database: Database) -> Look:
    monitor = Monitor(database.monitor, database.monitor_password)
    looker = Looker(lambda _: Door(monitor, "postgres", f"pooler:{TAG}:reaper"))
    try:
        return await looker.look(database.address)
    finally:
        await looker.close()


async def _connect_in_thread(dsn: str) -> None:
    def connect() -> None:
        psycopg.connect(dsn).close()

    await trio.to_thread.run_sync(connect)


async def test_a_restart_is_seen_over_a_new_connection_and_frees_what_was_there(
    make_server: MakeServer,
) -> None:
    server = make_server()
    database = make_database(server)
    async with looking(database) as looker:
        before = await looker.look(database.address)
        server.stop(immediate=True)
        with pytest.raises(LookFailed):
            await looker.look(database.address)
        server.start()
        after = await looker.look(database.address)
        assert after.backend.postmaster_start_us > before.backend.postmaster_start_us
        held = permit(database, 1, before.backend.postmaster_start_us, before.backend)
        verdict = proof_of_absence(held, after, ledger_tag=TAG)
        assert isinstance(verdict, Proven)
        assert verdict.proof is Proof.RESTARTED


@pytest.mark.parametrize("address", ["127.0.0.1:1", "/nowhere:5432", "no.such.host.invalid:5432"])
async def test_what_cannot_be_reached_is_one_line_without_the_password(address: str) -> None:
    looker = Looker(lambda _: Door(Monitor("m", "hunter2"), "d", "x"))
    with pytest.raises(LookFailed) as failed:
        await looker.look(address)
    assert address in str(failed.value)
    assert "\n" not in str(failed.value)
    assert "hunter2" not in str(failed.value) + repr(Monitor("m", "hunter2"))


async def test_a_cancelled_look_leaves_no_connection_behind(postgres: Database) -> None:
    async with looking(postgres) as looker:
        for _ in range(3):
            with trio.move_on_after(0.001):
                await looker.look(postgres.address, fresh=True)
        with trio.fail_after(10):
            while True:
                look = await looker.look(postgres.address)
                if not [row for row in look.rows if row.application_name == f"pooler:{TAG}:reaper"]:
                    break
