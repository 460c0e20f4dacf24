"""Where a host takes cancel requests: known to every host, and asked of etcd in bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.record import Worker
from coordinator.ordinals import Ordinals
from coordinator.registry import Ordinal
from coordinator.store.api import Put, Snapshot, StoreUnavailable, Txn
from coordinator.store.memory import MemoryStore

KEYS = FleetKeys("test", "fleet")


class Counting(MemoryStore):
    """Counts how often it is read."""

    reads = 0
    is_away = False

    async def range(self, prefix: str) -> Snapshot:
        self.reads += 1
        if self.is_away:
            raise StoreUnavailable("away")
        return await super().range(prefix)


def worker(boot_id: str, ordinal: int, address: str) -> tuple[Put, ...]:
    record = Worker(boot_id=boot_id, index=0, ordinal=ordinal, host="b", machine_id="", kernel_boot_id="",
                    pid=1, pid_start=1, cancel_address=address)
    return (Put(KEYS.worker(boot_id), record.encode()),
            Put(KEYS.ordinal(ordinal), Ordinal(boot_id).encode()))


@pytest.fixture
async def store() -> Counting:
    made = Counting()
    await made.txn(Txn(puts=(*worker("boot-1", 4, "10.0.0.2:6432"), *worker("boot-2", 5, ""))))
    return made


async def test_an_ordinal_leads_to_its_hosts_address(store: Counting, autojump_clock: MockClock) -> None:
    ordinals = Ordinals(store, KEYS)
    assert await ordinals.address_of(4) == "10.0.0.2:6432"
    assert await ordinals.address_of(5) == ""
    assert await ordinals.address_of(6) is None


async def test_a_worker_that_came_a_moment_ago_is_found(store: Counting, autojump_clock: MockClock) -> None:
    ordinals = Ordinals(store, KEYS)
    assert await ordinals.address_of(9) is None
    await store.txn(Txn(puts=worker("boot-9", 9, "10.0.0.9:6432")))
    assert await ordinals.address_of(9) == "10.0.0.9:6432"


async def test_a_storm_of_questions_is_few_reads(store: Counting, autojump_clock: MockClock) -> None:
    ordinals = Ordinals(store, KEYS)
    answers: list[str | None] = []

    async def ask(ordinal: int) -> None:
        answers.append(await ordinals.address_of(ordinal))

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for ordinal in range(2_000):
            nursery.start_soon(ask, ordinal)
    assert len(answers) == 2_000
    assert answers.count(None) == 1_998
    assert store.reads <= 4  # two ranges, once or twice
    assert trio.current_time() - began < 0.2


async def test_a_store_that_is_away_is_said_to_each_who_asks(
    store: Counting, autojump_clock: MockClock
) -> None:
    ordinals = Ordinals(store, KEYS)
    assert await ordinals.address_of(4) == "10.0.0.2:6432"
    store.is_away = True
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await ordinals.address_of(4)
    store.is_away = False
    assert await ordinals.address_of(4) == "10.0.0.2:6432"


async def test_an_ordinal_whose_worker_is_gone_leads_nowhere(
    store: Counting, autojump_clock: MockClock
) -> None:
    await store.txn(Txn(deletes=(KEYS.worker("boot-1"),)))
    assert await Ordinals(store, KEYS).address_of(4) is None


def test_records_of_workers_carry_the_address() -> None:
    record = Worker(boot_id="b", index=0, ordinal=1, host="h", machine_id="", kernel_boot_id="", pid=1,
                    pid_start=1)
    assert Worker.decode(replace(record, cancel_address="h:1").encode()).cancel_address == "h:1"
