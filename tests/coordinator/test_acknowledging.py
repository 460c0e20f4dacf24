"""What a worker's key says that it acknowledged: nothing that its pools have not heard of (finding 15)."""

from __future__ import annotations

from pathlib import Path

import pytest
from trio.testing import MockClock

from coordinator.epoch import acknowledged_by_registering, not_acknowledged
from coordinator.ledger.record import Worker as WorkerRecord
from coordinator.view import View
from tests.coordinator.stage import DB, Stage, stage
from tests.ledger.ground import FLEET, KEYS, epoch


@pytest.mark.parametrize(("current", "serves", "before", "acknowledged"), [
    (2, 0, 0, 2),  # it never heard of any
    (2, 1, 0, 1),
    (2, 1, 1, 1),
    (2, 2, 1, 2),
    (2, 1, 2, 2),  # it acknowledged the next while its hello was on its way
    (1, 2, 0, 1),  # a store that went back: it may hear of another epoch 2
])
def test_registering_acknowledges_what_is_served(
    current: int, serves: int, before: int, acknowledged: int
) -> None:
    assert acknowledged_by_registering(current, serves=serves, before=before) == acknowledged


def waits_for(on: Stage, number: int) -> list[str]:
    """Who has not acknowledged it."""
    workers = {key: WorkerRecord.decode(entry.value) for key, entry in on.keyspace.entries.items()
               if key.startswith(FLEET.workers())}
    return [key.rpartition("/")[2] for key in not_acknowledged(number, DB, workers)]


async def test_a_worker_that_returns_has_not_acknowledged_what_it_did_not_hear_of(
    tmp_path: Path, clock: MockClock
) -> None:
    """It grants sessions of the old epoch until the answer to its hello is there."""
    async with stage(tmp_path) as on, on.worker("A") as worker:
        on.expire("A")
        await on.put(KEYS.epoch(), epoch(2))
        await worker.hello(epochs={DB: 1})
        assert waits_for(on, 2) == ["A"]
        await worker.call("epoch_ack", db=DB, epoch=2)
        assert waits_for(on, 2) == []
        await worker.hello(epochs={DB: 1})  # sent before it heard of the next
        assert waits_for(on, 2) == []
        on.expire("A")
        await worker.hello(epochs={DB: 1})
        assert waits_for(on, 2) == []


async def test_a_worker_that_has_heard_of_no_epoch_acknowledges_the_current_one_by_registering(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        await on.put(KEYS.epoch(), epoch(2))
        async with on.worker("A"):
            assert waits_for(on, 2) == []


async def test_the_answer_to_a_hello_is_no_older_than_the_registration(
    tmp_path: Path, clock: MockClock
) -> None:
    """Else a worker that was cut off would grant in the old epoch again after the advance was complete."""
    async with stage(tmp_path) as on, on.worker("A") as worker:
        on.expire("A")
        await on.put(KEYS.epoch(), epoch(2))  # of which this coordinator has not heard yet
        answer = await worker.hello(epochs={DB: 1})
        assert answer["registered"]
        assert answer["ledgers"][DB]["epoch"]["number"] == 2


async def test_a_hello_that_cannot_read_the_epochs_settles_nothing(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        async def fails() -> bool:
            return False

        on.views.refresh = fails  # type: ignore[method-assign]
        assert not (await worker.hello(epochs={DB: 1}))["registered"]


async def test_of_two_reads_at_the_same_time_the_older_one_takes_nothing_back(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        older = await on.views._read(DB)
        await on.put(KEYS.epoch(), epoch(2))
        assert await on.views.refresh()
        told: list[View] = []
        on.views.on_change.append(told.append)
        on.views._settle(older)
        assert (on.views.views[DB].epoch.number, told) == (2, [])  # type: ignore[union-attr]


