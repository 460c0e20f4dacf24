"""How many sessions are opened at one server at the same time, just after an epoch has begun there.

A server that took over has every pool of every worker at its door at once. Each host lets so many in at a
time, first come, first served; who waits holds a permit already, and gives it back if it is not wanted any
more. Later, when sessions come one by one, a login that hangs is to hold up no other pool's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf
from time import monotonic

import trio

CONNECTS_OF_HOST_MAX = 8
NARROW_SECONDS = 15.0  # after an advance


class Gate:
    """The openings of one worker at one ledger's server. `limit`: at the same time, while it is narrow."""

    def __init__(self, limit: float = inf, clock: Callable[[], float] = monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._limiter = trio.CapacityLimiter(inf)
        self._wide_at = -inf
        self._epoch = 0

    def advanced(self, epoch: int) -> None:
        """This epoch is the one of now: narrow for a while if another was till then."""
        before, self._epoch = self._epoch, epoch or self._epoch
        if before and self._epoch != before:
            self._wide_at = self._clock() + NARROW_SECONDS
            self._limiter.total_tokens = self._limit

    @property
    def waiting(self) -> int:
        """How many stand before it."""
        return self._limiter.statistics().tasks_waiting

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Inside the block: one of those that are let in."""
        if self._clock() >= self._wide_at:
            self._limiter.total_tokens = inf
        async with _Place(self._limiter):
            yield


class _Place:
    """One token, whichever task holds it."""

    def __init__(self, limiter: trio.CapacityLimiter) -> None:
        self._limiter = limiter

    async def __aenter__(self) -> None:
        await self._limiter.acquire_on_behalf_of(self)

    async def __aexit__(self, *_: object) -> None:
        self._limiter.release_on_behalf_of(self)


class Gates:
    """The gates of one worker, by ledger. `workers`: how many of them this host has."""

    def __init__(self, workers: int = 1) -> None:
        self._limit = max(1, CONNECTS_OF_HOST_MAX // workers)
        self._gates: dict[str, Gate] = {}

    def of(self, db: str) -> Gate:
        """The gate at the server of this ledger."""
        return self._gates.setdefault(db, Gate(self._limit))
