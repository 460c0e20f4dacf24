"""What people see of a ledger, and what an operator's word may free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from coordinator.inspect import read_activities, resolve, session_rows, sum_up
from coordinator.ledger.attestation import Attestation
from coordinator.ledger.proofs import Look
from coordinator.ledger.record import Permit, Session
from coordinator.ledger.states import SessionState
from coordinator.policy import encode_policy, load_policy
from coordinator.session_table import SessionTable, encode_who
from tests.coordinator.parts import policy_text
from tests.coordinator.stage import DB, FakeEyes, Stage, row, stage
from tests.ledger.ground import FLEET, KEYS, NOW_US, session


async def hold(on: Stage, state: SessionState, slot: int, **changes: Any) -> Permit:
    held = session(state, slot=slot, seat=slot, request_id=f"r{slot}", state_since_us=NOW_US - 42_000_000,
                   **changes)
    await on.put(KEYS.session(held.kind, slot), held.encode())
    return held.permit


async def free(
    on: Stage, permit: Permit, eyes: FakeEyes | None, evidence: str = "node off"
) -> tuple[bool, str]:
    (done,) = await resolve(on.store, FLEET, on.ledger, [permit], who="root@a", evidence=evidence, eyes=eyes,
                            now_us=lambda: NOW_US)
    return done.freed, done.why


async def test_unknown_permits_come_first_and_the_sum_line_counts_them(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        busy = await hold(on, SessionState.OPEN, 0)
        idle = await hold(on, SessionState.OPEN, 1, pid=43)
        await hold(on, SessionState.UNKNOWN, 2, pid=44)
        table = SessionTable.create(tmp_path, "A")
        table.take(DB, busy, 42).busy(7, encode_who("acme", "batch", "10.0.0.9"), 1)
        table.take(DB, idle, 43).idle()
        table.close()
        snapshot = await on.ledger.snapshot()
        rows = session_rows(DB, snapshot, read_activities(tmp_path), NOW_US)
        assert [(each["slot"], each["state"]) for each in rows] == [
            (2, "SESSION_UNKNOWN"), (0, "OPEN_BUSY"), (1, "OPEN_IDLE")]
        assert (rows[1]["ticket"], rows[1]["tenant"], rows[0]["age_seconds"]) == ("7", "acme", 42.0)
        assert sum_up(snapshot, rows).line() == (
            "4 slots: 1 busy, 1 idle, 1 unknown (oldest 42 s, waits for absent on 127.0.0.1:5432)"
            ", 1 free; reserve 0/0; epoch 1")


async def test_slots_that_are_kept_for_a_failover_are_told_apart_from_those_that_are_free(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        policy, document = load_policy(policy_text(4, db=DB) + "failoverPermits: 2\n")
        await on.put(KEYS.policy(1), encode_policy(document, policy.resolve(can_fail_over=False)))
        await hold(on, SessionState.OPEN, 0)
        snapshot = await on.ledger.snapshot()
        line = sum_up(snapshot, session_rows(DB, snapshot, {}, NOW_US)).line()
        assert "3 free (2 of them for a failover); reserve 0/0" in line
        assert snapshot.epoch is not None
        after = replace(snapshot, epoch=replace(snapshot.epoch, failover=True))
        assert "3 free; reserve 0/0" in sum_up(after, session_rows(DB, after, {}, NOW_US)).line()


async def test_what_a_moved_session_does_is_found_by_the_permit_its_worker_had_for_it(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        await hold(on, SessionState.OPEN, 1, left_slots=("main/5", "main/3"))
        other = await hold(on, SessionState.OPEN, 3, generation=8, pid=43)
        table = SessionTable.create(tmp_path, "A")
        table.take(DB, Permit(other.kind, 3, 7), 42).busy(7, encode_who("acme", "batch", "10.0.0.9"), 1)
        table.close()
        rows = session_rows(DB, await on.ledger.snapshot(), read_activities(tmp_path), NOW_US)
        assert [(each["slot"], each["ticket"]) for each in rows] == [(1, "7"), (3, "")]


async def test_a_session_that_a_look_can_see_is_not_freed_on_anybodys_word(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        permit = await hold(on, SessionState.UNKNOWN, 0)
        on.eyes.server.rows = [row(42, 5_000)]
        assert await free(on, permit, on.eyes) == (False, "it can be seen at 127.0.0.1:5432: pid 42")
        assert await on.states() == {0: "SESSION_UNKNOWN"}


@pytest.mark.parametrize("reachable", [True, False])
async def test_an_attestation_frees_and_is_kept_with_its_evidence(
    tmp_path: Path, clock: MockClock, reachable: bool
) -> None:
    async with stage(tmp_path) as on:
        permit = await hold(on, SessionState.UNKNOWN, 0)
        on.eyes.server.unreachable = not reachable
        assert (await free(on, permit, on.eyes))[0]
        assert await on.states() == {}
        (entry,) = [e for key, e in on.keyspace.entries.items() if key.startswith(FLEET.operator(""))]
        kept = Attestation.decode(entry.value)
        assert (kept.who, kept.evidence) == ("root@a", "node off")
        assert "main/0.7" in kept.what
        assert not (await free(on, permit, on.eyes))[0]


class Slow(FakeEyes):
    """While it looks, the permit moves."""

    def __init__(self, on: Stage, moved: Session) -> None:
        super().__init__()
        self.on, self.moved = on, moved

    async def look(self, address: str, *, fresh: bool = False) -> Look:
        await self.on.put(KEYS.session(self.moved.kind, self.moved.slot), self.moved.encode())
        return await super().look(address, fresh=fresh)


async def test_the_record_of_a_permit_that_was_to_be_freed_says_what_came_of_it(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        def outcomes() -> list[str]:
            return [Attestation.decode(entry.value).outcome for key, entry in on.keyspace.entries.items()
                    if key.startswith(FLEET.operators())]

        permit = await hold(on, SessionState.UNKNOWN, 0)
        slow = Slow(on, session(SessionState.OPEN, slot=0, seat=0, request_id="r0"))
        freed, _ = await free(on, permit, slow)
        assert not freed
        assert [each.partition(":")[0] for each in outcomes()] == ["not freed"]
        await hold(on, SessionState.UNKNOWN, 0)
        assert (await free(on, permit, None))[0]
        assert sorted(each.partition(":")[0] for each in outcomes()) == ["freed", "not freed"]


async def test_only_unknown_permits_are_resolved_and_only_with_evidence(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        permit = await hold(on, SessionState.OPEN, 0)
        freed, why = await free(on, permit, None)
        assert not freed
        assert "OPEN" in why
        with pytest.raises(ValueError, match="evidence"):
            await free(on, permit, None, evidence=" ")
