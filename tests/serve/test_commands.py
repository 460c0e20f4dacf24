"""Commands of the console: what a worker does, what stands for the next, what is not told as done."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.link import LinkRefused
from pooler.errors import FleetUnreachable
from pooler.serve.commands import Commands
from pooler.serve.fleet_view import FleetView
from pooler.serve.standing import Standing
from pooler.supervise.run_dir import STANDING_FILE, RunDir


class Pool:
    """As much of a pool as a command touches."""

    def __init__(self) -> None:
        self.core = SimpleNamespace(active=set())
        self.is_paused = False

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False


class Registry:
    """Two databases with a pool each."""

    def __init__(self) -> None:
        self.settings = SimpleNamespace(databases={"a": None, "b": None})
        self.paused: set[str] = set()
        self.disabled: set[str] = set()
        self.pools = {"a": Pool(), "b": Pool()}

    def by_name(self, name: str | None) -> list[Pool]:
        return [pool for key, pool in self.pools.items() if name in (None, key)]


def worker(run_dir: Path) -> tuple[Commands, Any]:
    registry: Any = Registry()
    return Commands(registry, Standing(run_dir)), registry


async def test_a_worker_that_starts_later_finds_what_the_others_have_paused_and_disabled(
    tmp_path: Path
) -> None:
    first, _ = worker(tmp_path)
    await first.run("pause", {"database": "a"})
    await first.run("disable", {"database": "b"})
    later, registry = worker(tmp_path)
    later.recall()
    assert (registry.paused, registry.disabled) == ({"a"}, {"b"})
    assert [pool.is_paused for pool in registry.pools.values()] == [True, False]
    await first.run("resume", {})
    await first.run("enable", {"database": "b"})
    after, registry = worker(tmp_path)
    after.recall()
    assert (registry.paused, registry.disabled) == (set(), set())


def test_what_stands_is_forgotten_with_the_fleet(tmp_path: Path) -> None:
    Standing(tmp_path).keep({"a"}, {"b"})
    tmp_path.chmod(0o700)
    RunDir.take(tmp_path, "f").close()
    assert not (tmp_path / STANDING_FILE).exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"paused": 3, "disabled": []}'])
def test_a_standing_file_that_cannot_be_read_pauses_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / STANDING_FILE).write_text(content)
    assert Standing(tmp_path).read() == (set(), set())


@pytest.mark.parametrize(("name", "args"), [("pause", {"database": "none"}), ("keep", {}), ("disable", {})])
async def test_what_a_worker_does_not_know_is_refused(
    tmp_path: Path, name: str, args: dict[str, Any]
) -> None:
    commands, registry = worker(tmp_path)
    with pytest.raises(LinkRefused):
        await commands.run(name, args)
    assert not registry.paused


async def test_a_command_that_may_not_have_reached_every_worker_is_not_told_as_done() -> None:
    async def away(op: str, args: dict[str, Any]) -> Any:
        raise FleetUnreachable("this host's coordinator is unreachable")

    nothing: Any = None
    permits: Any = SimpleNamespace(fleet=away)
    view = FleetView(nothing, permits, nothing, nothing)
    for args in ({}, {"database": "none"}):
        with pytest.raises(FleetUnreachable, match="PAUSE may hold on none or some of the workers"):
            await view.command("pause", args)
