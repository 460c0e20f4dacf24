"""An operator gives up a drain that another command carries out: only before that orders the promotion."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.epoch import active_again, allow_abort, read_command
from coordinator.epoch_moves import MoveUnknown, move_epoch
from coordinator.ledger.attestation import Attestation
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.record import EpochState
from coordinator.store.api import Store, StoreUnavailable, StoreUnknown

SETTLE_SECONDS = 5.0
ROUNDS_MAX = 8  # of read, decide, lose


async def abort(
    store: Store, keys: FleetKeys, db: str, *, now_us: Callable[[], int], who: str = "", evidence: str = "",
) -> bool:
    """Gives a drain that is under way up: the old epoch grants again. False: none is under way.

    `evidence`: how `who` knows that the target is no primary and will be none; kept for ever. It counts once
    the command that ordered the promotion is gone. Raises MayBePromoted where the promotion was ordered and
    that does not help; StoreUnavailable, StoreUnknown, NoEpoch.
    """
    db_keys = keys.db(db)
    for _ in range(ROUNDS_MAX):
        before, command = await read_command(store, db_keys)
        if before.epoch.state is not EpochState.DRAINING:
            return False
        allow_abort(before.epoch, command, attested=bool(evidence))
        what = f"abort of the drain of {db} epoch {before.epoch.number}, whose promotion was ordered"
        word = (Attestation(who, what, evidence, now_us(), db).put(keys),) if before.epoch.promotes else ()
        after = active_again(before.epoch, now_us=now_us(), reason="aborted by an operator")
        try:
            if await move_epoch(
                    store, db_keys, before, after, puts=word, deletes=(db_keys.drain(),),
                    seconds_max=SETTLE_SECONDS, is_mine=lambda found, _: found.epoch == after):  # noqa: B023
                return True
        except MoveUnknown as fault:
            raise StoreUnknown(str(fault)) from None
    raise StoreUnavailable("others were faster")
