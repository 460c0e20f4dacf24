"""Which worker of the whole fleet has an ordinal, and where its host takes cancel requests.

Anybody may send a cancel request with any key, so that etcd is read for all who ask at a time, once, and not
again before a moment has passed. Whoever asks gets an answer that is newer than his question.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import trio

from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.reading import read_or_none
from coordinator.ledger.record import Worker
from coordinator.registry import owners_of
from coordinator.store.api import Store

PAUSE_SECONDS = 0.05


class Ordinals:
    """The ordinals of every host's workers."""

    def __init__(self, store: Store, keys: FleetKeys) -> None:
        self._store = store
        self._keys = keys
        self._lock = trio.Lock()
        self._begun = self._good = 0  # reads, and which was the last to be answered
        self._read_at = -float("inf")
        self._found: Mapping[int, str] = {}

    async def address_of(self, ordinal: int) -> str | None:
        """host:port where the worker's host takes cancel requests, "" if it has none; None: no such worker.

        Raises StoreUnavailable, StoreUnknown.
        """
        return (await self._now()).get(ordinal)

    async def other_hosts(self, own: Collection[int]) -> list[str]:
        """host:port where every host takes cancel requests, but for that of the workers with these ordinals.

        Raises StoreUnavailable, StoreUnknown.
        """
        found = await self._now()
        mine = {found.get(ordinal) for ordinal in own}
        return sorted({address for address in found.values() if address and address not in mine})

    async def _now(self) -> Mapping[int, str]:
        asked = self._begun
        async with self._lock:
            if self._good <= asked:  # else a read that was answered began after we had asked
                await self._pause()
                self._begun = number = self._begun + 1
                self._found = await self._read()
                self._good = number
        return self._found

    async def _pause(self) -> None:
        with trio.move_on_at(self._read_at + PAUSE_SECONDS):
            await trio.sleep_forever()
        self._read_at = trio.current_time()

    async def _read(self) -> dict[int, str]:
        ordinals = await self._store.range(self._keys.ordinals())
        workers = await self._store.range(self._keys.workers())
        addresses: dict[str, str] = {}
        for entry in workers.entries:
            record = read_or_none(Worker, entry)
            if record is not None:  # one of a newer version cannot be reached from here, the others can
                addresses[record.boot_id] = record.cancel_address
        return {number: addresses[owner] for number, owner in owners_of(ordinals.entries).items()
                if owner in addresses}

