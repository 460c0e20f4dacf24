"""What is asked of a ledger while a transaction is on its way is gathered for the next one.

So nobody waits for company: alone a request goes at once, and the more there are, the more share a
transaction. Whoever goes away before it was sent takes nothing; what was sent goes on without him.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

import trio


class Gathered(Protocol):
    """One request: `left` is set when nobody waits for it any more."""

    left: bool

    @property
    def answered(self) -> bool: ...


Each = TypeVar("Each", bound=Gathered)


class Gathering(Generic[Each]):
    """Requests in the order in which they came; `make_round` is given them all, as long as any waits, and
    answers as many as it can."""

    def __init__(self, make_round: Callable[[Sequence[Each]], Awaitable[None]]) -> None:
        self.runs = False
        self._make_round = make_round
        self._waiting: dict[Each, trio.Event] = {}
        self._some = trio.Event()

    async def answer(self, each: Each) -> None:
        """Returns when it is answered, or (unanswered) when `run` ends."""
        over = self._waiting[each] = trio.Event()
        self._some.set()
        try:
            await over.wait()
        finally:
            each.left = True
            self._waiting.pop(each, None)

    async def run(self) -> None:
        """Makes rounds until cancelled."""
        self.runs = True
        try:
            while True:
                await self._some.wait()
                self._some = trio.Event()
                while self._waiting:
                    await trio.lowlevel.checkpoint()  # let those in that come at the same time
                    await self._round(tuple(self._waiting))
        finally:
            self.runs = False
            for over in self._waiting.values():
                over.set()

    async def _round(self, waiting: Sequence[Each]) -> None:
        if waiting:
            await self._make_round(waiting)
        for each in waiting:
            if each.answered and each in self._waiting:
                self._waiting.pop(each).set()
