"""One key below a ledger that cannot be read: it is named, and all that does not hang on it goes on."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest
from structlog.testing import capture_logs
from trio.testing import MockClock

from coordinator.audit import audit
from coordinator.inspect import resolve, session_rows, sum_up
from coordinator.ledger.invariants import check_ledger
from coordinator.ledger.record import SCHEMA, Kind, Session, Worker
from coordinator.ledger.states import SessionState
from coordinator.link import LinkRefused
from coordinator.policy_moves import left_of
from coordinator.publishing import read_standing
from coordinator.reaping import unknown_cases
from coordinator.store.api import Put
from tests.coordinator.stage import DB, NO_FENCE, Stage, stage
from tests.ledger.ground import BACKEND, FLEET, KEYS, NOW_US, record_exit, session, write

VALUES = {"garbage": b"\xc1damaged", "newer": msgpack.packb({"schema": SCHEMA + 1}), "nothing": b""}
SEATS = KEYS.seats("shop", "app")
STRAY = [
    f"{SEATS}zz", f"{SEATS}1", f"{SEATS}000001x", f"{KEYS.all_seats()}zz",
    f"{KEYS.policies()}zz1001", KEYS.policy(7), f"{KEYS.policies()}{'9' * 5000}",
    FLEET.workers(), FLEET.worker("zz"), f"{FLEET.worker('zz')}/1", FLEET.worker_exit("zz"),
    KEYS.receipt("zz"), KEYS.want("zz"),
    f"{KEYS.sessions()}zz", f"{KEYS.sessions()}zz/000001", f"{KEYS.sessions(Kind.MAIN)}zz1001",
    KEYS.session(Kind.MAIN, 3),
]


async def serves(on: Stage) -> None:
    """Workers come, get permits and give them back; what a dead one left is reaped."""
    async with on.worker("B") as worker:
        granted = await worker.reserve(db=DB)
        await worker.call("release", db=DB, permit=granted["permit"], proof="unused")
    write(on.keyspace, Put(KEYS.session(Kind.MAIN, 1), session(
        SessionState.RESERVED, owner="gone", slot=1, seat=9, request_id="r9").encode()))
    record_exit(on.keyspace, "gone")
    with capture_logs() as logs:
        await on.reconciler._over_all(lambda db: on.reconciler.reconcile(db, NO_FENCE))
    assert [line for line in logs if line["event"] == "something_failed"] == []
    assert (await on.states())[1] == SessionState.UNKNOWN


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
@pytest.mark.parametrize("key", STRAY, ids=lambda key: key[:40])
async def test_a_ledger_with_one_strange_key_registers_grants_and_reaps_and_names_the_key(
    tmp_path: Path, clock: MockClock, key: str, value: bytes
) -> None:
    async with stage(tmp_path) as on:
        write(on.keyspace, Put(key, value))
        await serves(on)
        (strange,) = (await on.ledger.snapshot()).strange
        assert strange.key == key
        assert strange.why
        assert (await read_standing(on.store, KEYS)).alias.active == 1


async def test_a_strange_key_is_logged_once_with_what_is_wrong(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        write(on.keyspace, Put(KEYS.receipt("zz"), b"\xc1"))
        with capture_logs() as logs:
            await on.reconciler.reconcile(DB, NO_FENCE)
            await on.reconciler.reconcile(DB, NO_FENCE)
        (line,) = [each for each in logs if each["event"] == "ledger_key_strange"]
        assert line["key"] == KEYS.receipt("zz")
        assert "not a msgpack map" in line["why"]


async def test_a_slot_that_cannot_be_read_is_held_never_granted_and_never_freed(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path, slots=1) as on:
        key = KEYS.session(Kind.MAIN, 0)
        write(on.keyspace, Put(key, b"\xc1"))
        async with on.worker("B") as worker:
            with pytest.raises(LinkRefused) as refused:
                await worker.reserve(db=DB, wait_seconds=0.1)
            assert refused.value.code == "full"
        record_exit(on.keyspace, "")
        for _ in range(3):
            await on.reconciler.reconcile(DB, NO_FENCE)
        snapshot = await on.ledger.snapshot()
        (held,) = snapshot.held(Kind.MAIN)
        assert key in on.keyspace.entries
        assert unknown_cases(snapshot) == []
        assert [each.what for each in check_ledger(snapshot, KEYS)] == ["unreadable"]
        assert left_of(snapshot, 5) == [held]
        (row,) = session_rows(DB, snapshot, {}, NOW_US)
        assert "unreadable" in row["awaited_proof"]
        assert sum_up(snapshot, [row]).free == 0
        (told,) = await resolve(on.store, FLEET, on.ledger, [held.permit], who="me", evidence="seen",
                                eyes=None, now_us=lambda: NOW_US)
        assert not told.freed
        assert "cannot be read" in told.why


async def test_a_death_is_kept_on_record_while_a_slot_cannot_be_read(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        write(on.keyspace, Put(KEYS.session(Kind.MAIN, 3), b"\xc1"))
        record_exit(on.keyspace, "gone")
        await on.reconciler.reconcile(DB, NO_FENCE)
        assert KEYS.worker_exit("gone") in on.keyspace.entries
        write(on.keyspace, deletes=(KEYS.session(Kind.MAIN, 3),))
        await on.reconciler.reconcile(DB, NO_FENCE)
        assert KEYS.worker_exit("gone") not in on.keyspace.entries


async def test_a_record_under_the_key_of_another_slot_is_strange(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        copied: Session = session(slot=2, seat=-1)
        write(on.keyspace, Put(KEYS.session(Kind.MAIN, 3), copied.encode()))
        snapshot = await on.ledger.snapshot()
        assert [each.why for each in snapshot.strange] == ["it says that it is main/2"]
        assert snapshot.find(copied.permit) is None
        assert [(each.permit.slot, bool(each.unreadable)) for each in snapshot.sessions] == [(3, True)]


async def test_a_worker_of_another_version_is_waited_for_and_named(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        write(on.keyspace, Put(KEYS.worker("new"), VALUES["newer"], on.keyspace.grant()))
        snapshot = await on.ledger.snapshot()
        assert isinstance(snapshot.workers["new"].worker, Worker)
        assert [each.key for each in snapshot.strange] == [KEYS.worker("new")]


async def test_an_audit_names_what_cannot_be_read(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        write(on.keyspace, Put(KEYS.receipt("zz"), b"\xc1"))
        seen = await audit(on.ledger, on.eyes, db=DB, hosts=[BACKEND.address], lease_ttl_seconds=5.0,
                           now_us=lambda: NOW_US)
        assert [line.partition(": ")[0] for line in seen.strange] == [KEYS.receipt("zz")]
        assert seen.exit_code == 0
        write(on.keyspace, Put(KEYS.session(Kind.MAIN, 3), b"\xc1"))
        seen = await audit(on.ledger, on.eyes, db=DB, hosts=[BACKEND.address], lease_ttl_seconds=5.0,
                           now_us=lambda: NOW_US)
        assert seen.exit_code == 1
