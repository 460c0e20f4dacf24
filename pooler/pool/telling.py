"""What a worker tells of its permits once a lease cycle: which are in use, and which checkouts last too long.

Whoever holds a permit that no pool has any more will never use it nor give it back; the coordinator, which
knows what stands under this worker's name, finds it by what is not named here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from coordinator.ledger.record import Permit
from coordinator.ledger.states import SessionState
from pooler.pool.holder import Holder
from pooler.pool.holdings import Holdings, plain

HELD_MAX = 4096  # with more than that nothing is told of who holds them: some would seem to be missing
LATE_MAX = 64  # the latest

Key = tuple[str, Permit]  # database, permit


def tell_cycle(holdings: Holdings, holder: Holder, lost: Collection[Key]) -> dict[str, Any]:
    """`held` (not there: too many) and `late` of a heartbeat.

    Held are the permits of sessions that a pool has, and of those that are being opened or have begun to end:
    what is in no pool by right. `lost` are the others.
    """
    held = [[each.db, plain(each.permit)] for each in holdings.all() if (each.db, each.permit) not in lost]
    late = [{**asdict(each), "permit": plain(each.permit)} for each in holder.late_checkouts()[:LATE_MAX]]
    return {"late": late} if len(held) > HELD_MAX else {"held": held, "late": late}


def lost_permits(holdings: Holdings, holder: Holder) -> set[Key]:
    """Those that are open and in no pool at this moment. One that has just been opened may be among them."""
    pooled = holder.pooled()
    return {(each.db, each.permit) for each in holdings.all()
            if each.state is SessionState.OPEN and not each.ending and (each.db, each.permit) not in pooled}
