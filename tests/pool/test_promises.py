"""The session that a client of session pooling is told of: its own, if nobody had to have it meanwhile."""

from __future__ import annotations

from time import monotonic
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pooler.admission.ticket import Ticket
from pooler.errors import NoPermit
from pooler.net.dial import DialFailed, Outcome
from pooler.pool import growth
from pooler.pool.promises import WAIT_SECONDS_MAX
from pooler.relay.server import ServerConn
from tests.pool.cancelling import run_cancelled
from tests.pool.running import Running, running


def in_session_pooling(run: Running) -> Running:
    run.pool.holds_session = True
    return run


def ticket() -> Ticket:
    made = Ticket(lambda session: None, lambda error: None)
    made.start(0.0, 1e9)
    return made


async def told(run: Running) -> ServerConn:
    session = await run.pool.promises.session()
    assert session is not None
    return session


async def test_each_client_is_told_of_a_session_of_its_own_and_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(monkeypatch, size=3) as run:
        in_session_pooling(run)
        sessions = [await told(run) for _ in range(3)]
        assert len(set(sessions)) == 3
        for session in (sessions[1], sessions[0], sessions[2]):
            asks = ticket()
            asks.promised = session
            assert run.pool.request(asks) is session


async def test_in_transaction_pooling_nobody_is_told_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as run:
        assert await run.pool.promises.session() is None
        assert run.minis == []


async def test_where_the_pool_is_full_a_login_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with running(monkeypatch, size=1) as run:
        in_session_pooling(run)
        await told(run)
        assert await run.pool.promises.session() is None
        assert trio.current_time() == 0
        assert len(run.minis) == 1


async def test_who_asks_gets_the_session_of_a_client_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, size=2) as run:
        in_session_pooling(run)
        first, second = await told(run), await told(run)
        assert {run.pool.request(ticket()), run.pool.request(ticket())} == {first, second}
        late = ticket()
        late.promised = first
        assert run.pool.request(late) is None, "it waits as everybody does"


async def test_a_session_that_came_back_meanwhile_is_given_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(monkeypatch, size=2) as run:
        in_session_pooling(run)
        first, _ = await told(run), await told(run)
        late = ticket()
        late.promised = first
        for _ in range(2):
            async with run.pool.checkout() as other:
                await other.query("select 1")
        await wait_all_tasks_blocked()
        assert run.pool.request(late) is first


async def test_one_that_ended_meanwhile_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, size=2) as run:
        in_session_pooling(run)
        late = ticket()
        late.promised = first = await told(run)
        second = await told(run)
        run.pool.retire(first, "test")
        assert run.pool.request(late) is second
        assert late.promised is None


async def test_sessions_that_nobody_was_told_of_are_shed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, size=2) as run:
        in_session_pooling(run)
        first, second = await told(run), await told(run)
        run.pool.core.break_promise(second)
        assert run.pool.close_idle("test", 1) == 1
        assert run.pool.core.idle == [first]


async def test_only_what_nobody_needs_is_spared_for_another_worker(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with running(monkeypatch, size=2) as run:
        in_session_pooling(run)
        promised, unused = await told(run), await told(run)
        run.pool.core.break_promise(unused)
        assert run.pool.spare(2) == 0, "it was needed a moment ago"
        for each in run.pool.core.idle:
            each.idle_since -= 1
        assert run.pool.spare(2) == 1
        assert run.pool.core.idle == [promised]


async def test_many_logins_at_once_open_no_more_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(monkeypatch, size=4) as run:
        in_session_pooling(run)
        found: list[ServerConn | None] = []

        async def login() -> None:
            found.append(await run.pool.promises.session())

        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(login)
        assert len({session for session in found if session is not None}) == 4
        assert found.count(None) == 46
        assert len(run.minis) == 4
        assert run.pool.core.logins == 0
        await run.check_whole()


@pytest.mark.parametrize("failure", [
    NoPermit("all permits are taken"), DialFailed(Outcome.ENDED, "the database is starting up")])
async def test_a_login_goes_on_without_where_none_can_be_opened(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, failure: Exception
) -> None:
    asked: list[float] = []

    async def fails(permits: Any, plan: Any) -> Any:
        asked.append(plan.wait_seconds)
        await trio.lowlevel.checkpoint()
        raise failure

    async with running(monkeypatch) as run:
        in_session_pooling(run)
        monkeypatch.setattr(growth, "open_session", fails)
        assert await run.pool.promises.session() is None
        await wait_all_tasks_blocked()
        assert asked == [0.0], "it takes a permit that is free and has nobody give one up"
        assert (run.pool.core.logins, run.pool.core.opening) == (0, 0)
        if isinstance(failure, NoPermit):
            assert run.pool.last_error is None, "who asks for a session asks the ledger anew, at once"


async def test_a_failure_that_is_over_is_no_reason_to_promise_nothing(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Whoever waited then has left, and nothing was opened since."""
    async with running(monkeypatch) as run:
        in_session_pooling(run)
        run.pool.growth.last_error = NoPermit("all permits are taken")
        assert not run.pool.growth.is_pausing(monotonic())
        assert await run.pool.promises.session() is not None


async def test_a_login_waits_so_long_at_most(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async def hangs(permits: Any, plan: Any) -> Any:
        await trio.sleep_forever()

    async with running(monkeypatch) as run:
        in_session_pooling(run)
        monkeypatch.setattr(growth, "open_session", hangs)
        assert await run.pool.promises.session() is None
        assert trio.current_time() == pytest.approx(WAIT_SECONDS_MAX)
        assert run.pool.core.logins == 0


async def test_a_cancel_at_any_step_of_a_login_leaves_nothing_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, fired = 0, True
    while fired:
        async with running(monkeypatch) as run:
            in_session_pooling(run)
            fired, session = await run_cancelled(run.pool.promises.session, steps)
            await wait_all_tasks_blocked()
            assert run.pool.core.logins == 0
            assert [each for each in run.pool.core.idle if each.promised] == ([session] if session else [])
            run.pool.holds_session = False
            await run.check_whole()
        steps += fired
    assert steps >= 1


async def test_a_client_that_leaves_makes_room_for_another_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, size=1) as run:
        in_session_pooling(run)
        client = run.world.client()
        client.conn.ticket.promised = first = await told(run)
        assert await run.pool.promises.session() is None
        client.conn.left()
        assert await run.pool.promises.session() is first
