"""An abort of a drain: it gives the old epoch back, but not beside a target that may be a primary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import trio
from trio.testing import MockClock

from coordinator.drain_abort import abort
from coordinator.drain_target import Code
from coordinator.epoch import EpochEntry, MayBePromoted, note_promotion, ordering, read_epoch
from coordinator.ledger.record import EpochState
from coordinator.store.api import Put, Txn
from tests.coordinator.stage import DB, Stage, stage
from tests.coordinator.test_drain import hold
from tests.coordinator.test_drain_faults import STANDBY, Deaf, Fleet
from tests.ledger.ground import FLEET, KEYS, NOW_US


async def give_up(on: Stage) -> bool:
    return await abort(on.store, FLEET, DB, now_us=lambda: NOW_US)


async def test_an_abort_whose_answer_is_lost_is_settled(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        await hold(on)
        fleet = Fleet(on)

        async def abort_later() -> None:
            with trio.move_on_after(1.0):
                await trio.sleep_forever()
            assert await abort(Deaf(on.store, Random(0)), FLEET, DB, now_us=lambda: NOW_US)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(abort_later)
            outcome = await fleet.drain()
        assert "aborted" in outcome.text
        assert not fleet.is_promoted()
        assert (await fleet.epoch()).state == EpochState.ACTIVE


async def test_once_the_promotion_is_ordered_an_abort_is_refused_and_the_drain_ends_by_itself(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        fleet = Fleet(on)

        async def promote() -> int:
            for when in ("before", "after"):
                with pytest.raises(MayBePromoted, match="ends by itself"):
                    await give_up(on)
                assert (await fleet.epoch()).state == EpochState.DRAINING, when
                await fleet.promote()
            return 0

        outcome = await fleet.drain(promote=promote)
        assert outcome.code is Code.DRAINED
        assert (await fleet.epoch()).backend.address == STANDBY.address


async def test_an_abort_and_the_promotion_at_the_same_time_one_of_them_wins(tmp_path: Path) -> None:
    """Each reads, then writes: whoever writes first, the other finds its compare broken."""
    async with stage(tmp_path) as on:
        stopped, lease = await draining(on)
        noted = await note_promotion(on.store, KEYS, stopped, lease)
        assert noted is not None
        with pytest.raises(MayBePromoted):
            await give_up(on)
        assert await note_promotion(on.store, KEYS, stopped, lease) == noted  # its answer was lost
        assert (await read_epoch(on.store, KEYS)).epoch == ordering(stopped.epoch)

    async with stage(tmp_path) as on:
        stopped, lease = await draining(on)
        assert await give_up(on)
        assert not await note_promotion(on.store, KEYS, stopped, lease)


async def test_a_drain_whose_command_is_gone_is_the_leaders_to_end(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        fleet = Fleet(on)
        _, lease = await draining(on)
        await fleet.promote()
        on.store.expire(lease)
        with pytest.raises(MayBePromoted, match="leader"):
            await give_up(on)
        assert (await fleet.settle()).backend.address == STANDBY.address


async def test_a_drain_to_a_server_that_is_a_primary_already_can_be_given_up(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        before = await read_epoch(on.store, KEYS)
        primary = replace(STANDBY, in_recovery=False)
        await on.put(KEYS.epoch(), replace(before.epoch, state=EpochState.DRAINING, target=primary).encode())
        assert await give_up(on)


async def draining(on: Stage) -> tuple[EpochEntry, int]:
    """An epoch that a command stopped, as it stands, and the command's lease."""
    before, lease = await read_epoch(on.store, KEYS), on.keyspace.grant()
    drained = replace(before.epoch, state=EpochState.DRAINING, target=STANDBY)
    await on.store.txn(Txn(puts=(Put(KEYS.epoch(), drained.encode()), Put(KEYS.drain(), b"", lease))))
    return await read_epoch(on.store, KEYS), lease
