"""Sessions near the end of their lifetime are replaced before it, in the background, so that nobody waits.

Only those that somebody uses: one that expires while it lies idle is closed. A successor has a permit of its
own, and is given up where it would have to wait for one, or for the gate.
"""

from __future__ import annotations

from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from pooler.pool.places import Turn
from pooler.pool.pressure import SUCCESSOR_AT, Replacing

if TYPE_CHECKING:
    from pooler.pool.pool import Pool
    from pooler.relay.server import ServerConn


class Successors:
    """Those of one pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._making: set[ServerConn] = set()  # whose successors are being opened

    @property
    def making(self) -> int:
        """How many are being opened."""
        return len(self._making)

    def overlap(self) -> int:
        """How many sessions the pool may have beyond its size: being made, or made for one in use still."""
        return len(self._making) + sum(each.expires_at == -inf for each in self._pool.core.active)

    def look(self, now: float) -> None:
        """Once a second: start what is due."""
        core, lifetime = self._pool.core, self._pool.plan.server_lifetime_seconds
        if core.blocked or not core.ages or not lifetime or self._pool.growth.is_pausing(now):
            return
        due = [each for each in core.active if self._is_due(each, now)]
        if due:
            room = Replacing(
                idle=len(core.idle), in_use=len(core.active), waiting=core.count_servable(),
                making=self.overlap(), lifetime_seconds=lifetime, free_permits=self._free_permits()).room
            for each in sorted(due, key=lambda server: server.expires_at)[:room]:
                core.opening += 1
                self._making.add(each)
                self._pool.parts.nursery.start_soon(self._make, each)

    def _is_due(self, server: ServerConn, now: float) -> bool:
        age, life = now - server.connected_at, server.expires_at - server.connected_at
        return (server not in self._making and server.client is not None and not server.retire
                and life < inf and SUCCESSOR_AT * life <= age < life)

    def _free_permits(self) -> int:
        """Of the ledger, as far as is known here: what other workers hold is not."""
        permits = self._pool.parts.permits
        view = permits.ledgers.get(self._pool.plan.ledger)
        total = int(view.policy.get("serverSessionPermits", 0)) if view is not None else 0
        return total - permits.held(self._pool.plan.ledger)

    async def _make(self, old: ServerConn) -> None:
        pool, places = self._pool, self._pool.parts.places
        server: ServerConn | None = None
        turn = Turn(pool.plan.user)
        try:
            if places.ask(turn, pool.plan.user_sessions_max):
                server = await pool.growth.open_successor()
                if server is not None:
                    places.settle(turn, server)
        finally:
            places.leave(turn)
            self._making.discard(old)
            if server is None:
                pool.core.open_failed()
        if server is None:
            return
        if not old.closing:
            old.expires_at = -inf  # it goes as it falls idle
        if not pool.core.opened(server, monotonic()):
            pool.retire(server, "opened for an epoch that is over, or not needed any more")
