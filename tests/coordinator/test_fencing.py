"""fence_command: run once for a backend that was left, bounded, unheard; what it confirms frees permits."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator import fencing
from coordinator.fencing import Fencer, run_command
from coordinator.ledger.attestation import Attestation
from coordinator.ledger.record import Permit
from coordinator.ledger.states import SessionState
from coordinator.store.api import Compare, Field
from coordinator.topology import Glance, NoAnswer, Seen
from tests.coordinator.nodes import B2, A, Followed, Node, followed
from tests.coordinator.stage import DB, NO_FENCE
from tests.ledger.ground import FLEET, KEYS, NOW_US, record_exit, session
from tests.support.wait import wait_until

GONE = NoAnswer("refused", 0.0)
COMMAND = "fence --password hunter2"


@dataclass
class Commands:
    """Stands in for the shell: ends with `code` once `may_end`."""

    code: int | None = 0
    ran: list[dict[str, str]] = field(default_factory=list)
    may_end: trio.Event = field(default_factory=trio.Event)

    async def run(self, command: str, environment: Mapping[str, str]) -> int | None:
        assert command == COMMAND
        self.ran.append(dict(environment))
        await self.may_end.wait()
        return self.code


@dataclass
class Fencing:
    on: Followed
    commands: Commands
    fencer: Fencer

    def another(self) -> Fencer:
        """The next leader's."""
        return make(self.on, self.commands)

    async def hold(self, slot: int, *, pid: int, owner: str = "worker", **changes: object) -> Permit:
        held = session(SessionState.UNKNOWN, slot=slot, seat=slot, owner=owner, pid=pid,
                       backend_start_us=5_000 if pid else 0, request_id=f"r{slot}", **changes)
        await self.on.stage.put(KEYS.session(held.kind, slot), held.encode())
        return held.permit

    async def left(self, seen: Seen | None = GONE, fence: Compare = NO_FENCE) -> None:
        epoch = replace(await self.on.epoch(), number=1, backend=A)
        await self.fencer.left(DB, epoch, seen, fence)

    async def records(self) -> list[Attestation]:
        entries = (await self.on.stage.store.range(FLEET.operator(""))).entries
        return [Attestation.decode(entry.value) for entry in entries]

    async def lead(self, fencer: Fencer) -> None:
        self.on.stage.nursery.start_soon(fencer.lead, NO_FENCE, 5.0)
        await wait_all_tasks_blocked()


def make(on: Followed, commands: Commands) -> Fencer:
    return Fencer(on.stage.store, FLEET, {DB: on.stage.ledger}, command=COMMAND, host="host",
                  roles={DB: "write"}, look=on.glances.at, now_us=lambda: NOW_US, run=commands.run)


@asynccontextmanager
async def failed_over(run_dir: Path, code: int | None = 0, *, ends: bool = True) -> AsyncIterator[Fencing]:
    """The ledger went from A, which does not answer, to B."""
    async with followed(run_dir) as on:
        on.nodes.at[A.address] = Node(None)
        await on.put_epoch(number=2, backend=B2, failover=True)
        commands = Commands(code)
        if ends:
            commands.may_end.set()
        yield Fencing(on, commands, make(on, commands))


async def test_what_ran_there_is_freed_once_the_command_has_confirmed_it_and_that_is_on_record(
    tmp_path: Path, clock: MockClock
) -> None:
    async with failed_over(tmp_path) as at:
        await at.hold(0, pid=42)
        await at.hold(1, pid=43, backend=B2)
        with capture_logs() as logs:
            await at.left()
            await at.lead(at.fencer)
        assert await at.on.stage.states() == {1: "SESSION_UNKNOWN"}
        [record] = await at.records()
        assert (record.who, record.what, record.evidence) == (
            "leader host", f"fence_command for {A.address}, {DB} epoch 1", "exit code 0")
        [freed] = [each for each in logs if each["event"] == "session_permit_released"]
        assert (freed["proof"], freed["pid"]) == ("fenced", 42)
        assert "hunter2" not in str(logs) + repr(record) + repr(at.fencer)
    assert at.commands.ran == [{
        "POOLER_FENCE_DATABASE": DB, "POOLER_FENCE_ADDRESS": A.address, "POOLER_FENCE_HOST": "127.0.0.1",
        "POOLER_FENCE_PORT": "5432", "POOLER_FENCE_SYSTEM_IDENTIFIER": A.system_identifier}]


