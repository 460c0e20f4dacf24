"""Opening and closing against real servers: what the ledger says is what the server shows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio

from coordinator.ledger.states import Proof, SessionState
from pooler.net.dial import DialFailed
from pooler.pool.link_up import Identity
from pooler.pool.opener import OpenPlan, close_session, open_session, session_ended
from pooler.pool.permits import Permits
from pooler.wire.auth import ServerSecret
from tests.pool.cancelling import run_cancelled
from tests.pool.fake_coordinator import DB, FakeCoordinator, FakeLedger
from tests.pool.world import FakeHolder
from tests.support.postgres import Database

pytestmark = pytest.mark.postgres
STEPS_MAX = 500
LOOK = "SELECT application_name, pid FROM pg_stat_activity WHERE application_name LIKE 'pooler:%'"


@pytest.fixture
def admin(postgres: Database) -> Iterator[Any]:
    with postgres.server.connect() as connection:
        connection.autocommit = True
        yield connection


class Look:
    """The server's own word on which birth tags are alive."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def rows(self) -> dict[str, int]:
        return dict(self._connection.execute(LOOK).fetchall())

    async def none_left(self) -> None:
        with trio.fail_after(10):
            while self.rows():
                await trio.lowlevel.checkpoint()


@asynccontextmanager
async def _fleet(postgres: Database, look: Look) -> AsyncIterator[tuple[Permits, FakeLedger, OpenPlan]]:
    ledger = FakeLedger(postgres.address, lambda tag: tag in look.rows())
    plan = OpenPlan(
        db=DB, dbname=postgres.dbname, user=postgres.user, secret=ServerSecret(postgres.password.encode()),
        seats=10, wait_seconds=1.0, connect_timeout_seconds=10.0)
    async with trio.open_nursery() as nursery:
        coordinator = FakeCoordinator(ledger, nursery)
        permits = Permits(coordinator.connect, Identity("boot-1", 0, 1, 1), FakeHolder())
        await nursery.start(permits.run)
        await permits.registered.wait()
        yield permits, ledger, plan
        nursery.cancel_scope.cancel()


async def test_a_real_session_is_recorded_as_its_server_sees_it(postgres: Database, admin: Any) -> None:
    look = Look(admin)
    async with _fleet(postgres, look) as (permits, ledger, plan):
        session = await open_session(permits, plan)
        slot = ledger.slots[session.permit.slot]
        assert look.rows() == {ledger.tag(session.permit): session.pid}
        assert (slot.state, slot.pid) == (SessionState.OPEN, session.pid)
        started = admin.execute(
            "SELECT (extract(epoch FROM backend_start) * 1000000)::bigint FROM pg_stat_activity"
            " WHERE pid = %s", (session.pid,)).fetchone()[0]
        assert session.backend_start_us == started
        assert session.backend.address == postgres.address
        assert session.backend.system_identifier == str(
            admin.execute("SELECT system_identifier FROM pg_control_system()").fetchone()[0])
        assert session.eof_is_proof
        assert await close_session(permits, session, 5.0) is Proof.EOF
        assert look.rows() == {}
        await permits.settled()
        assert ledger.slots == {}


async def test_a_wrong_password_gives_the_permit_back_with_the_server_s_words(
    postgres: Database, admin: Any
) -> None:
    async with _fleet(postgres, Look(admin)) as (permits, ledger, plan):
        wrong = replace(plan, secret=ServerSecret(b"wrong"))
        with pytest.raises(DialFailed) as caught:
            await open_session(permits, wrong)
        assert caught.value.code == "28P01"
        await permits.settled()
        assert [proof for _, proof in ledger.releases] == [Proof.EOF]


async def test_a_terminated_session_ends_in_order_and_its_permit_is_free(
    postgres: Database, admin: Any
) -> None:
    look = Look(admin)
    async with _fleet(postgres, look) as (permits, ledger, plan):
        session = await open_session(permits, plan)
        admin.execute("SELECT pg_terminate_backend(%s)", (session.pid,))
        while True:
            await trio.lowlevel.wait_readable(session.sock)
            if not session.sock.recv(4096):
                break
        assert await session_ended(permits, session, orderly=True) is Proof.EOF
        await permits.settled()
        assert ledger.slots == {}


async def test_cancelled_at_any_step_no_real_session_is_left_and_no_permit_freed_under_one(
    postgres: Database, admin: Any
) -> None:
    look = Look(admin)
    reached = 0
    outcomes: dict[str, int] = {}
    async with _fleet(postgres, look) as (permits, ledger, plan):

        async def life() -> None:
            session = await open_session(permits, plan)
            await close_session(permits, session, 5.0)

        for steps in range(STEPS_MAX):
            fired, _ = await run_cancelled(life, steps)
            await permits.settled()
            await look.none_left()
            for _, proof in ledger.releases:
                outcomes[str(proof)] = outcomes.get(str(proof), 0) + 1
            for slot in ledger.slots.values():
                assert slot.state is SessionState.UNKNOWN
                assert slot.pid or slot.abandoned
                name = "abandoned" if slot.abandoned else "unknown"
                outcomes[name] = outcomes.get(name, 0) + 1
                permits._hearing.gone(DB, slot.permit)
            ledger.slots.clear()
            ledger.releases.clear()
            assert permits.statistics().held == {}
            if not fired:
                break
            reached += 1
    print(f"cancelled at {reached} steps: {outcomes}")  # noqa: T201 - how far it reached is part of the result
    assert 8 <= reached < STEPS_MAX
    assert outcomes["eof"] > 1
    assert permits.statistics().permits_gone_total == 0


async def test_a_backend_ended_while_it_is_recorded_is_found_out_when_it_is_closed(
    postgres: Database, admin: Any
) -> None:
    look = Look(admin)
    async with _fleet(postgres, look) as (permits, ledger, plan):

        def end_first(args: dict[str, Any]) -> Any:
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                          "WHERE application_name LIKE 'pooler:%'")
            return FakeLedger.open(ledger, args)

        ledger.open = end_first  # type: ignore[method-assign]
        session = await open_session(permits, plan)
        await look.none_left()
        proof = await close_session(permits, session, 5.0)
        await permits.settled()
        assert [slot.state for slot in ledger.slots.values()] == ([] if proof else [SessionState.UNKNOWN])
        assert permits.statistics().released_total + permits.statistics().unknown_total == 1


async def test_over_a_unix_socket_an_end_of_file_is_proof_too(postgres: Database, admin: Any) -> None:
    look = Look(admin)
    async with _fleet(postgres, look) as (permits, ledger, plan):
        ledger.address = f"{postgres.server.directory}:{postgres.port}"
        session = await open_session(permits, replace(plan, user="postgres", dbname="postgres"))
        assert (session.eof_is_proof, session.backend.address) == (True, ledger.address)
        assert await close_session(permits, session, 5.0) is Proof.EOF
        await permits.settled()
        assert ledger.slots == {}
