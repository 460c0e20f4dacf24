"""The `id` of a client in SHOW CLIENTS, by which KILL_CLIENT finds it: one number in the whole fleet.

31 bits, as PgBouncer's column has: 9 of the worker's ordinal, 22 counted up, so that the number of a client
that left is not soon another one's.
"""

from __future__ import annotations

from typing import Generic, TypeVar

C = TypeVar("C")

COUNT_BITS = 22
ORDINALS = 512


class ClientNumbers(Generic[C]):
    """The numbers of one worker's clients."""

    def __init__(self) -> None:
        self._count = 0
        self._of: dict[C, int] = {}
        self._who: dict[int, C] = {}

    def give(self, client: C, ordinal: int) -> None:
        """Number a client that enters."""
        base = (ordinal % ORDINALS) << COUNT_BITS
        while True:
            self._count = (self._count + 1) % (1 << COUNT_BITS)
            number = base | self._count
            if number not in self._who:
                break
        self._of[client], self._who[number] = number, client

    def reserve(self, ordinal: int) -> int:
        """A number for one who cannot be found by it."""
        self._count = (self._count + 1) % (1 << COUNT_BITS)
        return (ordinal % ORDINALS) << COUNT_BITS | self._count

    def drop(self, client: C) -> None:
        """It left."""
        number = self._of.pop(client, None)
        if number is not None:
            del self._who[number]

    def number(self, client: C) -> int:
        """Its number; 0 for one that has none."""
        return self._of.get(client, 0)

    def find(self, number: int) -> C | None:
        """Who has this number."""
        return self._who.get(number)
