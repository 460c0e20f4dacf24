"""fence_command: run once for a backend that was left, bounded, unheard; what it confirms frees permits."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.election import Leader
from coordinator.fence_command import COMMAND_SECONDS_MAX
from coordinator.fencing import Fencer
from coordinator.ledger.attestation import Attestation
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.record import Backend, Epoch, EpochState, Permit
from coordinator.ledger.states import SessionState
from coordinator.reach import Present
from coordinator.store.api import Compare, Field, Put, Txn, Won
from coordinator.store.faulty import Faults, FaultyStore
from coordinator.topology import Glance, NoAnswer, Seen
from tests.coordinator.nodes import B2, A, Followed, Node, followed
from tests.coordinator.stage import DB, NO_FENCE
from tests.ledger.ground import FLEET, KEYS, NOW_US, record_exit, session

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
    life: trio.CancelScope  # of the first leader's coordinator

    async def another(self, host: str = "host") -> Fencer:
        """The next leader's."""
        fencer = make(self.on, self.commands, host=host)
        await self.on.stage.nursery.start(fencer.run)
        return fencer

    async def put_other(self, backend: Backend, state: EpochState = EpochState.ACTIVE) -> None:
        """Another ledger of the same cluster."""
        await self.on.stage.put(FLEET.db("bills/read").epoch(), Epoch(1, state, backend, 0, "test").encode())

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


