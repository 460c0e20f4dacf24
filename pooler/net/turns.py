"""How many logins may go on at one turn of the loop.

A thousand clients that come at once are a thousand tasks ready at once, and the loop runs all that are ready
before it looks at its sockets again: the relay would wait for all of them. Each login asks here before a step
that costs something; those beyond `per_turn` go on at the turns after, first come, first served.
"""

from __future__ import annotations

import trio

LOGINS_PER_TURN = 8  # each some tenths of a millisecond


class Turns:
    """Steps that may be taken at this turn of the loop, and who waits for the next."""

    def __init__(self, per_turn: int = LOGINS_PER_TURN) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._line = trio.lowlevel.ParkingLot()
        self._is_pumping = False

    async def take(self) -> None:
        """Go on now, or at a later turn. Cancelled: nothing was taken."""
        if not self._is_pumping:
            trio.lowlevel.spawn_system_task(self._pump, name="login turns")
            self._is_pumping = True
        if self._left and not self._line:
            self._left -= 1
        else:
            await self._line.park()

    async def _pump(self) -> None:
        """One round for each turn of the loop, until one in which nobody came."""
        try:
            while True:
                await trio.lowlevel.checkpoint()
                if self._left == self._per_turn and not self._line:
                    return
                self._left = self._per_turn - len(self._line.unpark(count=self._per_turn))
        finally:
            self._left, self._is_pumping = self._per_turn, False


LOGIN_TURNS = Turns()
