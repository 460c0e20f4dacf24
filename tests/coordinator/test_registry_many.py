"""A worker of a fleet with more databases than one transaction holds."""

from __future__ import annotations

import pytest

from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.record import Backend, Epoch, EpochState, Worker
from coordinator.registry import COMPARED_MAX, Introduction, Local, Registry
from coordinator.store.api import Lost, Put, Snapshot, Txn, Won
from coordinator.store.memory import MemoryStore

KEYS = FleetKeys("p", "fleet")
DATABASES = [f"db{number}/write" for number in range(COMPARED_MAX + 180)]


class Watched(MemoryStore):
    """Another epoch of the last database begins between the registration and the look after it."""

    changes = False

    async def txn(self, txn: Txn) -> Won | Lost:
        outcome = await super().txn(txn)
        if self.changes and any(put.key == KEYS.worker("boot") for put in txn.puts):
            self.changes = False
            await begin(self, DATABASES[-1], 2)
        return outcome


async def begin(store: MemoryStore, db: str, number: int) -> None:
    epoch = Epoch(number, EpochState.ACTIVE, Backend("127.0.0.1:5432"), 0, "a test")
    await store.txn(Txn((), (Put(KEYS.db(db).epoch(), epoch.encode()),)))


async def registered(store: MemoryStore) -> Worker:
    registry = Registry(store, KEYS, DATABASES, host="h", machine_id="m", kernel_boot_id="k",
                        ttl_seconds=5.0, now_us=lambda: 0)
    await registry.register(Local(Introduction("boot", 0, 1, 1, "", (1,))))
    found: Snapshot = await store.read(KEYS.worker("boot"))
    return Worker.decode(found.entries[0].value)


@pytest.mark.parametrize("changes", [False, True])
async def test_it_is_registered_with_the_epoch_of_every_database_that_others_can_know_it_by(
    changes: bool,
) -> None:
    store = Watched()
    for db in DATABASES:
        await begin(store, db, 1)
    store.changes = changes
    known = (await registered(store)).epochs
    assert known == {**dict.fromkeys(DATABASES, 1), DATABASES[-1]: 2 if changes else 1}
