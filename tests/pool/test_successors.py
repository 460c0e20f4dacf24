"""Sessions in use near their end get successors, few at a time; a server's restart ends them all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pooler.errors import NoPermit
from pooler.pool import growth
from pooler.pool.ledger_view import LedgerView
from pooler.pool.opener import OpenPlan, OpenSession
from pooler.pool.pressure import SUCCESSORS_MAX
from pooler.relay.server import ServerConn
from tests.pool.running import Running, running
from tests.pool.test_growth import Clients, Gate, hold, prepared

LIFETIME = 3600.0
IN_USE, SIZE = 19, 20
DB = "db/write"


class Ledger:
    """As much of the permits as is asked here."""

    def __init__(self, total: int, held: int) -> None:
        self.ledgers = {DB: LedgerView(DB, policy={"serverSessionPermits": total})}
        self._held = held

    def held(self, db: str) -> int:
        assert db == DB
        return self._held


@asynccontextmanager
async def busy(monkeypatch: pytest.MonkeyPatch, total: int = 100) -> AsyncIterator[tuple[Running, Clients]]:
    """A pool with one idle session, and the others in use and near their end."""
    async with running(monkeypatch, size=SIZE) as run, trio.open_nursery() as nursery:
        clients = Clients(run)
        prepared(run, monkeypatch, Gate(free=100), connect_seconds=0.001)
        run.pool.plan = replace(run.pool.plan, server_lifetime_seconds=LIFETIME, size_max=SIZE)
        await hold(run, nursery, clients, IN_USE + 1)
        clients.done[1000].set()
        await wait_all_tasks_blocked()
        monkeypatch.setattr(run.pool.parts, "permits", Ledger(total, SIZE))
        for server in run.pool.core.active:
            grow_old(server)
        yield run, clients
        await wait_all_tasks_blocked()
        monkeypatch.undo()
        clients.leave()


def grow_old(server: ServerConn, share: float = 0.96) -> None:
    server.connected_at = trio.current_time() - share * LIFETIME
    server.expires_at = server.connected_at + LIFETIME


async def test_three_at_a_time_get_successors_and_go_as_they_fall_idle(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with busy(monkeypatch) as (run, _):
        core, before = run.pool.core, set(run.pool.core.active)
        run.pool.successors.look(trio.current_time())
        assert (run.pool.successors.making, core.opening) == (SUCCESSORS_MAX, SUCCESSORS_MAX)
        run.pool.successors.look(trio.current_time())
        assert run.pool.successors.making == SUCCESSORS_MAX
        await trio.sleep(1)  # noqa: TID251 - on a clock that jumps
        going = [each for each in before if not core.usable(each, trio.current_time())]
        assert (len(going), len(core.idle), core.opening) == (SUCCESSORS_MAX, 1 + SUCCESSORS_MAX, 0)
        run.pool.apply_settings(run.pool.plan)  # as at each login: what overlaps is no excess
        assert (core.shed, len(core.idle)) == (0, 1 + SUCCESSORS_MAX)
        run.pool.successors.look(trio.current_time())
        assert run.pool.successors.making == 0, "those of now are to go first"
        assert run.pool.successors.overlap() == SUCCESSORS_MAX


@pytest.mark.parametrize("why", [
    "young", "nobody has them", "last permits", "short lives", "waiting", "pausing"])
async def test_none_is_made_for_the_young_the_unused_from_the_last_permits_or_under_pressure(
    why: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with busy(monkeypatch, SIZE + 1 if why == "last permits" else 100) as (run, _):
        now, kept = trio.current_time(), {}
        for server in run.pool.core.active:
            kept[server] = server.client
            if why == "young":
                grow_old(server, 0.94)
            if why == "nobody has them":
                server.client = None
        if why == "short lives":
            run.pool.plan = replace(run.pool.plan, server_lifetime_seconds=59.0)
        if why == "pausing":
            run.pool.growth._retry_at = now + 1
        if why == "waiting":
            monkeypatch.setattr(type(run.pool.core), "count_servable", lambda _: 1)
        run.pool.successors.look(now)
        assert (run.pool.successors.making, run.pool.core.opening) == (0, 0)
        for server, client in kept.items():
            server.client = client


async def test_one_that_cannot_be_had_at_once_is_given_up_and_the_old_session_goes_on(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    asked: list[OpenPlan] = []

    async def none_left(_: Any, plan: OpenPlan) -> OpenSession:
        await trio.lowlevel.checkpoint()
        asked.append(plan)
        raise NoPermit("all are in use", "full")

    async with busy(monkeypatch) as (run, _):
        monkeypatch.setattr(growth, "open_session", none_left)
        run.pool.successors.look(trio.current_time())
        await wait_all_tasks_blocked()
        assert {(each.wait_seconds, each.seats) for each in asked} == {(0.0, SIZE + SUCCESSORS_MAX)}
        core = run.pool.core
        assert (run.pool.successors.making, core.opening, len(core.active)) == (0, 0, IN_USE)
        assert all(core.usable(each, trio.current_time()) for each in core.active)
        assert run.pool.last_error is None


# ---- a server's restart


@asynccontextmanager
async def idle(monkeypatch: pytest.MonkeyPatch, count: int) -> AsyncIterator[Running]:
    async with running(monkeypatch, size=SIZE) as run, trio.open_nursery() as nursery:
        clients = Clients(run)
        prepared(run, monkeypatch, Gate(), connect_seconds=0.001)
        await hold(run, nursery, clients, count)
        clients.leave()
        await wait_all_tasks_blocked()
        assert len(run.pool.core.idle) == count
        yield run


def end(run: Running, fatal: bytes = b"", *, orderly: bool = True) -> None:
    server = run.pool.core.idle[0]
    server.fatal = fatal
    server.lost(orderly=orderly)


TERMINATED = b"E\0\0\0\0SFATAL\0VFATAL\0C57P01\0Mterminating connection\0\0"


async def test_one_that_is_ended_by_an_administrator_is_one(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with idle(monkeypatch, 5) as run:
        end(run, TERMINATED)
        await trio.sleep(1.5)  # noqa: TID251 - on a clock that jumps
        end(run, TERMINATED)
        assert (run.pool.core.generation, len(run.pool.core.idle)) == (0, 3)


@pytest.mark.parametrize("fatal", [b"", TERMINATED, TERMINATED.replace(b"57P01", b"57P02")])
async def test_two_within_a_second_are_the_servers_end_and_all_that_was_opened_goes_once(
    fatal: bytes, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with idle(monkeypatch, 5) as run:
        end(run, fatal)
        end(run, fatal)
        assert (run.pool.core.generation, len(run.pool.core.idle)) == (1, 0)
        await run.check_whole()
        assert run.pool.core.generation == 1


@pytest.mark.parametrize(("fatal", "orderly"), [
    (b"", False), (TERMINATED.replace(b"57P01", b"57P05"), True)])
async def test_broken_connections_and_time_outs_of_sessions_are_no_restart(
    fatal: bytes, orderly: bool, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with idle(monkeypatch, 5) as run:
        for _ in range(4):
            end(run, fatal, orderly=orderly)
        assert (run.pool.core.generation, len(run.pool.core.idle)) == (0, 1)
