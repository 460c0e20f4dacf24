"""What the tests of the permits' link share."""

from __future__ import annotations

from typing import Any

import trio
import trio.testing

from coordinator.ledger.record import Backend, Kind, Permit
from pooler.pool.permits import Wish
from tests.pool.fake_coordinator import DB
from tests.pool.world import World

Clock = trio.testing.MockClock
WISH = Wish(DB, Kind.MAIN, "orders", "app", 10)
BACKEND = Backend("10.0.0.1:5432", "7300000000000000001", 1, 1_780_000_000_000_000)


async def open_one(w: World) -> Permit:
    """A session of the pool, recorded as open."""
    granted = await w.permits.reserve(WISH, 1.0)
    w.permits.connecting(DB, granted.permit)
    await w.permits.opened(DB, granted.permit, 4711, 1_790_000_000_000_000, backend=BACKEND)
    w.holder.held.add((DB, granted.permit))
    return granted.permit


async def tell(w: World, op: str, **args: Any) -> None:
    """The coordinator says something of its own accord."""
    w.coordinator.links[-1].notify(op, db=DB, **args)
    await trio.testing.wait_all_tasks_blocked()


def plain(permit: Permit) -> list[Any]:
    """As it travels on the link."""
    return [str(permit.kind), permit.slot, permit.generation]


async def go_down(w: World) -> None:
    """The coordinator goes away."""
    w.coordinator.down = True
    w.coordinator.cut()
    await trio.testing.wait_all_tasks_blocked()
    assert not w.permits.statistics().linked


async def let_pass(seconds: float) -> None:
    """Let the test's own clock go on."""
    with trio.move_on_after(seconds):
        await trio.sleep_forever()
