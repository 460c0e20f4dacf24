"""Two ledgers of one fleet at one server: each session is one ledger's, and the other leaves it alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from coordinator.audit import Audit, Pool, audit
from coordinator.counting import Counting
from coordinator.founding import Founder
from coordinator.granting import Granting
from coordinator.ledger.invariants import reaper_name
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.record import Alias, LedgerHead, LedgerState, Permit
from coordinator.ledger.states import SessionState
from coordinator.link import Args
from coordinator.link_values import parse_permit, permit_list
from coordinator.policy import encode_policy, load_policy
from coordinator.rebuild import Rebuilder, order_rebuild
from coordinator.recovering import Recovering
from coordinator.registry import Registry
from coordinator.remembered import Remembered
from coordinator.serve_workers import WorkerServer
from coordinator.spec import DatabaseSpec, Monitor
from coordinator.store.api import Put
from coordinator.view import Views
from tests.coordinator.parts import Worker, policy_text
from tests.coordinator.stage import DB, NO_FENCE, TTL_SECONDS, Stage, no_rows, row, stage
from tests.ledger.ground import BACKEND, FLEET, KEYS, NOW_US, epoch, session, write

READ = "orders/read"
READ_KEYS = FLEET.db(READ)
READ_TAG = "efgh5678"
AT_SERVER = {"system_identifier": BACKEND.system_identifier, "timeline": 1, "address": BACKEND.address,
             "postmaster_start_us": BACKEND.postmaster_start_us, "in_recovery": False}


def spec_of(db: str) -> DatabaseSpec:
    return DatabaseSpec(db, db.partition("/")[2], "app", (BACKEND.address,), monitor=Monitor("m", "p"),
                        users=("app",))


SPECS = {DB: (spec_of(DB),), READ: (spec_of(READ),)}


@dataclass
class Two:
    """A stage of which the ledger has a neighbour; what rebuilds moves when a test says so."""

    on: Stage
    ledgers: dict[str, Ledger]
    recovering: Recovering
    rebuilder: Rebuilder

    async def wipe(self) -> None:
        self.on.keyspace.entries.clear()
        await self.on.views.refresh()

    async def order(self, db: str) -> None:
        await order_rebuild(self.on.store, FLEET, db, self.ledgers[db].seen, who="me", evidence="wiped",
                            now_us=lambda: NOW_US)
        document = encode_policy(load_policy(policy_text(4, db=db))[1])
        keys = FLEET.db(db)
        write(self.on.keyspace, Put(keys.epoch(), epoch()), Put(keys.policy(1), document),
              Put(keys.alias(), Alias(1).encode()))
        await self.on.views.refresh()

    async def rebuild(self, db: str) -> None:
        """From its order to the end; the workers are heard first."""
        await self.order(db)
        assert await self.recovering.recover(self.on.views.views[db]) == 0
        for _ in range(4):
            why = await self.rebuilder.step(db, NO_FENCE)
            await self.on.views.refresh()
            if not why:
                return
        raise AssertionError(why)

    async def standing(self, db: str) -> dict[int, str]:
        """State by pid."""
        sessions = (await self.ledgers[db].snapshot()).sessions
        return {held.session.pid: str(held.session.state) for held in sessions}

    async def audit(self, db: str) -> Audit:
        return await audit(
            self.ledgers[db], self.on.eyes, db=db, hosts=[BACKEND.address], pools=[Pool("app", "app")],
            lease_ttl_seconds=TTL_SECONDS, now_us=lambda: NOW_US)


@asynccontextmanager
async def two(run_dir: Path, **spec: Any) -> AsyncIterator[Two]:
    async with stage(run_dir, **spec) as on:
        document = encode_policy(load_policy(policy_text(4, db=READ))[1])
        write(on.keyspace,
              Put(READ_KEYS.ledger(), LedgerHead("second", LedgerState.ACTIVE, READ_TAG).encode()),
              Put(READ_KEYS.epoch(), epoch()), Put(READ_KEYS.policy(1), document),
              Put(READ_KEYS.alias(), Alias(1).encode()))
        known = Remembered(run_dir)
        ledgers = {db: Ledger(on.store, FLEET.db(db), FLEET, lambda: NOW_US, memory=known.memory(db))
                   for db in (DB, READ)}
        on.views = Views(on.store, FLEET, ledgers, known, ttl_seconds=TTL_SECONDS)
        on.registry = Registry(on.store, FLEET, ledgers, host="host", machine_id="m", kernel_boot_id="k",
                               ttl_seconds=TTL_SECONDS, now_us=lambda: NOW_US)
        on.granting = Granting(on.store, on.views, ledgers, on.registry, host="host")
        on.workers = WorkerServer(
            on.store, on.views, ledgers, on.registry, on.granting, host="host", ttl_seconds=TTL_SECONDS,
            rows=no_rows)
        recovering = Recovering(
            on.store, on.views, ledgers, on.registry, host="host", now_us=lambda: NOW_US)
        rebuilder = Rebuilder(on.store, on.views, ledgers, SPECS, on.eyes, now_us=lambda: NOW_US)
        await on.views.refresh()
        yield Two(on, ledgers, recovering, rebuilder)


async def hold(
    t: Two, db: str, pid: int, state: SessionState = SessionState.OPEN, owner: str = "A"
) -> Permit:
    """A permit in etcd, in the slot of its pid's last digit."""
    slot = pid % 10
    held = session(state, slot=slot, seat=-1, pid=pid, backend_start_us=pid * 10, request_id=f"r{pid}",
                   owner=owner)
    await t.on.put(FLEET.db(db).session(held.kind, slot), held.encode())
    return held.permit


