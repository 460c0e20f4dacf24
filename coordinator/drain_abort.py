"""An operator gives up a drain that another command carries out: only before that orders the promotion."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.epoch import active_again, allowing_abort, read_command
from coordinator.epoch_moves import MoveUnknown, move_epoch
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.record import EpochState
from coordinator.store.api import Store, StoreUnavailable, StoreUnknown

SETTLE_SECONDS = 5.0
ROUNDS_MAX = 8  # of read, decide, lose


async def abort(store: Store, keys: FleetKeys, db: str, *, now_us: Callable[[], int]) -> bool:
    """Gives a drain that is under way up: the old epoch grants again. False: none is under way.

    Raises MayBePromoted once its promotion was ordered; StoreUnavailable, StoreUnknown, NoEpoch.
    """
    db_keys = keys.db(db)
    for _ in range(ROUNDS_MAX):
        before, command = await read_command(store, db_keys)
        if before.epoch.state is not EpochState.DRAINING:
            return False
        compare = allowing_abort(db_keys, before.epoch, command)
        after = active_again(before.epoch, now_us=now_us(), reason="aborted by an operator")
        try:
            if await move_epoch(
                    store, db_keys, before, after, compare, deletes=(db_keys.drain(),),
                    seconds_max=SETTLE_SECONDS, is_mine=lambda found, _: found.epoch == after):  # noqa: B023
                return True
        except MoveUnknown as fault:
            raise StoreUnknown(str(fault)) from None
    raise StoreUnavailable("others were faster")
