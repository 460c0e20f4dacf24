"""A drain whose command was killed ends by itself, at the new server if that one was promoted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from trio.testing import MockClock

from coordinator.epoch import draining, read_epoch, swap_epoch
from coordinator.ledger.record import Backend, Epoch, EpochState
from tests.coordinator.stage import DB, Server, Stage, stage
from tests.ledger.ground import BACKEND, FLEET

STANDBY = replace(BACKEND, address="127.0.0.1:5433", in_recovery=True)


async def _abandon(on: Stage, target: Backend | None = STANDBY) -> Epoch:
    """The epoch as a killed command leaves it, its lease over."""
    keys = FLEET.db(DB)
    before = await read_epoch(on.store, keys)
    after = draining(before.epoch, timeout_seconds=1, now_us=0, reason="drain", target=target)
    await swap_epoch(on.store, keys, before, after)
    return before.epoch


async def _epoch(on: Stage) -> Epoch:
    return (await read_epoch(on.store, FLEET.db(DB))).epoch


async def test_a_promoted_target_serves_from_here_on(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        before = await _abandon(on)
        on.eyes.servers[STANDBY.address] = Server(replace(STANDBY, in_recovery=False, timeline=2))
        await on.reconcile()
        after = await _epoch(on)
        assert (after.number, after.state) == (before.number + 1, EpochState.ACTIVE)
        assert after.backend.address == STANDBY.address
        assert after.target is None


@pytest.mark.parametrize("seen", [
    Server(STANDBY), Server(replace(STANDBY, in_recovery=False, system_identifier="other")),
    Server(STANDBY, unreachable=True), Server(STANDBY, silent=True),
])
async def test_otherwise_the_old_epoch_grants_again(tmp_path: Path, clock: MockClock, seen: Server) -> None:
    async with stage(tmp_path) as on:
        before = await _abandon(on)
        on.eyes.servers[STANDBY.address] = seen
        await on.reconcile()
        after = await _epoch(on)
        assert (after.number, after.state) == (before.number, EpochState.ACTIVE)
        assert after.backend == before.backend
        assert after.target is None


async def test_a_drain_of_an_older_version_names_no_target(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        await _abandon(on, target=None)
        await on.reconcile()
        assert (await _epoch(on)).state is EpochState.ACTIVE
