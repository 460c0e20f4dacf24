"""A drain whose etcd does not answer, or answers too late: one server serves, a second drain carries on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from coordinator.drain import DrainOutcome, drain
from coordinator.drain_target import Code, Order
from coordinator.epoch import read_epoch
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.record import Epoch
from coordinator.store.api import Lost, StoreUnavailable, StoreUnknown, Txn, Won
from coordinator.store.faulty import Faults, FaultyStore
from tests.coordinator.stage import DB, Server, Stage, stage
from tests.ledger.ground import BACKEND, FLEET, KEYS, NOW_US

STANDBY = replace(BACKEND, address="127.0.0.1:5433", in_recovery=True)
BAD = Faults(unavailable=0.25, unknown_applied=0.1, unknown_not_applied=0.1, unknown_late=0.1)


class Fleet:
    """A stage with a standby, and a command's own store whose faults are the test's."""

    def __init__(self, on: Stage, seed: int = 0) -> None:
        self.on = on
        self.store = FaultyStore(on.store, Random(seed), Faults())
        self.standby = on.eyes.servers[STANDBY.address] = Server(STANDBY)

    async def promote(self) -> int:
        await trio.lowlevel.checkpoint()
        self.standby.backend = replace(STANDBY, in_recovery=False, timeline=2)
        return 0

    async def drain(self, **order: Any) -> DrainOutcome:
        wanted: dict[str, Any] = {"role": "write", "hosts": (BACKEND.address,), "target": STANDBY.address,
                                  "timeout_seconds": 3.0, "promote": self.promote}
        ledger = Ledger(self.store, KEYS, FLEET, lambda: NOW_US)
        return await drain(self.store, FLEET, ledger, self.on.eyes, Order(db=DB, **(wanted | order)),
                           progress=lambda line: None, now_us=lambda: NOW_US)

    async def epoch(self) -> Epoch:
        return (await read_epoch(self.on.store, KEYS)).epoch

    async def settle(self) -> Epoch:
        """The command is gone with its lease, what was on its way has landed, the leader has looked."""
        self.store.faults = Faults()
        self.store.down = False
        await self.store.land_late()
        key = self.on.keyspace.entries.get(KEYS.drain())
        if key is not None:
            self.on.store.expire(key.lease)
        await self.on.reconcile()
        return await self.epoch()

    def is_promoted(self) -> bool:
        return not self.standby.backend.in_recovery


@pytest.mark.parametrize("seed", range(40))
async def test_whatever_etcd_does_one_server_serves_and_a_second_drain_carries_on(
    tmp_path: Path, clock: MockClock, seed: int
) -> None:
    async with stage(tmp_path) as on:
        fleet = Fleet(on, seed)
        fleet.store.faults = BAD
        outcome = None
        try:
            outcome = await fleet.drain()
        except StoreUnavailable:
            assert (await fleet.epoch()).number == 1
            assert not fleet.is_promoted()
        stands = await fleet.epoch()
        if fleet.is_promoted():  # the old one never grants beside it, not even until the leader looks
            assert (stands.number, stands.state) != (1, "ACTIVE")
        if outcome is not None and "epoch 1 is active again" in outcome.text:
            assert (stands.number, stands.state) == (1, "ACTIVE")
        after = await fleet.settle()
        assert after.state == "ACTIVE"
        assert after.backend.address == (STANDBY if fleet.is_promoted() else BACKEND).address
        if outcome is not None and outcome.code is Code.DRAINED:
            assert after.number == 2
        again = await fleet.drain()
        assert again.code is Code.DRAINED
        assert (await fleet.epoch()).backend.address == STANDBY.address


async def test_etcd_away_from_the_promotion_on_leaves_the_next_step_to_the_leader(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        fleet = Fleet(on)

        async def promote() -> int:
            fleet.store.down = True
            return await fleet.promote()

        outcome = await fleet.drain(promote=promote)
        assert outcome.code is Code.TIMED_OUT
        assert "etcd does not answer" in outcome.text
        assert "active again" not in outcome.text
        assert (await fleet.epoch()).state == "DRAINING"
        after = await fleet.settle()
        assert (after.number, after.state, after.backend.address) == (2, "ACTIVE", STANDBY.address)


@pytest.mark.parametrize("code", [0, 7])
async def test_a_target_that_was_promoted_after_all_is_not_served_beside_the_old_one(
    tmp_path: Path, clock: MockClock, code: int
) -> None:
    """Its command ended with a fault, or it came too late for the drain's time."""
    async with stage(tmp_path) as on:
        fleet = Fleet(on)

        async def promote() -> int:
            await fleet.promote()
            if code == 0:
                await trio.sleep_forever()
            return code

        outcome = await fleet.drain(promote=promote)
        assert (outcome.code, (await fleet.epoch()).state) == (Code.TIMED_OUT, "DRAINING")
        assert (await fleet.settle()).backend.address == STANDBY.address


async def test_nothing_is_promoted_once_the_lease_of_the_drain_is_gone(
    tmp_path: Path, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path) as on:
        fleet = Fleet(on)
        lease = on.store.lease

        async def short(ttl_seconds: float, *, lease_id: int = 0) -> Any:
            given = await lease(ttl_seconds, lease_id=lease_id)

            async def keep_alive() -> bool:
                await trio.lowlevel.checkpoint()
                return False

            monkeypatch.setattr(given, "keep_alive", keep_alive, raising=False)
            return given

        monkeypatch.setattr(on.store, "lease", short)
        outcome = await fleet.drain()
        assert (outcome.code, fleet.is_promoted()) == (Code.TIMED_OUT, False)
        assert "nothing was promoted" in outcome.text
        assert "epoch 1 is active again" in outcome.text


class Deaf(FaultyStore):
    """Each write that wins is carried out or not, as told, and not answered."""

    applies = True

    async def txn(self, txn: Txn) -> Won | Lost:
        if not txn.puts:
            return await super().txn(txn)
        if self.applies and isinstance(lost := await super().txn(txn), Lost):
            return lost
        raise StoreUnknown("no answer")


@pytest.mark.parametrize("applies", [True, False])
async def test_a_switch_whose_answer_is_lost_is_settled_or_said_to_be_unknown(
    tmp_path: Path, clock: MockClock, applies: bool
) -> None:
    async with stage(tmp_path) as on:
        fleet = Fleet(on)
        await fleet.promote()
        fleet.store = Deaf(on.store, Random(0))
        fleet.store.applies = applies
        outcome = await fleet.drain(switch_first=True)
        assert outcome.code is (Code.DRAINED if applies else Code.TIMED_OUT)
        assert applies or "is not known" in outcome.text
        fleet.store = FaultyStore(on.store, Random(0))
        again = await fleet.drain(switch_first=True)
        assert again.code is Code.DRAINED
        assert (await fleet.epoch()).backend.address == STANDBY.address
