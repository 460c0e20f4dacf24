"""The judge of both ledgers: it must find what is wrong, and nothing that was only on its way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trio.testing import MockClock

from coordinator.audit import Audit, Pool, audit
from coordinator.ledger.attestation import Attestation, attestations_of
from coordinator.ledger.proofs import Look
from coordinator.ledger.record import Kind, Seat
from coordinator.ledger.states import SessionState
from coordinator.store.api import Entry
from tests.coordinator.stage import DB, FakeEyes, Server, Stage, row, stage
from tests.ledger.ground import BACKEND, FLEET, KEYS, NOW_US, TAG, session

OURS = [Pool("app", "app")]


async def hold(on: Stage, slot: int = 0, state: SessionState = SessionState.OPEN, **changes: Any) -> None:
    held = session(state, slot=slot, seat=slot, request_id=f"r{slot}", **changes)
    await on.put(KEYS.session(held.kind, slot), held.encode())
    await on.put(KEYS.seat(held.dbname, held.user, slot), Seat(Kind.MAIN, slot, f"r{slot}").encode())


async def look(on: Stage, eyes: FakeEyes | None = None) -> Audit:
    return await audit(on.ledger, eyes or on.eyes, db=DB, hosts=[BACKEND.address], pools=OURS,
                       lease_ttl_seconds=5.0, now_us=lambda: NOW_US)


def found(seen: Audit) -> list[str]:
    return [each.what for each in seen.differences]


async def test_two_ledgers_that_agree_are_clean(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        await hold(on)
        on.eyes.server.rows = [row(42, 5_000), row(7, 1, f"pooler:{TAG}:reaper")]
        seen = await look(on)
        assert (found(seen), seen.exit_code, seen.held, seen.ours) == ([], 0, 1, {BACKEND.address: 2})


async def test_a_session_without_permit_and_a_permit_without_session_are_found(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        await hold(on)
        on.eyes.server.rows = [row(43, 6_000)]
        seen = await look(on)
        assert found(seen) == ["permit_without_session", "session_without_permit"]
        assert (seen.exit_code, seen.as_dict()["exit_code"]) == (1, 1)


async def test_what_does_not_stand_in_two_passes_is_no_difference(tmp_path: Path, clock: MockClock) -> None:
    class Settling(FakeEyes):
        """The session that was on its way is there at the second look."""

        async def look(self, address: str, *, fresh: bool = False) -> Look:
            seen = await super().look(address, fresh=fresh)
            self.server.rows = [row(42, 5_000)]
            return seen

    async with stage(tmp_path) as on:
        await hold(on)
        assert found(await look(on, Settling())) == []


async def test_a_node_that_cannot_be_looked_at_fails_the_audit_without_inventing_differences(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        await hold(on)
        on.eyes.server.unreachable = True
        seen = await look(on)
        assert (found(seen), seen.exit_code, list(seen.not_audited)) == ([], 1, [BACKEND.address])
        on.eyes.server.unreachable, on.eyes.server.may_see_all = False, False
        seen = await look(on)
        assert (found(seen), seen.exit_code) == ([], 1)
        assert "GRANT" in seen.not_audited[BACKEND.address]


async def test_sessions_on_two_nodes_are_each_held_beside_their_own(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        other = "127.0.0.1:5433"
        await hold(on)
        await hold(on, 1, backend=replace(BACKEND, address=other))
        on.eyes.server.rows = [row(42, 5_000), row(1, 1, f"pooler:{TAG}:reaper")]
        on.eyes.servers[other] = Server(rows=[row(42, 5_000), row(2, 2, f"pooler:{TAG}:reaper")])
        assert found(await look(on)) == []
        on.eyes.servers[other].rows = []
        assert found(await look(on)) == ["permit_without_session"]


async def test_unknown_permits_are_listed_apart_until_they_are_too_old(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        await hold(on, 0, SessionState.UNKNOWN, state_since_us=NOW_US - 11_000_000)
        seen = await look(on)
        assert (found(seen), len(seen.unknown), seen.exit_code) == ([], 1, 0)
        await hold(on, 0, SessionState.UNKNOWN, state_since_us=NOW_US - 11_000_001)
        assert found(await look(on)) == ["unknown_too_long"]


async def test_other_peoples_sessions_are_counted_by_role_and_are_no_difference(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        on.eyes.server.rows = [replace(row(9, 9), user="cron", dbname="other")]
        seen = await look(on)
        assert (found(seen), seen.foreign) == ([], {"cron": 1})


async def test_what_operators_forced_in_this_ledger_is_shown_and_is_no_difference(
    tmp_path: Path, clock: MockClock
) -> None:
    kept = Attestation("root@a", f"free main/0.7 of {DB}", "node off", NOW_US, DB, "freed")
    other = Attestation("root@a", "freeze other/write", "", NOW_US, "other/write")
    older = Attestation("root@a", f"rebuild {DB}", "restored", NOW_US - 1)
    entries = [Entry(put.key, put.value, 1, 1) for put in (each.put(FLEET) for each in (kept, other, older))]
    entries.append(Entry("operator/broken", b"\xc1", 1, 1))
    async with stage(tmp_path) as on:
        seen = await audit(on.ledger, on.eyes, db=DB, hosts=[BACKEND.address], lease_ttl_seconds=5.0,
                           now_us=lambda: NOW_US, attested=attestations_of(entries, DB))
        assert (seen.exit_code, seen.attested) == (0, (kept, older))
        assert seen.as_dict()["attested"][0] == {
            "at_us": NOW_US, "who": "root@a", "what": f"free main/0.7 of {DB}", "evidence": "node off",
            "outcome": "freed"}


async def test_without_eyes_only_etcd_is_judged_and_no_host_is_called_audited(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        await hold(on)
        seen = await audit(
            on.ledger, None, db=DB, hosts=[], lease_ttl_seconds=5.0, now_us=lambda: NOW_US)
        assert (seen.differences, seen.exit_code) == ((), 1)
        assert seen.not_audited == {BACKEND.address: "nobody may log in there to look: no monitor is given"}
