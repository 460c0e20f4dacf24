"""What a worker tells of its permits once a lease cycle: which are in use, and which checkouts last too long.

Whoever holds a permit that no pool has any more will never use it nor give it back; the coordinator, which
knows what stands under this worker's name, finds it by what is not named here.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from coordinator.ledger.states import SessionState
from pooler.pool.holder import Holder
from pooler.pool.holdings import Holdings, plain

HELD_MAX = 4096  # with more than that nothing is told of who holds them: some would seem to be missing
LATE_MAX = 64  # the latest


def tell_cycle(holdings: Holdings, holder: Holder) -> dict[str, Any]:
    """`held` (not there: too many) and `late` of a heartbeat.

    Held are the permits of sessions that a pool has, and of those that are being opened or have begun to end:
    what is in no pool by right.
    """
    pooled = holder.pooled()
    held = [[each.db, plain(each.permit)] for each in holdings.all()
            if each.state is not SessionState.OPEN or each.ending or (each.db, each.permit) in pooled]
    late = [{**asdict(each), "permit": plain(each.permit)} for each in holder.late_checkouts()[:LATE_MAX]]
    return {"late": late} if len(held) > HELD_MAX else {"held": held, "late": late}