def holds(worker: Worker, opening: int = 0, **pids: tuple[int, ...]) -> None:
    """What it says of itself: open sessions by ledger (`write`, `read`)."""
    held = {(f"orders/{role}", Permit.parse(f"main/{n}.7")): pid
            for role, mine in pids.items() for n, pid in enumerate(mine)}

    def recover(args: Args) -> Args:
        mine = {permit: pid for (db, permit), pid in held.items() if db == args["db"]}
        return {"opening": opening if args["db"] == READ else 0, "permits": list(map(permit_list, mine)),
                "epoch": None, "sessions": [
                    {"permit": permit_list(permit), "dbname": "app", "user": "app", "seats": 9, "pid": pid,
                     "backend_start_us": pid * 10, "backend": AT_SERVER, "epoch": 1}
                    for permit, pid in mine.items()]}

    def moved(args: Args) -> Args:
        for old, new in args["moves"]:
            pid = held.pop((args["db"], parse_permit(old)))
            if new is not None:
                held[args["db"], parse_permit(new)] = pid
        return {"lost": []}

    worker.answers.update(recover=recover, moved=moved)


@pytest.mark.parametrize("order", [(DB, READ), (READ, DB)])
async def test_when_both_were_lost_each_gets_its_living_sessions_and_no_other_whichever_is_rebuilt_first(
    tmp_path: Path, clock: MockClock, order: tuple[str, str]
) -> None:
    async with two(tmp_path) as t, t.on.worker("A") as worker:
        holds(worker, write=(11, 12), read=(21, 22))
        t.on.eyes.server.rows = [row(pid, pid * 10) for pid in (11, 12, 21, 22)]
        await t.wipe()
        for db in order:
            await t.rebuild(db)
            seen = await t.audit(db)
            assert (seen.differences, seen.ours[BACKEND.address]) == ((), 2), "with the other still lost"
            assert (seen.elsewhere, seen.foreign) == ({BACKEND.address: 2}, {})
        assert await t.standing(DB) == {11: "OPEN", 12: "OPEN"}
        assert await t.standing(READ) == {21: "OPEN", 22: "OPEN"}
        assert [(await t.audit(db)).exit_code for db in order] == [0, 0]


async def test_a_session_that_nobody_claims_is_booked_once(tmp_path: Path, clock: MockClock) -> None:
    async with two(tmp_path) as t:
        t.on.eyes.server.rows = [row(31, 310)]
        await t.wipe()
        await t.rebuild(DB)
        await t.rebuild(READ)
        assert (await t.standing(DB), await t.standing(READ)) == ({31: "SESSION_UNKNOWN"}, {})


async def test_a_session_booked_in_the_wrong_ledger_does_not_hold_up_the_rebuild_of_its_own(
    tmp_path: Path, clock: MockClock
) -> None:
    async with two(tmp_path) as t:
        t.on.eyes.server.rows = [row(21, 210)]
        await t.wipe()
        await t.rebuild(DB)  # its worker was not there yet
        async with t.on.worker("A") as worker:
            holds(worker, read=(21,))
            await t.rebuild(READ)
        assert await t.standing(READ) == {21: "OPEN"}
        assert [(await t.audit(db)).differences for db in (DB, READ)] == [(), ()]


async def test_a_worker_that_still_opens_sessions_of_a_lost_neighbour_is_asked_again(
    tmp_path: Path, clock: MockClock
) -> None:
    async with two(tmp_path) as t, t.on.worker("A") as worker:
        holds(worker, opening=1, read=(21,))
        await t.wipe()
        await t.order(DB)
        assert await t.recovering.recover(t.on.views.views[DB]) == 1
        assert "workers A" in await t.rebuilder.step(DB, NO_FENCE)
        holds(worker, read=(21, 22))
        assert await t.recovering.recover(t.on.views.views[DB]) == 0


