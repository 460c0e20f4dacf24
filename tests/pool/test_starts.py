"""Clients' start-up parameters are proved on a session once, whoever asks, and however it ends."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pooler.pool import starts, steering
from pooler.pool.starts import StartRefused, Taken
from pooler.wire.parameters import ParameterSet
from tests.pool.cancelling import run_cancelled
from tests.pool.running import Running, running
from tests.relay.words import PARAMETERS

ODD = {b"work_mem": b"7MB"}


def base(run: Running) -> ParameterSet:
    return run.world.tracked.from_statuses(PARAMETERS.items())


async def proved(run: Running, start: dict[bytes, bytes]) -> Taken:
    return await run.pool.starts.proved(base(run), start, PARAMETERS, 5.0)


def requests(run: Running, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What its pool is asked for from here on."""
    asked: list[object] = []
    request = run.pool.request

    def noted(ticket: Any) -> Any:
        asked.append(ticket)
        return request(ticket)

    monkeypatch.setattr(run.pool, "request", noted)
    return asked


async def test_what_is_the_servers_own_already_costs_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as run:
        asked = requests(run, monkeypatch)
        assert (await proved(run, {b"datestyle": b"ISO, MDY"})).told == ()
        assert not asked


async def test_many_that_start_alike_at_once_cost_one_session_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as run:
        asked = requests(run, monkeypatch)
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(proved, run, {b"TimeZone": b"utc"} | ODD)
        assert (len(asked), len(run.minis)) == (1, 1)
        taken = await proved(run, ODD | {b"timezone": b"utc"})
        assert dict(taken.told)[b"DateStyle"] == b"ISO, MDY"
        assert len(asked) == 1
        assert run.pool.assignments == 0  # no client had it
        await run.check_whole()


async def test_what_a_server_refuses_is_refused_each_time_and_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(monkeypatch) as run:
        for _ in range(2):
            with pytest.raises(StartRefused) as refused:
                await proved(run, {b"DateStyle": b"bogus"})
            assert refused.value.code == "22023"
            assert b"VFATAL\0C22023\0" in refused.value.server_error
            assert len(run.pool.starts) == 0
            await run.check_whole()


async def test_only_so_many_are_kept_and_none_that_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "KEPT_MAX", 3)
    async with running(monkeypatch) as run:
        for number in range(5):
            await proved(run, {b"work_mem": b"%dMB" % number})
        await proved(run, {b"a.b": b"x" * starts.KEPT_BYTES_MAX})
        assert len(run.pool.starts) == 3
        asked = requests(run, monkeypatch)
        await proved(run, {b"work_mem": b"4MB"})
        assert not asked


async def test_another_server_is_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as run:
        await proved(run, ODD)
        steering.reconnect(run.pool)
        assert len(run.pool.starts) == 0


async def test_one_that_leaves_while_it_asks_leaves_the_next_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, fired = 0, True
    while fired:
        async with running(monkeypatch, size=1) as run:
            async with trio.open_nursery() as nursery:
                asking: list[bool] = []

                async def first(run: Running = run, steps: int = steps, asking: list[bool] = asking) -> None:
                    asking.append((await run_cancelled(lambda: proved(run, ODD), steps))[0])

                nursery.start_soon(first)
                nursery.start_soon(proved, run, ODD)
            fired = asking[0]
            assert len(run.pool.starts) == 1
            await wait_all_tasks_blocked()
            await run.check_whole()
        steps += 1
    assert steps > 2
