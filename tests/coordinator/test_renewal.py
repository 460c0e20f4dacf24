"""A reload is answered when what it brought is served, whatever other reloads there are meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import trio.testing

from coordinator.renewal import Renewal
from coordinator.spec import CoordinatorSpec
from tests.coordinator.parts import make_spec


def specs(tmp_path: Path) -> list[CoordinatorSpec]:
    spec = CoordinatorSpec.parse(make_spec(tmp_path, hosts=["127.0.0.1:1"], endpoints=["127.0.0.1:1"]))
    return [replace(spec, fleet=f"fleet{n}") for n in range(3)]


async def test_reloads_during_one_another_are_all_answered_when_the_latest_is_served(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    first, second, third = specs(tmp_path)
    renewal, answered = Renewal(), []

    async def reload(spec: CoordinatorSpec) -> None:
        renewal.ask(spec)
        assert await renewal.until_served(5.0)
        answered.append((spec.fleet, trio.current_time() - began))

    began = trio.current_time()
    renewal.ask(first)
    renewal.serves(renewal.begin())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reload, second)
        await trio.testing.wait_all_tasks_blocked()
        now = renewal.begin()
        nursery.start_soon(reload, third)
        await trio.testing.wait_all_tasks_blocked()
        renewal.serves(now)
        await trio.testing.wait_all_tasks_blocked()
        assert answered == [], "the third is not served yet"
        renewal.serves(renewal.begin())
    assert sorted(answered) == [("fleet1", 0.0), ("fleet2", 0.0)]


async def test_what_differs_in_its_log_alone_is_served_already(tmp_path: Path) -> None:
    spec, *_ = specs(tmp_path)
    renewal = Renewal()
    renewal.ask(spec)
    renewal.serves(renewal.begin())
    renewal.ask(replace(spec, log=replace(spec.log, level="debug")))
    assert await renewal.until_served(5.0)


async def test_what_is_never_served_is_waited_for_no_longer_than_said(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    renewal = Renewal()
    renewal.ask(specs(tmp_path)[0])
    assert not await renewal.until_served(5.0)
    assert trio.current_time() == 5.0
