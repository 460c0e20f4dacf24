"""The reapers: who is marked, what is looked up, what frees a permit and what does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.ledger.record import COMMAND_INDEX, EpochState, Permit, Worker
from coordinator.ledger.states import SessionState
from coordinator.session_table import SessionTable, encode_who, table_path
from coordinator.store.api import Compare, Field, Put
from tests.coordinator.stage import DB, NO_FENCE, TTL_SECONDS, Server, Stage, row, stage
from tests.ledger.ground import BACKEND, FLEET, KEYS, TAG, ask, epoch, record_exit, register, session, write


async def hold(on: Stage, *, slot: int = 0, pid: int = 42, owner: str = "dead", **changes: object) -> Permit:
    """A permit as its owner left it."""
    state = SessionState.OPEN if pid else SessionState.RESERVED
    held = session(state, slot=slot, seat=slot, owner=owner, pid=pid, request_id=f"r{slot}",
                   backend_start_us=5_000 if pid else 0, **changes)
    await on.put(KEYS.session(held.kind, slot), held.encode())
    return held.permit


async def test_permits_of_an_owner_without_key_become_unknown_and_those_of_the_living_do_not(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        on.eyes.server.rows = [row(42, 5_000)]
        register(on.keyspace, "alive")
        await hold(on)
        await hold(on, slot=1, pid=43, owner="alive")
        assert await on.reconcile() == 1
        assert await on.states() == {0: "SESSION_UNKNOWN", 1: "OPEN"}
        assert on.reconciler.backends.awaiting[DB] == {"main/0.7": "pid 42 to end: it is idle"}


async def test_the_ticket_that_was_running_is_noted_from_the_dead_workers_table(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        on.eyes.server.rows = [row(42, 5_000)]
        permit = await hold(on)
        table = SessionTable.create(tmp_path, "dead")
        table.take(DB, permit, 42).busy(77, encode_who("acme", "batch", "10.0.0.9"), 1)
        table.close()
        await on.reconcile()
        held = (await on.ledger.snapshot()).find(permit)
        assert held is not None
        assert held.session.ticket == "77"


async def test_absent_frees_slot_and_seat_and_says_by_which_proof_and_who_saw_it(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        await hold(on)
        with capture_logs() as logs:
            assert await on.reconcile() == 0
        assert await on.states() == {}
        (released,) = [line for line in logs if line["event"] == "session_permit_released"]
        assert (released["proof"], released["observer"], released["permit"]) == ("absent", "host", "main/0.7")
        assert on.reconciler.backends.released == {"absent": 1}


async def test_a_void_look_frees_nothing_and_is_said_once_naming_the_grant(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        on.eyes.server.may_see_all = False
        await hold(on)
        with capture_logs() as logs:
            await on.reconcile()
            await on.reconcile()
        assert await on.states() == {0: "SESSION_UNKNOWN"}
        assert ["GRANT" in line["why"] for line in logs if line["event"] == "look_void"] == [True]


async def test_an_unreachable_node_frees_nothing(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        on.eyes.server.unreachable = True
        await hold(on)
        assert await on.reconcile() == 1
        assert "unreachable" in on.reconciler.backends.awaiting[DB]["main/0.7"]


async def test_a_permit_without_pid_needs_known_death_two_looks_and_a_fresh_connection(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        permit = await hold(on, pid=0)
        await on.reconcile()
        await trio.testing.wait_all_tasks_blocked()
        assert "known dead" in on.reconciler.backends.awaiting[DB][str(permit)]
        record_exit(on.keyspace, "dead")
        await on.reconcile()
        connection = on.eyes.connection
        assert on.reconciler.backends.awaiting[DB][str(permit)] == "a second look"
        await on.reconcile()  # at once: too soon
        assert on.eyes.connection == connection
        assert await on.states() == {0: "SESSION_UNKNOWN"}
        with trio.move_on_after(2.0):  # twice the server's authentication_timeout
            await trio.sleep_forever()
        await on.reconcile()
        assert on.eyes.connection == connection + 1
        assert on.reconciler.backends.released == {"never_born": 1}
        assert await on.states() == {}


async def test_a_late_birth_is_seen_and_keeps_the_permit(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        permit = await hold(on, pid=0)
        record_exit(on.keyspace, "dead")
        await on.reconcile()
        on.eyes.server.rows = [row(99, 6_000, permit.birth_tag(TAG))]
        with trio.move_on_after(10.0):
            await trio.sleep_forever()
        assert await on.reconcile() == 1
        assert "pid 99" in on.reconciler.backends.awaiting[DB][str(permit)]


async def test_a_restarted_server_frees_what_had_a_pid(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        await hold(on)
        await hold(on, slot=1, pid=0)
        on.eyes.server.backend = replace(BACKEND, postmaster_start_us=9_000)
        await on.reconcile()
        assert on.reconciler.backends.released == {"restarted": 1}
        assert await on.states() == {1: "SESSION_UNKNOWN"}


async def test_terminate_is_noted_first_and_only_after_the_time_and_for_that_very_session(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path, reconcile="terminate", unknown_terminate_after_seconds=60.0) as on:
        on.eyes.server.rows = [row(42, 5_000)]
        permit = await hold(on)
        await on.reconcile()
        with trio.move_on_after(59.0):
            await trio.sleep_forever()
        await on.reconcile()
        assert on.eyes.terminated == []
        with trio.move_on_after(2.0):
            await trio.sleep_forever()
        await on.reconcile()
        held = (await on.ledger.snapshot()).find(permit)
        assert held is not None
        assert (held.session.terminating, on.eyes.terminated) == (True, [42])


async def test_observing_never_terminates(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path, unknown_terminate_after_seconds=0.0) as on:
        on.eyes.server.rows = [row(42, 5_000)]
        await hold(on)
        await on.reconcile()
        await on.reconcile()
        assert on.eyes.terminated == []


async def test_the_record_of_a_death_goes_with_the_last_permit_and_so_does_the_table(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        on.eyes.server.rows = [row(42, 5_000)]
        await hold(on)
        record_exit(on.keyspace, "dead")
        SessionTable.create(tmp_path, "dead").close()
        fence = await leader_fence(on)
        await on.reconciler.reconcile(DB, fence)
        assert FLEET.worker_exit("dead") in on.keyspace.entries
        on.eyes.server.rows = []
        await on.reconciler.reconcile(DB, fence)
        await on.reconciler.reconcile(DB, fence)
        assert FLEET.worker_exit("dead") not in on.keyspace.entries
        assert not table_path(tmp_path, "dead").exists()


async def leader_fence(on: Stage) -> Compare:
    await on.put(FLEET.leader(), b"")
    return Compare(FLEET.leader(), Field.CREATE, on.keyspace.entries[FLEET.leader()].create_revision)


async def test_a_deposed_leader_removes_nothing_and_moves_no_epoch(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        fence = await leader_fence(on)
        record_exit(on.keyspace, "dead")
        await on.put(KEYS.epoch(), epoch(1, EpochState.DRAINING))
        deposed = replace(fence, revision=fence.revision - 1)
        await on.reconciler.reconcile(DB, deposed)
        snapshot = await on.ledger.snapshot()
        assert snapshot.epoch is not None
        assert (list(snapshot.exits), snapshot.epoch.state) == (["dead"], EpochState.DRAINING)


async def test_an_epoch_whose_draining_command_is_gone_grants_again(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        fence = await leader_fence(on)
        await on.put(KEYS.epoch(), epoch(1, EpochState.DRAINING))
        await on.put(KEYS.drain(), b"")
        await on.reconciler.reconcile(DB, fence)
        assert (await on.ledger.snapshot()).epoch.state is EpochState.DRAINING  # type: ignore[union-attr]
        del on.keyspace.entries[KEYS.drain()]
        await on.reconciler.reconcile(DB, fence)
        assert (await on.ledger.snapshot()).epoch.state is EpochState.ACTIVE  # type: ignore[union-attr]


@pytest.mark.parametrize("event", ["lease", "nothing"])
async def test_a_leader_acts_on_the_event_and_otherwise_within_a_lease_cycle(
    tmp_path: Path, clock: MockClock, event: str
) -> None:
    async with stage(tmp_path) as on:
        lease = register(on.keyspace, "dead")
        await on.ledger.reserve(ask("r1", owner="dead"))
        on.nursery.start_soon(on.reconciler.lead, NO_FENCE)
        await wait_all_tasks_blocked()
        began = trio.current_time()
        if event == "lease":
            on.store.expire(lease)
        else:
            on.keyspace.expire(lease)  # no watch hears of it
        with trio.move_on_after(2 * TTL_SECONDS):
            while await on.states() != {0: "SESSION_UNKNOWN"}:
                with trio.move_on_after(0.02):
                    await trio.sleep_forever()
        took = trio.current_time() - began
        assert await on.states() == {0: "SESSION_UNKNOWN"}
        assert took < 0.2 if event == "lease" else took <= TTL_SECONDS + 0.1


@pytest.mark.parametrize("state", [SessionState.UNKNOWN, SessionState.CLOSING])
async def test_a_permit_that_stays_unknown_or_closing_is_alerted_once_within_two_lease_cycles(
    tmp_path: Path, clock: MockClock, state: SessionState
) -> None:
    async with stage(tmp_path) as on:
        command = Worker("slow", COMMAND_INDEX, 0, "host", "m", "k", 1, 2)  # it has no coordinator
        write(on.keyspace, Put(KEYS.worker("slow"), command.encode(), on.keyspace.grant()))
        on.eyes.server.rows = [row(42, 5_000)]
        held = session(state, owner="slow")
        await on.put(KEYS.session(held.kind, 0), held.encode())
        with capture_logs() as logs:
            for _ in range(4):
                await on.reconcile()
                with trio.move_on_after(TTL_SECONDS):
                    await trio.sleep_forever()
        (alert,) = [line for line in logs if line["event"] == "session_permit_stuck"]
        assert (alert["owner"], alert["pid"], alert["state"]) == ("slow", 42, str(state))
        assert alert["age_seconds"] <= 2 * TTL_SECONDS


async def test_an_unknown_permit_that_stays_for_two_lease_cycles_is_told_once_with_what_it_awaits(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        on.eyes.server.rows = [row(42, 5_000)]
        await hold(on)
        with capture_logs() as logs:
            for _ in range(5):
                await on.reconcile()
                await trio.sleep(TTL_SECONDS)  # noqa: TID251 - on a clock that jumps
        (alert,) = [line for line in logs if line["event"] == "session_permit_unknown_old"]
        assert (alert["owner"], alert["pid"], alert["user"]) == ("dead", 42, "app")
        assert (alert["awaits"], alert["age_seconds"]) == ("pid 42 to end: it is idle", 2 * TTL_SECONDS)
        assert on.reconciler.backends.unknown_old == {DB: 1}
        on.eyes.server.rows = []
        await on.reconcile()
        assert on.reconciler.backends.unknown_old == {DB: 0}


async def test_a_node_that_is_silent_delays_no_later_pass_over_the_others(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        on.eyes.server.silent = True
        other = replace(BACKEND, address="127.0.0.1:5433")
        on.eyes.servers[other.address] = Server(other)
        await hold(on)
        on.nursery.start_soon(on.reconciler.lead, NO_FENCE)
        await trio.sleep(60)  # noqa: TID251 - on a clock that jumps: the look at the silent one goes on
        await hold(on, slot=1, pid=43, backend=other)
        await trio.sleep(TTL_SECONDS + 2)  # noqa: TID251 - the next pass by level
        assert await on.states() == {0: "SESSION_UNKNOWN"}


async def test_a_node_that_never_answers_holds_up_neither_the_marks_nor_the_other_nodes(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        on.eyes.server.silent = True
        other = replace(BACKEND, address="127.0.0.1:5433")
        on.eyes.servers[other.address] = Server(other)
        await hold(on)
        await hold(on, slot=1, pid=43, backend=other)
        on.nursery.start_soon(on.reconciler.lead, NO_FENCE)
        await wait_all_tasks_blocked()
        with trio.move_on_after(1.0):
            await trio.sleep_forever()
        assert await on.states() == {0: "SESSION_UNKNOWN"}  # the other is freed
        register(on.keyspace, "late")
        await hold(on, slot=2, pid=44, owner="late")
        on.store.expire(on.keyspace.entries[FLEET.worker("late")].lease)
        with trio.move_on_after(1.0):
            await trio.sleep_forever()
        assert await on.states() == {0: "SESSION_UNKNOWN", 2: "SESSION_UNKNOWN"}
