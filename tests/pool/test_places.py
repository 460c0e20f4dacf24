"""max_user_connections: one user's sessions over all pools of a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from pooler.pool.places import Turn, UserPlaces
from pooler.pool.pool import Pool
from pooler.relay.task import TaskClient
from tests.pool.running import Running, running

LIMIT = 2


@asynccontextmanager
async def two_pools(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Running, Pool, Pool]]:
    """Of two databases, the same user's, with room for two sessions of his in each."""
    async with running(monkeypatch) as run:
        first = run.pool
        first.apply_settings(replace(first.plan, size_max=LIMIT, user_sessions_max=LIMIT))
        second = Pool(run.world.parts, replace(first.plan, name="other", ledger="other/write"))
        run.world.parts.of_user = lambda user: [first, second]
        yield run, first, second


def alive(run: Running) -> int:
    return sum(not mini.ended for mini in run.minis)


async def test_a_session_that_lies_idle_in_one_database_gives_way_to_who_waits_in_another(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with two_pools(monkeypatch) as (run, first, second), AsyncExitStack() as held:
        async with first.checkout(), first.checkout():
            pass
        await wait_all_tasks_blocked()
        assert (alive(run), len(first.core.idle)) == (LIMIT, LIMIT)
        for _ in range(LIMIT):
            await held.enter_async_context(second.checkout())
            assert alive(run) <= LIMIT
        await wait_all_tasks_blocked()
        assert (first.core.total, second.core.total, alive(run)) == (0, LIMIT, LIMIT)


async def test_who_waited_first_is_served_first_in_whichever_database(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    served: list[str] = []
    async with two_pools(monkeypatch) as (run, first, second):
        async with trio.open_nursery() as nursery:
            async def wants(pool: Pool, name: str) -> None:
                async with pool.checkout():
                    served.append(name)
                    assert alive(run) <= LIMIT

            async with first.checkout(), AsyncExitStack() as held:
                await held.enter_async_context(first.checkout())
                for pool, name in ((second, "second"), (first, "first"), (first, "last")):
                    nursery.start_soon(wants, pool, name)
                    await wait_all_tasks_blocked()
                    await trio.sleep(1)  # noqa: TID251 - of the mock clock: who waits longer is known
                assert served == []
                await held.aclose()  # the session that comes free here goes to who waits there
                await wait_all_tasks_blocked()
                assert served[0] == "second"
        assert sorted(served) == ["first", "last", "second"]


async def test_nobody_gives_way_to_what_is_only_kept_ready(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with two_pools(monkeypatch) as (_, first, second):
        async with first.checkout(), first.checkout():
            pass
        await wait_all_tasks_blocked()
        second.apply_settings(replace(second.plan, size_min=1))
        second.core.opening += 1
        second.growth.start()
        with trio.move_on_after(5):
            await trio.sleep_forever()
        assert (len(first.core.idle), second.core.opening) == (LIMIT, 1)
        second.apply_settings(replace(second.plan, size_min=0))
        with trio.move_on_after(1):
            await trio.sleep_forever()
        assert second.core.opening == 0


async def test_a_client_that_gives_up_leaves_the_line(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with two_pools(monkeypatch) as (run, first, second):
        async with first.checkout(), first.checkout():
            with trio.move_on_after(3):
                async with second.checkout():
                    raise AssertionError("there was no place")
            with trio.move_on_after(1):
                await trio.sleep_forever()
            assert run.world.parts.places.waiting("u") == 0
            assert isinstance(first.core.total, int)
        async with second.checkout() as client:
            assert isinstance(client, TaskClient)


@given(st.lists(st.tuples(st.sampled_from(["ask", "leave", "settle", "end"]), st.integers(0, 7),
                          st.integers(0, 3)), max_size=60))
def test_places_never_exceed_the_limit_that_was_asked_for_and_none_is_lost(
    steps: list[tuple[str, int, int]]
) -> None:
    places, turns, sessions = UserPlaces(), [Turn("u") for _ in range(8)], set[object]()
    for step, number, _ in steps:
        turn = turns[number]
        if step == "ask":
            assert places.ask(turn, LIMIT) == turn.has_place
        elif step == "leave":
            places.leave(turn)
        elif step == "settle" and turn.has_place:
            sessions.add(made := object())
            places.settle(turn, made)
        elif step == "end" and sessions:
            places.ended(sessions.pop())
        assert places.taken("u") == len(sessions) + sum(each.has_place for each in turns) <= LIMIT
        assert not places.waiting("u") or places.taken("u") == LIMIT
    for turn in turns:
        places.leave(turn)
    for session in sessions:
        places.ended(session)
    assert (places.taken("u"), places.waiting("u")) == (0, 0)


def test_without_a_limit_there_is_always_a_place() -> None:
    places = UserPlaces()
    turns = [Turn("u") for _ in range(5)]
    assert all(places.ask(turn, 0) for turn in turns)
    late = Turn("u")
    assert not places.ask(late, 3)  # those of before count when a limit comes
    for turn in turns[:3]:
        places.leave(turn)
    assert late.has_place
