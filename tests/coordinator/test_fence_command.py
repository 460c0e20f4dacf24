"""The command that fences: bounded, unheard, told only what it needs; what goes wrong is an outcome."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from coordinator import fence_command
from coordinator.fence_command import outcome_of, run_command
from tests.support.wait import wait_until

COMMAND = "fence --password hunter2"


async def test_a_shell_that_is_not_there_and_a_line_that_no_shell_takes_are_outcomes(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await outcome_of(run_command, "true\0hunter2", {})).how == "not started: ValueError"
    missing = "/nowhere/sh"

    async def open_process(*_: object, **more: object) -> object:
        return await trio.run_process([missing])

    monkeypatch.setattr(trio.lowlevel, "open_process", open_process)
    ended = await outcome_of(run_command, COMMAND, {})
    assert not ended.is_off
    assert "hunter2" not in ended.how



async def test_a_command_gets_what_it_is_told_and_none_of_the_rest_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ETCD_PASSWORD", "hunter2")
    out = tmp_path / "out"
    code = await run_command(f"env > {out}; echo hunter2; echo hunter2 >&2; exit 3",
                             {"POOLER_FENCE_HOST": "db"})
    assert code == 3
    said = out.read_text()
    assert "POOLER_FENCE_HOST=db" in said
    assert f"PATH={os.environ['PATH']}" in said
    assert "hunter2" not in said
    assert "hunter2" not in "".join(capfd.readouterr())


async def test_a_command_that_does_not_end_is_killed_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence_command, "COMMAND_SECONDS_MAX", 0.3)
    pids = tmp_path / "pids"
    assert await run_command(f"sleep 600 & echo $! $$ > {pids}; wait", {}) is None
    child, shell = map(int, pids.read_text().split())
    wait_until(lambda: not any(map(runs, (shell, child))), "both are gone", 10)


def runs(pid: int) -> bool:
    """Whether the process is there, and not only its exit code."""
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and ") Z " not in state.read_text()
