"""A store that breaks as a real one does, by a seed: it refuses, does not answer, or answers too late.

Wraps any Store. A write with an unknown outcome was carried out, or not, or is still on its way and lands
later (`land_late`, or by itself before a later request). Without faults it is the store it wraps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from random import Random

import trio

from coordinator.store.api import (
    Change,
    Lease,
    Lost,
    Snapshot,
    Store,
    StoreStatus,
    StoreUnavailable,
    StoreUnknown,
    Txn,
    Won,
)


@dataclass(frozen=True, slots=True)
class Faults:
    """How often what happens, each as a share of requests (0 to 1)."""

    unavailable: float = 0.0
    unknown_applied: float = 0.0
    unknown_not_applied: float = 0.0
    unknown_late: float = 0.0
    lands: float = 0.3  # chance of a late write to land before any later request


class FaultyStore:
    """Faults drawn from `random`; `down` refuses everything; `late` are the writes still on their way."""

    def __init__(self, store: Store, random: Random, faults: Faults | None = None) -> None:
        self._store = store
        self._random = random
        self.faults = faults or Faults()
        self.down = False
        self.late: list[Txn] = []
        self.injected = 0

    async def land_late(self) -> None:
        """Everything still on its way arrives now, in any order."""
        waiting, self.late = self.late, []
        self._random.shuffle(waiting)
        for txn in waiting:
            await self._land(txn)

    async def read(self, *keys: str) -> Snapshot:
        await self._before()
        return await self._store.read(*keys)

    async def range(self, prefix: str) -> Snapshot:
        await self._before()
        return await self._store.range(prefix)

    async def txn(self, txn: Txn) -> Won | Lost:
        await self._before()
        if not txn.puts and not txn.deletes:
            return await self._store.txn(txn)
        faults, draw = self.faults, self._random.random()
        if draw < faults.unknown_applied:
            await self._land(txn)
            raise self._unknown("applied")
        if draw < faults.unknown_applied + faults.unknown_not_applied:
            raise self._unknown("not applied")
        if draw < faults.unknown_applied + faults.unknown_not_applied + faults.unknown_late:
            self.late.append(txn)
            raise self._unknown("late")
        return await self._store.txn(txn)

    def watch(
        self, prefix: str, *, after: int
    ) -> AbstractAsyncContextManager[trio.MemoryReceiveChannel[Sequence[Change]]]:
        return self._store.watch(prefix, after=after)

    async def lease(self, ttl_seconds: float, *, lease_id: int = 0) -> Lease:
        await self._before()
        return await self._store.lease(ttl_seconds, lease_id=lease_id)

    async def status(self) -> StoreStatus:
        await self._before()
        return await self._store.status()

    async def _before(self) -> None:
        """Late writes may overtake this request; then it may be refused itself."""
        for txn in list(self.late):
            if self._random.random() < self.faults.lands:
                self.late.remove(txn)
                await self._land(txn)
        if self.down or self._random.random() < self.faults.unavailable:
            self.injected += 1
            raise StoreUnavailable("injected: the store refuses")

    async def _land(self, txn: Txn) -> None:
        try:
            await self._store.txn(txn)
        except StoreUnavailable:
            return  # it was refused where nobody could hear it

    def _unknown(self, how: str) -> StoreUnknown:
        self.injected += 1
        return StoreUnknown(f"injected: {how}")