async def test_what_a_worker_told_outlives_its_lease_as_long_as_the_worker_does(
    tmp_path: Path, clock: MockClock
) -> None:
    async with two(tmp_path) as t, t.on.worker("A") as worker:
        holds(worker, read=(21,))
        t.on.eyes.server.rows = [row(21, 210)]
        await t.wipe()
        await t.rebuild(DB)
        t.on.expire("A")
        assert FLEET.claim("A") not in t.on.keyspace.entries
        await t.on.registry.register(t.on.registry.workers["A"])
        assert (await t.audit(DB)).differences == ()


async def test_the_sessions_of_a_neighbour_that_grants_are_no_difference_and_not_booked(
    tmp_path: Path, clock: MockClock
) -> None:
    async with two(tmp_path) as t:
        await hold(t, READ, 21)
        t.on.eyes.server.rows = [
            row(21, 210), row(22, 220, f"pooler:{READ_TAG}:m1.9"), row(23, 230, reaper_name(READ_TAG))]
        seen = await t.audit(DB)
        assert (seen.differences, seen.ours, seen.exit_code) == ((), {BACKEND.address: 0}, 0)
        assert (seen.elsewhere, seen.foreign) == ({BACKEND.address: 2}, {})  # the leader's look is nobody's
        del t.on.keyspace.entries[KEYS.ledger()]
        await t.on.views.refresh()
        await t.rebuild(DB)
        assert await t.standing(DB) == {}


async def test_a_session_of_nobody_is_still_a_difference(tmp_path: Path, clock: MockClock) -> None:
    async with two(tmp_path) as t:
        await hold(t, READ, 21)
        t.on.eyes.server.rows = [row(21, 999)]  # its pid, and another process
        assert [each.what for each in (await t.audit(DB)).differences] == ["session_without_permit"]


@pytest.mark.parametrize(("claimed", "terminated"), [
    ("by permit", []), ("by a worker", []), ("by what cannot be read", []), ("as found, too", [21]),
    ("by nobody", [21])])
async def test_what_another_ledger_has_is_not_terminated_for_this_one(
    tmp_path: Path, clock: MockClock, claimed: str, terminated: list[int]
) -> None:
    async with two(tmp_path, reconcile="terminate", unknown_terminate_after_seconds=0.0) as t, \
            t.on.worker("A") as worker:
        t.on.eyes.server.rows = [row(21, 210)]
        permit = await hold(t, DB, 21, SessionState.UNKNOWN, owner="")
        if claimed == "by permit":
            await hold(t, READ, 21)
        elif claimed == "by a worker":
            holds(worker, read=(21,))
            head = LedgerHead("first", LedgerState.ACTIVE, "abcd1234", rebuilt="1-x")
            await t.on.put(KEYS.ledger(), head.encode())
            await t.on.views.refresh()
            del t.on.keyspace.entries[READ_KEYS.ledger()]
            await t.recovering.recover(t.on.views.views[DB])
        elif claimed == "by what cannot be read":
            await t.on.put(FLEET.claim("B"), b"\xc1")
        elif claimed == "as found, too":
            await hold(t, READ, 21, SessionState.UNKNOWN, owner="")
        await t.on.reconcile()
        assert t.on.eyes.terminated == terminated
        assert (str(permit) in t.on.reconciler.backends.awaiting[DB])


async def test_the_sessions_of_another_ledger_are_no_strangers(tmp_path: Path, clock: MockClock) -> None:
    async with two(tmp_path) as t:
        counting = Counting(t.on.eyes, {DB: t.ledgers[DB]}, lambda: t.on.views.views, ttl_seconds=TTL_SECONDS)
        await hold(t, READ, 21)  # a ledger that this host does not have
        t.on.eyes.server.rows = [row(21, 210), row(22, 220, f"pooler:{READ_TAG}:m1.9"), row(31, 310)]
        await counting.count()
        assert counting.census[BACKEND.address].strangers == 1


@pytest.mark.parametrize(("pid", "state"), [(21, LedgerState.ACTIVE), (31, LedgerState.RECOVERING)])
async def test_a_ledger_founded_beside_another_recovers_only_what_is_not_that_ones(
    tmp_path: Path, clock: MockClock, pid: int, state: LedgerState
) -> None:
    async with two(tmp_path) as t:
        await hold(t, READ, 21)
        t.on.eyes.server.rows = [row(pid, pid * 10)]
        for key in (KEYS.ledger(), KEYS.epoch()):
            del t.on.keyspace.entries[key]
        views = Views(t.on.store, FLEET, [DB], Remembered(tmp_path / "new"), ttl_seconds=TTL_SECONDS)
        await views.refresh()
        founder = Founder(t.on.store, FLEET, {DB: SPECS[DB]}, t.on.eyes, now_us=lambda: 0)
        assert await founder.found(views.views[DB])
        assert LedgerHead.decode(t.on.keyspace.entries[KEYS.ledger()].value).state is state
