"""A drain whose command was killed ends by itself, at the new server if that one was promoted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from trio.testing import MockClock

from coordinator.drain_abort import abort
from coordinator.epoch import MayBePromoted, draining, ordering, read_epoch, swap_epoch
from coordinator.ledger.attestation import Attestation
from coordinator.ledger.record import Backend, Epoch, EpochState
from tests.coordinator.stage import DB, Server, Stage, stage
from tests.ledger.ground import BACKEND, FLEET, NOW_US

STANDBY = replace(BACKEND, address="127.0.0.1:5433", in_recovery=True)


async def _abandon(on: Stage, target: Backend | None = STANDBY, *, promotes: bool = False) -> Epoch:
    """The epoch as a killed command leaves it, its lease over."""
    keys = FLEET.db(DB)
    before = await read_epoch(on.store, keys)
    after = draining(before.epoch, timeout_seconds=1, now_us=0, reason="drain", target=target)
    await swap_epoch(on.store, keys, before, ordering(after) if promotes else after)
    return before.epoch


async def _grants_again(on: Stage, before: Epoch) -> None:
    after = await _epoch(on)
    assert (after.number, after.state) == (before.number, EpochState.ACTIVE)
    assert after.backend == before.backend
    assert after.target is None


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


ELSEWHERE = replace(STANDBY, in_recovery=False, system_identifier="other")
UNSEEN = [Server(STANDBY, unreachable=True), Server(STANDBY, silent=True), Server(ELSEWHERE),
          Server(replace(ELSEWHERE, in_recovery=True))]


@pytest.mark.parametrize("seen", [Server(STANDBY), *UNSEEN])
async def test_where_no_promotion_was_ordered_the_old_epoch_grants_again(
    tmp_path: Path, clock: MockClock, seen: Server
) -> None:
    async with stage(tmp_path) as on:
        before = await _abandon(on)
        on.eyes.servers[STANDBY.address] = seen
        await on.reconcile()
        await _grants_again(on, before)


async def test_where_it_was_ordered_the_old_epoch_grants_again_once_the_target_is_seen_in_recovery(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        before = await _abandon(on, promotes=True)
        on.eyes.servers[STANDBY.address] = Server(STANDBY)
        await on.reconcile()
        await _grants_again(on, before)
        assert not (await _epoch(on)).promotes


@pytest.mark.parametrize("seen", UNSEEN)
async def test_where_it_was_ordered_and_the_target_cannot_be_seen_nobody_grants_and_that_is_told_once(
    tmp_path: Path, clock: MockClock, seen: Server
) -> None:
    async with stage(tmp_path) as on:
        await _abandon(on, promotes=True)
        on.eyes.servers[STANDBY.address] = seen
        with capture_logs() as logs:
            for _ in range(3):
                await on.reconcile()
                assert (await _epoch(on)).state is EpochState.DRAINING
        assert [each["event"] for each in logs].count("drain_undecided") == 1
        owners = on.reconciler.owners
        assert "promotion" in owners.undecided[DB]
        on.eyes.servers[STANDBY.address] = Server(replace(STANDBY, in_recovery=False, timeline=2))
        await on.reconcile()
        assert (await _epoch(on)).backend.address == STANDBY.address
        assert owners.undecided == {}


async def test_an_operators_word_that_the_target_is_no_primary_opens_the_old_epoch_and_is_kept(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        before = await _abandon(on, promotes=True)
        on.eyes.servers[STANDBY.address] = Server(STANDBY, unreachable=True)
        await on.reconcile()
        with pytest.raises(MayBePromoted, match="evidence"):
            await abort(on.store, FLEET, DB, now_us=lambda: NOW_US)
        assert await abort(on.store, FLEET, DB, now_us=lambda: NOW_US, who="ann", evidence="its disk is out")
        await _grants_again(on, before)
        await on.reconcile()
        assert on.reconciler.owners.undecided == {}
        [entry] = (await on.store.range(FLEET.operator(""))).entries
        word = Attestation.decode(entry.value)
        assert (word.who, word.evidence, word.database) == ("ann", "its disk is out", DB)


async def test_a_drain_of_an_older_version_names_no_target(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        await _abandon(on, target=None)
        await on.reconcile()
        assert (await _epoch(on)).state is EpochState.ACTIVE
