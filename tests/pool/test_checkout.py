"""`async with pool.checkout()`: however and wherever it ends, the session is given back or closed."""

from __future__ import annotations

from dataclasses import replace
from time import monotonic
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pooler.errors import BackendLost, NotServing, WaitEnded
from pooler.net.dial import DialFailed, Outcome
from pooler.pool import growth, janitor, steering
from pooler.pool.opener import OpenSession
from pooler.pool.pool import Pool
from pooler.relay.task import QueryFailed
from tests.pool.cancelling import run_cancelled
from tests.pool.running import running


async def work(pool: Pool) -> int:
    async with pool.checkout() as client:
        await client.query("begin")
        await client.query("insert a")
        await client.query("commit")
    return 1


async def test_a_cancel_at_any_step_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    fired = True
    while fired:
        async with running(monkeypatch, size=1) as run:
            fired, _ = await run_cancelled(lambda run=run: work(run.pool), steps)  # type: ignore[misc]
            await run.check_whole()
            assert all(mini.committed in ([], ["a"]) for mini in run.minis)
        steps += fired
    print(f"cancelled at each of {steps} steps")  # noqa: T201 - how far the test reached
    assert steps > 4


async def test_a_cancel_at_any_step_of_a_wait_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session comes free while it waits, so that the cancel meets the grant as well."""
    for steps in range(4):
        async with running(monkeypatch, size=1) as run:
            async with trio.open_nursery() as nursery, run.pool.checkout():
                nursery.start_soon(run_cancelled, lambda run=run: work(run.pool), steps)
                await wait_all_tasks_blocked()
            await run.check_whole()
            assert len(run.minis) <= 2


async def test_a_grant_and_a_cancel_at_the_same_instant_give_the_session_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(monkeypatch, size=1) as run:
        waiter = trio.CancelScope()

        async def wait() -> None:
            with waiter:
                await work(run.pool)

        async with trio.open_nursery() as nursery:
            async with run.pool.checkout():
                nursery.start_soon(wait)
                await wait_all_tasks_blocked()
            waiter.cancel()  # the block above has just granted it, and its task has not run yet
        assert waiter.cancelled_caught
        assert run.minis[0].committed == []
        await run.check_whole()
        assert len(run.minis) == 1


async def test_two_of_two_held_the_third_gets_its_time_out_and_one_end_serves_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(monkeypatch) as run, run.pool.checkout():
        done = trio.Event()

        async def third() -> None:
            with pytest.raises(WaitEnded):
                async with run.pool.checkout(timeout_seconds=0.0):
                    raise AssertionError("there was none to be had")
            done.set()

        async def fourth(outcome: list[Any]) -> None:
            async with run.pool.checkout() as client:
                outcome += await client.query("select 4")

        async with trio.open_nursery() as nursery:
            outcome: list[Any] = []
            async with run.pool.checkout():
                nursery.start_soon(third)
                await wait_all_tasks_blocked()
                janitor.end_late_waits(run.pool, monotonic())
                await done.wait()
                nursery.start_soon(fourth, outcome)
                await wait_all_tasks_blocked()
                assert outcome == []
                assert run.pool.core.total == 2
        assert outcome == [[b"4"]]
        assert run.pool.core.total == len(run.minis) == 2


@pytest.mark.parametrize("how", ["exception", "return", "in transaction", "query fails"])
async def test_whatever_happens_in_the_block_the_session_is_given_back(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(pool: Pool) -> None:
        async with pool.checkout() as client:
            await client.query("select 1")
            if how == "exception":
                raise KeyError(how)
            if how == "return":
                return
            await client.query("begin")
            await client.query("insert a" if how == "in transaction" else "select 1/0")

    async with running(monkeypatch) as run:
        expected = {"exception": KeyError, "query fails": QueryFailed}
        if how in expected:
            with pytest.raises(expected[how]):
                await use(run.pool)
        else:
            await use(run.pool)
        await run.check_whole()
        assert len(run.minis) == 1, "the session was kept"
        assert run.minis[0].committed == []


async def test_a_session_that_dies_in_the_block_is_reported_and_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(monkeypatch) as run:
        async with run.pool.checkout() as client:
            with pytest.raises(BackendLost):
                await client.query("die")
            with pytest.raises(BackendLost):
                await client.query("select 1")
        await run.check_whole()


async def test_a_pool_that_stops_refuses_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, size=1) as run, trio.open_nursery() as nursery:
        async def wait() -> None:
            with pytest.raises(NotServing):
                async with run.pool.checkout():
                    raise AssertionError("it was granted")

        async with run.pool.checkout():
            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            steering.stop(run.pool)


async def test_another_backend_is_tried_at_once_however_long_the_last_one_failed(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with running(monkeypatch) as run:
        async def refused(*_: Any) -> OpenSession:
            raise BackendLost("the old primary is gone")

        monkeypatch.setattr(growth, "open_session", refused)
        done = trio.Event()

        async def serve_one() -> None:
            await work(run.pool)
            done.set()

        run.nursery.start_soon(serve_one)
        await wait_all_tasks_blocked()  # it failed once, and waits for a quarter of a second
        monkeypatch.setattr(growth, "open_session", run.open_session)
        began = trio.current_time()
        run.pool.growth.forget()
        await done.wait()
        assert trio.current_time() == began


async def test_a_reconnect_ends_the_pause_after_a_login_that_was_refused_for_good(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with running(monkeypatch) as run:
        async def refused(*_: Any) -> OpenSession:
            raise DialFailed(Outcome.ENDED, "password authentication failed", code="28P01")

        monkeypatch.setattr(growth, "open_session", refused)
        with pytest.raises(DialFailed):
            await work(run.pool)
        monkeypatch.setattr(growth, "open_session", run.open_session)
        with pytest.raises(DialFailed):  # the server is left alone for server_login_retry
            await work(run.pool)
        steering.reconnect(run.pool)
        began = trio.current_time()
        assert await work(run.pool) == 1
        assert trio.current_time() == began


async def test_a_session_whose_login_began_before_a_reconnect_serves_nobody(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with running(monkeypatch) as run:
        logging_in, logged_in = trio.Event(), trio.Event()

        async def slow(*_: Any) -> OpenSession:
            opened = await run.open_session()
            monkeypatch.setattr(growth, "open_session", run.open_session)
            logging_in.set()
            await logged_in.wait()
            return opened

        monkeypatch.setattr(growth, "open_session", slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, run.pool)
            await logging_in.wait()
            steering.reconnect(run.pool)
            logged_in.set()
        await wait_all_tasks_blocked()
        assert [mini.ended for mini in run.minis] == [True, False]


async def test_with_a_server_lifetime_of_0_a_session_serves_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as run:
        run.pool.apply_settings(replace(run.pool.plan, size_max=2, server_lifetime_seconds=0))
        for count in (1, 2):
            async with run.pool.checkout() as client:
                assert await client.query("select 7") == [[b"7"]]
                assert len(run.minis) == count
            while run.pool.parts.servers:
                await run.pool.parts.server_forgotten.wait()
            assert all(mini.ended for mini in run.minis)
            assert run.pool.core.total == 0


async def test_with_a_server_lifetime_of_0_asking_a_session_whether_it_is_there_is_no_use_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(monkeypatch) as run:
        plan = run.pool.plan
        run.pool.apply_settings(replace(
            plan, size_max=1, size_min=1, server_lifetime_seconds=0,
            settings=plan.settings.model_copy(update={"server_check_delay_seconds": 0.0})))
        run.pool.greeting = {}
        janitor.replenish(run.pool, monotonic())
        await wait_all_tasks_blocked()
        assert len(run.pool.core.idle) == 1
        async with run.pool.checkout() as client:
            assert await client.query("select 7") == [[b"7"]]
            assert len(run.minis) == 1
        while run.pool.parts.servers:
            await run.pool.parts.server_forgotten.wait()
        assert [mini.ended for mini in run.minis] == [True]


async def test_with_a_server_lifetime_of_0_a_session_serves_on_while_no_successor_could_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(monkeypatch) as run:
        run.pool.apply_settings(replace(run.pool.plan, size_max=2, server_lifetime_seconds=0))
        run.pool.core.ages = False
        for _ in range(2):
            async with run.pool.checkout() as client:
                assert await client.query("select 7") == [[b"7"]]
            await wait_all_tasks_blocked()
            assert [mini.ended for mini in run.minis] == [False]
        assert len(run.pool.core.idle) == 1
        run.pool.core.ages = True
        janitor.close_old_sessions(run.pool, monotonic(), growth_allowed=True)
        await wait_all_tasks_blocked()
        assert [mini.ended for mini in run.minis] == [True]
