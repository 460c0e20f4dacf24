"""The worker's end against the coordinator's own parts: one ledger, seen from both sides."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import trio
import trio.testing

from coordinator.ledger.record import Backend, Epoch, EpochState, Permit
from coordinator.ledger.rules import Release
from coordinator.ledger.states import Actor, Proof
from pooler.pool.link_up import Identity
from pooler.pool.opener import OpenPlan, close_session, open_session
from pooler.pool.permits import Permits
from pooler.wire.auth import ServerSecret
from tests.coordinator.stage import DB, TTL_SECONDS, Stage, stage
from tests.ledger.ground import KEYS
from tests.pool.cancelling import run_cancelled
from tests.pool.fake_server import SYSTEM_IDENTIFIER, FakeServer
from tests.pool.world import FakeHolder

STEPS_MAX = 500
BOOT = "boot-1"


@dataclass
class Both:
    """Both ends, and the server."""

    at: Stage
    permits: Permits
    holder: FakeHolder
    server: FakeServer
    plan: OpenPlan
    streams: list[trio.abc.Stream]

    async def cut(self) -> None:
        """Break the link of now."""
        await trio.aclose_forcefully(self.streams[-1])

    async def life(self) -> None:
        """Open a session and close it."""
        session = await open_session(self.permits, self.plan)
        await close_session(self.permits, session, 2.0)


@asynccontextmanager
async def _both(directory: Path) -> AsyncIterator[Both]:
    server, holder = FakeServer(directory), FakeHolder()
    streams: list[trio.abc.Stream] = []
    async with stage(directory) as at:
        backend = Backend(server.address, SYSTEM_IDENTIFIER, 1, 1)
        await at.put(KEYS.epoch(), Epoch(5, EpochState.ACTIVE, backend, 1, "test").encode())
        assert await at.views.refresh()

        async def connect() -> trio.abc.Stream:
            ours, theirs = trio.testing.memory_stream_pair()
            at.nursery.start_soon(at.workers.serve, theirs)
            streams.append(theirs)
            return ours

        permits = Permits(connect, Identity(BOOT, 0, 1, 1), holder)
        plan = OpenPlan(db=DB, dbname="app", user="app", secret=ServerSecret(), seats=10, wait_seconds=2.0,
                        connect_timeout_seconds=4.0)
        at.nursery.start_soon(server.run)
        at.nursery.start_soon(permits.run)
        await permits.registered.wait()
        yield Both(at, permits, holder, server, plan, streams)


async def test_a_life_is_written_into_the_ledger_and_out_of_it(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with _both(tmp_path) as both:
        session = await open_session(both.permits, both.plan)
        (held,) = (await both.at.ledger.snapshot()).sessions
        assert held.session.permit == session.permit
        assert (held.session.state, held.session.pid, held.session.owner) == ("OPEN", session.pid, BOOT)
        assert held.session.backend == session.backend
        assert session.epoch == 5
        assert await close_session(both.permits, session, 2.0) is Proof.EOF
        await both.permits.settled()
        assert await both.at.states() == {}


async def test_cancelled_at_any_step_the_ledger_keeps_only_what_it_can_free(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    reached = 0
    async with _both(tmp_path) as both:
        for steps in range(STEPS_MAX):
            fired, _ = await run_cancelled(both.life, steps)
            await both.permits.settled()
            await both.server.ended()
            for held in (await both.at.ledger.snapshot()).sessions:
                assert held.session.state == "SESSION_UNKNOWN"
                assert held.session.pid or held.session.abandoned
                await both.at.ledger.apply(_freed_by_hand(held.session.permit))
            with trio.move_on_after(TTL_SECONDS + 1):  # until the worker, too, saw those slots gone
                await trio.sleep_forever()
            statistics = both.permits.statistics()
            assert (statistics.held, statistics.permits_gone_total, statistics.requests_open) == ({}, 0, 0)
            if not fired:
                break
            reached += 1
    print(f"cancelled at {reached} steps")  # noqa: T201 - how far it reached is part of the result
    assert 8 <= reached < STEPS_MAX


async def test_after_a_time_without_a_lease_the_session_that_is_held_is_reasserted(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with _both(tmp_path) as both:
        session = await open_session(both.permits, both.plan)
        both.holder.held.add((DB, session.permit))
        both.at.expire(BOOT)
        await both.at.reconcile()
        assert await both.at.states() == {session.permit.slot: "SESSION_UNKNOWN"}
        while both.permits.statistics().reasserted_total == 0:
            with trio.move_on_after(0.5):
                await trio.sleep_forever()
        assert await both.at.states() == {session.permit.slot: "OPEN"}
        assert both.permits.statistics().permits_gone_total == 0
        session.sock.close()


async def test_a_broken_link_costs_no_permit_and_frees_none(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with _both(tmp_path) as both:
        session = await open_session(both.permits, both.plan)
        both.holder.held.add((DB, session.permit))
        both.server.behaviour = "stubborn"
        lost = await open_session(both.permits, both.plan)
        assert await close_session(both.permits, lost, 1.0) is None
        await both.permits.settled()
        before = await both.at.states()
        assert sorted(before.values()) == ["OPEN", "SESSION_UNKNOWN"]
        for _ in range(3):
            await both.cut()
            while both.permits.statistics().links_lost_total < len(both.streams):
                await trio.lowlevel.checkpoint()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(open_and_close, both)
            assert await both.at.states() == before
        assert both.permits.statistics().permits_gone_total == 0
        session.sock.close()


async def open_and_close(both: Both) -> None:
    """A whole life that begins while the link is down."""
    both.server.behaviour = "normal"
    session = await open_session(both.permits, replace(both.plan, wait_seconds=20.0))
    assert await close_session(both.permits, session, 2.0) is Proof.EOF
    await both.permits.settled()


def _freed_by_hand(permit: Permit) -> Release:
    return Release(permit, Proof.ATTESTED, Actor.OPERATOR, observer="test")
