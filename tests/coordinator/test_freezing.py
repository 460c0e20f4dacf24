"""A frozen ledger grants nothing but to commands, also not to who asked before; thawed it goes on."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.freezing import NoLedger, set_frozen
from coordinator.ledger.attestation import attestations_of
from coordinator.ledger.ledger import Granted
from coordinator.ledger.record import Kind
from coordinator.ledger.rules import Code, Refused
from coordinator.link import LinkRefused
from pooler.pool.ledger_view import LedgerView
from tests.coordinator.stage import DB, Stage, stage
from tests.ledger.ground import FLEET, NOW_US, ask, register


async def freeze(on: Stage, frozen: bool = True, db: str = DB) -> bool:
    return await set_frozen(on.store, FLEET, db, frozen, who="root@a", evidence="looked at",
                            now_us=lambda: NOW_US)


async def test_nothing_is_granted_while_frozen_but_to_commands(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        register(on.keyspace, "A")
        assert isinstance(await on.ledger.reserve(ask("r1", owner="A")), Granted)
        assert await freeze(on)
        refused = await on.ledger.reserve(ask("r2", owner="A"))
        assert isinstance(refused, Refused)
        assert (refused.code, refused.settled, "root@a" in refused.detail) == (Code.FROZEN, True, True)
        assert isinstance(await on.ledger.reserve(ask("r3", owner="A", kind=Kind.ADMIN, seats=0)), Granted)
        assert await freeze(on, False)
        assert isinstance(await on.ledger.reserve(ask("r4", owner="A")), Granted)


async def test_it_is_said_once_by_whom_and_why(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        assert [await freeze(on), await freeze(on), await freeze(on, False), await freeze(on, False)] == [
            True, False, True, False]
        kept = attestations_of((await on.store.range(FLEET.operators())).entries, DB)
        assert sorted(each.what for each in kept) == [f"freeze {DB}", f"thaw {DB}"]
        assert {(each.who, each.evidence) for each in kept} == {("root@a", "looked at")}
        with pytest.raises(NoLedger, match="no ledger other"):
            await freeze(on, db="other")


async def test_who_waits_is_served_when_it_is_thawed(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        await freeze(on)
        await worker.until(lambda w: w.ledgers[DB]["frozen"] == "root@a")
        with pytest.raises(LinkRefused) as refused:
            await worker.reserve(1.0, db=DB)
        assert refused.value.code == "frozen"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(worker.reserve, 60.0, db=DB))
            await wait_all_tasks_blocked()
            await freeze(on, False)
        assert len(worker.permits) == 1
        assert worker.told_of("shed") == []


def test_a_worker_closes_nothing_by_choice_while_its_ledger_is_frozen() -> None:
    told = {"state": "ACTIVE", "reachable": True, "epoch": {"number": 1, "state": "ACTIVE"}}
    views = [LedgerView.parse("db", {**told, "frozen": who}) for who in ("", "root@a")]
    assert [(view.grows, view.serving, view.whole) for view in views] == [
        (True, True, True), (False, True, True)]