async def test_a_permit_that_becomes_unknown_later_is_freed_as_well(tmp_path: Path, clock: MockClock) -> None:
    async with failed_over(tmp_path) as at:
        await at.left()
        await at.lead(at.fencer)
        await at.hold(0, pid=42)
        at.fencer.stir()
        await wait_all_tasks_blocked()
        assert await at.on.stage.states() == {}


async def test_without_a_process_only_of_owners_that_had_ended_before_or_given_it_up(
    tmp_path: Path, clock: MockClock
) -> None:
    async with failed_over(tmp_path) as at:
        await at.hold(0, pid=0, owner="dead")
        await at.hold(1, pid=0, owner="paused")
        await at.hold(2, pid=0, owner="alive", abandoned=True)
        record_exit(at.on.stage.keyspace, "dead")
        await at.left()
        record_exit(at.on.stage.keyspace, "paused")
        await at.lead(at.fencer)
        assert await at.on.stage.states() == {1: "SESSION_UNKNOWN"}


@pytest.mark.parametrize(("code", "said"), [(1, "exit code 1"), (None, "not ended within 60 s")])
async def test_a_command_that_fails_or_does_not_end_frees_nothing_and_is_not_run_again(
    tmp_path: Path, clock: MockClock, code: int | None, said: str
) -> None:
    async with failed_over(tmp_path, code) as at:
        await at.hold(0, pid=42)
        with capture_logs() as logs:
            await at.left()
            await at.left()
            await at.lead(at.another())
        assert await at.on.stage.states() == {0: "SESSION_UNKNOWN"}
        assert [record.evidence for record in await at.records()] == [said]
        assert [each["outcome"] for each in logs if each["event"] == "fence_failed"] == [said]
    assert len(at.commands.ran) == 1


@pytest.mark.parametrize("seen", [
    Glance(replace(A, in_recovery=True), 0.0), Glance(replace(A, system_identifier="9"), 0.0)])
async def test_a_standby_and_another_clusters_server_are_not_fenced(
    tmp_path: Path, clock: MockClock, seen: Seen
) -> None:
    async with failed_over(tmp_path) as at:
        await at.left(seen)
    assert at.commands.ran == []


async def test_a_primary_that_still_answers_when_patroni_named_another_is_fenced(
    tmp_path: Path, clock: MockClock
) -> None:
    async with failed_over(tmp_path) as at:
        await at.left(Glance(A, 0.0))
    assert len(at.commands.ran) == 1


async def test_the_backend_that_serves_now_is_never_fenced(tmp_path: Path, clock: MockClock) -> None:
    async with failed_over(tmp_path) as at:
        await at.on.put_epoch(number=3, backend=A)
        await at.left()
    assert at.commands.ran == []


async def test_who_does_not_lead_any_more_fences_nobody(tmp_path: Path, clock: MockClock) -> None:
    async with failed_over(tmp_path) as at:
        await at.left(fence=Compare("/leader/of/before", Field.CREATE, 7))
    assert at.commands.ran == []


async def test_the_next_leader_runs_again_what_had_not_ended_and_keeps_what_was_confirmed(
    tmp_path: Path, clock: MockClock
) -> None:
    async with failed_over(tmp_path, ends=False) as at:
        await at.hold(0, pid=42)
        with trio.move_on_after(1):
            await at.left()
        assert [record.extra["state"] for record in await at.records()] == ["begun"]
        at.commands.may_end.set()
        await at.lead(at.another())
        assert await at.on.stage.states() == {}
        await at.hold(1, pid=42)
        await at.lead(at.another())
        assert await at.on.stage.states() == {}
    assert len(at.commands.ran) == 2


async def test_the_next_leader_does_not_fence_a_node_that_came_back_as_a_standby(
    tmp_path: Path, clock: MockClock
) -> None:
    async with failed_over(tmp_path, ends=False) as at:
        with trio.move_on_after(1):
            await at.left()
        at.on.nodes.at[A.address] = Node(replace(A, in_recovery=True, postmaster_start_us=9_000))
        at.commands.may_end.set()
        await at.lead(at.another())
    assert len(at.commands.ran) == 1


# ---- the command itself

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
    monkeypatch.setattr(fencing, "COMMAND_SECONDS_MAX", 0.3)
    pids = tmp_path / "pids"
    assert await run_command(f"sleep 600 & echo $! $$ > {pids}; wait", {}) is None
    child, shell = map(int, pids.read_text().split())
    wait_until(lambda: not any(map(runs, (shell, child))), "both are gone", 10)


def runs(pid: int) -> bool:
    """Whether the process is there, and not only its exit code."""
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and ") Z " not in state.read_text()
