"""Moving an epoch until it is known what became of it: an answer that was lost is settled by asking again."""

from __future__ import annotations

from collections.abc import Callable

import trio

from coordinator.epoch import EpochEntry, NoEpoch, read_drain, swap_epoch
from coordinator.ledger.keys import DbKeys
from coordinator.ledger.record import Epoch
from coordinator.store.api import Compare, Put, Store, StoreUnavailable, StoreUnknown

POLL_SECONDS = 0.1

IsMine = Callable[[EpochEntry, int], bool]
"""(the epoch that stands, the lease of the drain key or 0) → whether an earlier try of ours wrote it."""


class MoveUnknown(Exception):
    """The write was sent and its answer was lost: it may have landed, or may land later."""


async def move_epoch(
    store: Store, keys: DbKeys, before: EpochEntry, after: Epoch, *compares: Compare, is_mine: IsMine,
    seconds_max: float, puts: tuple[Put, ...] = (), deletes: tuple[str, ...] = (),
) -> EpochEntry | None:
    """`swap_epoch`, repeated until its outcome is known; None: somebody else was faster, nothing was written.

    Repeating is safe: each try compares the revision that was read, so at most one takes effect. Raises
    StoreUnavailable (nothing was written) or MoveUnknown once `seconds_max` are over.
    """
    deadline, sent = trio.current_time() + seconds_max, False
    while True:
        try:
            won = await swap_epoch(store, keys, before, after, *compares, puts=puts, deletes=deletes)
            return won if won is not None else await _mine(store, keys, is_mine)
        except StoreUnknown as fault:
            sent, why = True, str(fault)
        except StoreUnavailable as fault:
            why = str(fault)
        if trio.current_time() >= deadline:
            raise MoveUnknown(why) if sent else StoreUnavailable(why)
        await pause()


async def _mine(store: Store, keys: DbKeys, is_mine: IsMine) -> EpochEntry | None:
    try:
        found, lease = await read_drain(store, keys)
    except NoEpoch:
        return None
    return found if is_mine(found, lease) else None


async def pause() -> None:
    """Before other processes' facts are read again."""
    await trio.sleep(POLL_SECONDS)  # noqa: TID251 - other processes' facts: read again