def make(on: Followed, commands: Commands, *, host: str = "host") -> Fencer:
    return Fencer(on.stage.store, FLEET, {DB: on.stage.ledger}, command=COMMAND, host=host,
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
        at = Fencing(on, commands, make(on, commands), trio.CancelScope())

        async def live(task_status: trio.TaskStatus[None]) -> None:
            with at.life:
                await at.fencer.run(task_status)

        await on.stage.nursery.start(live)
        yield at


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
            await at.lead(await at.another())
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
        at.on.nodes.at[A.address] = Node(A)
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
        at.life.cancel()
        assert [record.extra["state"] for record in await at.records()] == ["begun"]
        at.commands.may_end.set()
        await at.lead(await at.another())
        assert await at.on.stage.states() == {}
        await at.hold(1, pid=42)
        await at.lead(await at.another())
        assert await at.on.stage.states() == {}
    assert len(at.commands.ran) == 2


async def test_the_next_leader_does_not_fence_a_node_that_came_back_as_a_standby(
    tmp_path: Path, clock: MockClock
) -> None:
    async with failed_over(tmp_path, ends=False) as at:
        with trio.move_on_after(1):
            await at.left()
        at.life.cancel()
        at.on.nodes.at[A.address] = Node(replace(A, in_recovery=True, postmaster_start_us=9_000))
        at.commands.may_end.set()
        await at.lead(await at.another())
    assert len(at.commands.ran) == 1


async def test_one_node_is_fenced_once_however_many_ledgers_left_it(tmp_path: Path, clock: MockClock) -> None:
    async with failed_over(tmp_path) as at:
        await at.put_other(B2)
        other = Ledger(at.on.stage.store, FLEET.db("bills/read"), FLEET, lambda: NOW_US)
        at.fencer._ledgers = {DB: at.on.stage.ledger, "bills/read": other}
        at.fencer._roles = {DB: "write", "bills/read": "write"}
        epoch = replace(await at.on.epoch(), number=1, backend=A)
        async with trio.open_nursery() as nursery:
            for db in at.fencer._ledgers:
                nursery.start_soon(at.fencer.left, db, epoch, GONE, NO_FENCE)
        for db in at.fencer._ledgers:
            await at.fencer.left(db, epoch, GONE, NO_FENCE)
        assert len(at.commands.ran) == 1
        [record] = await at.records()
        assert set(record.extra["ledgers"]) == {DB, "bills/read"}


@pytest.mark.parametrize("served", [A, replace(A, address="alias:5432")])
async def test_no_node_is_fenced_while_any_ledger_of_the_fleet_is_served_there(
    tmp_path: Path, clock: MockClock, served: Backend
) -> None:
    async with failed_over(tmp_path) as at:
        await at.put_other(served)
        at.on.stage.nursery.start_soon(at.left)
        with capture_logs() as logs, trio.move_on_after(30):
            await trio.sleep_forever()
        assert at.commands.ran == []
        [told] = [each["why"] for each in logs if each["event"] == "fence_waits"]
        assert "bills/read" in told
        await at.put_other(B2)
        with trio.move_on_after(5):
            await trio.sleep_forever()
    assert len(at.commands.ran) == 1


async def test_no_node_is_fenced_that_another_drain_is_about_to_promote(
    tmp_path: Path, clock: MockClock
) -> None:
    async with failed_over(tmp_path) as at:
        drained = Epoch(1, EpochState.DRAINING, B2, 0, "test", target=replace(A, in_recovery=True))
        await at.on.stage.put(FLEET.db("bills/read").epoch(), drained.encode())
        with trio.move_on_after(30):
            await at.left()
    assert at.commands.ran == []


async def test_a_node_that_is_back_as_a_standby_when_etcd_answers_again_is_not_fenced(
    tmp_path: Path, clock: MockClock
) -> None:
    async with failed_over(tmp_path) as at:
        store = at.on.stage.store
        at.fencer._store = silent = FaultyStore(store, Random(0), Faults())
        silent.down = True
        at.on.stage.nursery.start_soon(at.left)
        with trio.move_on_after(10):
            await trio.sleep_forever()
        at.on.nodes.at[A.address] = Node(replace(A, in_recovery=True, timeline=2, postmaster_start_us=9_000))
        silent.down = False
        with trio.move_on_after(10):
            await trio.sleep_forever()
        assert await at.records() == []
    assert at.commands.ran == []


async def test_a_command_that_ended_after_the_leadership_moved_is_on_record_and_not_run_again(
    tmp_path: Path, clock: MockClock
) -> None:
    async with failed_over(tmp_path, ends=False) as at:
        await at.hold(0, pid=42)
        put = Put(FLEET.leader(), Leader("host", 1, 0).encode())
        won = await at.on.stage.store.txn(Txn(puts=(put,)))
        assert isinstance(won, Won)
        fence = Compare(FLEET.leader(), Field.CREATE, won.revision)
        await at.on.stage.put(FLEET.reach("host.1"), Present("host").encode())
        with trio.move_on_after(1):
            await at.left(fence=fence)
        await at.on.stage.store.txn(Txn(deletes=(FLEET.leader(),)))
        await at.lead(await at.another("elsewhere"))
        at.commands.may_end.set()
        with trio.move_on_after(5):
            await trio.sleep_forever()
        assert await at.on.stage.states() == {}
        assert [record.extra["state"] for record in await at.records()] == ["confirmed"]
    assert len(at.commands.ran) == 1


@pytest.mark.parametrize("is_there", [True, False])
async def test_what_a_coordinator_elsewhere_began_is_begun_again_once_that_cannot_be_at_it_any_more(
    tmp_path: Path, clock: MockClock, is_there: bool
) -> None:
    async with failed_over(tmp_path, ends=False) as at:
        with trio.move_on_after(1):
            await at.left()
        at.life.cancel()
        if is_there:
            await at.on.stage.put(FLEET.reach("host.2"), Present("host").encode())
        await at.lead(await at.another("elsewhere"))
        with trio.move_on_after(COMMAND_SECONDS_MAX):
            await trio.sleep_forever()
        assert len(at.commands.ran) == (1 if is_there else 2)
        with trio.move_on_after(10):
            await trio.sleep_forever()
    assert len(at.commands.ran) == 2


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.ENOENT])
async def test_a_command_that_cannot_be_started_has_failed_and_ends_nothing_else(
    tmp_path: Path, clock: MockClock, number: int
) -> None:
    async def run(command: str, environment: Mapping[str, str]) -> int | None:
        await trio.lowlevel.checkpoint()
        raise OSError(number, os.strerror(number), command)

    async with failed_over(tmp_path) as at:
        at.fencer._run = run
        with capture_logs() as logs:
            await at.left()
        [record] = await at.records()
        assert (record.extra["state"], record.evidence) == ("failed", f"not started: {os.strerror(number)}")
        assert "hunter2" not in str(logs) + repr(record)
        await at.lead(at.fencer)


async def test_a_record_of_another_form_ends_no_leader(tmp_path: Path, clock: MockClock) -> None:
    async with failed_over(tmp_path) as at:
        for name, extra in (("1", {}), ("2", {"state": "begun", "backend": 5, "ledgers": []}),
                            ("3", {"state": "begun", "host": "h", "ledgers": {},
                                   "backend": {"address": "nowhere"}})):
            odd = Attestation("x", "y", "", 0, DB, extra=extra)
            await at.on.stage.put(FLEET.operator(f"fence-of:{name}"), odd.encode())
        await at.left()
        await at.lead(at.fencer)
    assert len(at.commands.ran) == 1
