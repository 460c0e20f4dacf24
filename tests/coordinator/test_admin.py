"""Admin permits of commands: numbered like any, told when none is free, free again however a command ends."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from coordinator import commands
from coordinator.admin import AdminPermits, NoAdminPermit, admin_permits
from coordinator.epoch import not_acknowledged
from coordinator.ledger.record import Backend, EpochState, Kind, Session
from coordinator.ledger.states import SessionState
from tests.coordinator.stage import Stage, row, stage
from tests.ledger.ground import BACKEND, FLEET, KEYS, NOW_US, TAG, epoch

ELSEWHERE = "127.0.0.1:5433"


@asynccontextmanager
async def permits_of(on: Stage, run_dir: Path | None = None) -> AsyncIterator[AdminPermits]:
    async with admin_permits(
        on.store, FLEET, on.ledger, host="host", machine_id="m", run_dir=run_dir, ttl_seconds=5.0,
        now_us=lambda: NOW_US,
    ) as permits:
        yield permits


async def held(on: Stage) -> list[Session]:
    return [each.session for each in (await on.ledger.snapshot()).held(Kind.ADMIN)]


def a_dead_process() -> int:
    with subprocess.Popen(["true"]) as gone:
        return gone.pid


def leaf(raised: pytest.ExceptionInfo[BaseExceptionGroup[NoAdminPermit]]) -> str:
    fault: BaseException = raised.value
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    assert isinstance(fault, NoAdminPermit)
    return str(fault)


async def test_a_permit_is_taken_before_anything_is_opened_and_goes_with_its_proof(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        async with permits_of(on, tmp_path) as permits:
            taken = await permits.take("app", "monitor", BACKEND.address)
            [session] = await held(on)
            assert (session.state, session.owner) == (SessionState.RESERVED, permits.boot_id)
            assert taken.name == f"pooler:{TAG}:a0.{taken.permit.generation}"
            assert len(list((tmp_path / "commands").iterdir())) == 1
            taken = await permits.opened(taken, 42, 5_000, BACKEND)
            await permits.closing(taken)
            assert [each.state for each in await held(on)] == [SessionState.CLOSING]
            await permits.give_back(taken, ended=True)
            assert await held(on) == []
        assert FLEET.worker(permits.boot_id) not in on.keyspace.entries
        assert list((tmp_path / "commands").iterdir()) == []


async def test_when_none_is_free_it_is_said_which_there_are_and_who_holds_them(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, permits_of(on) as holder:
        taken = await holder.take("app", "monitor", BACKEND.address)
        with pytest.raises(BaseExceptionGroup) as raised:
            async with permits_of(on) as permits:
                await permits.take("app", "monitor", BACKEND.address)
        told = leaf(raised)
        assert "adminReserve is 1" in told
        assert f"{taken.permit} (SESSION_RESERVED, owner {holder.boot_id} on host, user monitor" in told


async def test_an_admin_permit_can_be_had_while_main_is_full_and_while_the_epoch_drains(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path, slots=1) as on, on.worker("A") as worker, permits_of(on) as permits:
        await worker.reserve(db=KEYS.database)
        await on.put(KEYS.epoch(), epoch(1, EpochState.DRAINING))
        await permits.take("app", "monitor", BACKEND.address)
        assert len(await held(on)) == 1


async def test_a_permit_for_another_node_names_that_node_and_nothing_that_is_not_known_of_it(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, permits_of(on) as permits:
        await permits.take("app", "monitor", ELSEWHERE)
        [session] = await held(on)
        assert session.backend == Backend(ELSEWHERE, BACKEND.system_identifier, BACKEND.timeline)


async def test_nobody_waits_for_a_command_to_acknowledge_an_epoch(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on, permits_of(on) as permits:
        await permits.take("app", "monitor", BACKEND.address)
        workers = {boot: each.worker for boot, each in (await on.ledger.snapshot()).workers.items()}
        assert list(workers) == [permits.boot_id]
        assert not_acknowledged(7, KEYS.database, workers) == []


async def test_the_lease_is_kept_while_the_command_lives(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on, permits_of(on) as permits:
        taken = await permits.take("app", "monitor", BACKEND.address)
        await trio.sleep(60)  # noqa: TID251 - on a clock that jumps
        await on.reconcile()
        assert [each.state for each in await held(on)] == [SessionState.RESERVED]
        await permits.give_back(taken, ended=True)


async def test_a_session_whose_end_was_not_seen_stays_unknown_until_a_look_proves_it_gone(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, permits_of(on) as permits:
        taken = await permits.take("app", "monitor", BACKEND.address)
        taken = await permits.opened(taken, 42, 5_000, BACKEND)
        on.eyes.server.rows = [row(42, 5_000)]
        await permits.give_back(taken, ended=False)
        await on.reconcile()
        assert [each.state for each in await held(on)] == [SessionState.UNKNOWN]
        on.eyes.server.rows = []
        await on.reconcile()
        assert await held(on) == []


async def test_a_command_that_died_before_its_session_had_a_name_is_known_dead_and_its_permit_freed(
    tmp_path: Path, clock: MockClock
) -> None:
    gone = a_dead_process()
    async with stage(tmp_path) as on, permits_of(on, tmp_path) as permits:
        await permits.take("app", "monitor", BACKEND.address)
        assert commands.dead_ones(tmp_path) == []  # this process lives
        commands.note(tmp_path, permits.boot_id, replace(commands.Process.this(), pid=gone))
        assert commands.dead_ones(tmp_path) == [permits.boot_id]
        await on.registry.bury(permits.boot_id, "its process is gone", NOW_US)
        for _ in range(3):
            await on.reconcile()
            await trio.sleep(3)  # noqa: TID251 - on a clock that jumps, past every start-up
        assert await held(on) == []


def test_another_process_with_the_number_of_a_dead_one_is_not_taken_for_it(tmp_path: Path) -> None:
    this = commands.Process.this()
    assert not this.is_gone
    assert replace(this, pid_start=this.pid_start - 1).is_gone
    assert replace(this, kernel_boot_id="an older one").is_gone
    assert not replace(this, pid=0, pid_namespace="pid:[1]").is_gone  # not to be seen from here
    commands.note(tmp_path, "command-x", replace(this, pid_start=0))
    (tmp_path / "commands" / "command-y").write_text("{")
    assert commands.dead_ones(tmp_path) == ["command-x"]
    commands.forget(tmp_path, "command-x")
    assert commands.dead_ones(tmp_path) == []



def test_a_run_directory_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    assert not commands.note(tmp_path / "not there", "command-x", commands.Process.this())
