"""What unknown permits wait for is told where a command can read it, by the leader and by nobody else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import trio
from trio.testing import MockClock

from coordinator.awaiting import Publishing, Waits, clock_time, read_awaited
from coordinator.election import Leader
from coordinator.inspect import LOST_WITH_HOST, session_rows, sum_up
from coordinator.ledger.states import SessionState
from coordinator.store.api import Compare, Field, Put
from pooler.cli.audit import explanation
from tests.coordinator.stage import DB, TTL_SECONDS, Stage, row, stage
from tests.ledger.ground import BACKEND, FLEET, KEYS, NOW_US, session, write

NODE = BACKEND.address


async def hold(on: Stage, slot: int = 0, pid: int = 42) -> str:
    held = session(SessionState.UNKNOWN, slot=slot, seat=slot, owner="dead", request_id=f"r{slot}", pid=pid,
                   backend_start_us=5_000 if pid else 0, state_since_us=NOW_US - 42_000_000)
    await on.put(KEYS.session(held.kind, slot), held.encode())
    return str(held.permit)


async def cycle() -> None:
    await trio.sleep(1.1 * TTL_SECONDS)  # noqa: TID251 - on a clock that jumps


def lead(on: Stage) -> int:
    """A leader's key on a lease of its own, and the publishing that goes with it; the lease."""
    lease = on.keyspace.grant()
    revision = write(on.keyspace, Put(FLEET.leader(), Leader("host-a", 1, 0).encode(), lease))
    publishing = Publishing(on.store, FLEET, on.reconciler.backends.waits, host="host-a",
                            lease_id=lambda: lease, ttl_seconds=TTL_SECONDS)
    on.nursery.start_soon(publishing.lead, Compare(FLEET.leader(), Field.CREATE, revision))
    return lease


async def rows_of(on: Stage, hosts: set[str] | None = None) -> list[dict[str, Any]]:
    leader, waits = await read_awaited(on.store, FLEET, DB)
    rows = session_rows(DB, await on.ledger.snapshot(), {}, NOW_US, waits, hosts)
    return [{**each, "told_by": leader if each["permit"] in waits else ""} for each in rows]


async def test_the_leader_tells_of_its_unknown_permits_once_a_cycle_and_only_what_changed(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        permit = await hold(on)
        on.eyes.server.rows = [row(42, 5_000)]
        lease = lead(on)
        await on.reconcile()
        await cycle()
        assert await read_awaited(on.store, FLEET, DB) == (
            "host-a", {permit: Waits("absent", NODE, "pid 42 to end: it is idle", NOW_US)})
        revision = on.keyspace.entries[KEYS.awaiting()].mod_revision
        await cycle()
        assert on.keyspace.entries[KEYS.awaiting()].mod_revision == revision
        on.eyes.server.rows = []
        await on.reconcile()
        await cycle()
        assert await read_awaited(on.store, FLEET, DB) == ("host-a", {})
        on.store.expire(lease)
        assert await read_awaited(on.store, FLEET, DB) == ("", {})


async def test_a_deposed_leader_tells_nothing(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        await hold(on)
        on.eyes.server.rows = [row(42, 5_000)]
        lead(on)
        write(on.keyspace, deletes=(FLEET.leader(),))
        await on.reconcile()
        await cycle()
        assert KEYS.awaiting() not in on.keyspace.entries


async def test_the_sum_line_says_which_proof_is_awaited_where_and_since_when_it_is_out_of_reach(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        permit = await hold(on)
        on.eyes.server.unreachable = True
        lead(on)
        await on.reconcile()
        await cycle()
        rows = await rows_of(on)
        since = clock_time(NOW_US)
        assert sum_up(await on.ledger.snapshot(), rows).line() == (
            f"4 slots: 1 unknown (oldest 42 s, waits for absent on {NODE}, unreachable since {since}), "
            "3 free; reserve 0/0; epoch 1")
        text = "\n".join(explanation(rows[0]))
        for line in ("its owner's process is not known to have ended",
                     f"waits since {since} for proof absent, or restarted on {NODE}: a look: {NODE}: unr",
                     f"{NODE} is unreachable since {since}", "the leading coordinator on host-a looks",
                     f"pooler ledger resolve {DB} {permit} --evidence"):
            assert line in text
        on.eyes.server.unreachable = False
        on.eyes.server.rows = [row(42, 5_000)]
        await on.reconcile()
        await cycle()
        assert "unreachable" not in "\n".join(explanation((await rows_of(on))[0]))


async def test_without_a_leader_it_is_said_that_nobody_tells(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        await hold(on, pid=0)
        (found,) = await rows_of(on)
        text = "\n".join(explanation(found))
        assert f"waits for proof never_born on {NODE}" in text
        assert "no leader tells of it" in text


async def test_a_ticket_that_only_a_host_without_a_coordinator_could_tell_is_lost_with_it(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        await hold(on)
        assert [each["ticket"] for each in await rows_of(on, {"host"})] == [""]
        assert [each["ticket"] for each in await rows_of(on, {"other"})] == [LOST_WITH_HOST]
        noted = replace((await on.ledger.snapshot()).sessions[0].session, ticket="77", tenant="acme")
        await on.put(KEYS.session(noted.kind, noted.slot), noted.encode())
        assert [(each["ticket"], each["tenant"]) for each in await rows_of(on, {"other"})] == [("77", "acme")]
