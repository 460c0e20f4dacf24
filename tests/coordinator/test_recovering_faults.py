"""What a rebuilt ledger's workers are asked goes wrong: they are asked again, and nothing ends."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest
from trio.testing import MockClock

from coordinator.ledger.record import SCHEMA
from tests.coordinator.stage import DB
from tests.coordinator.test_recovering import holds, rebuilding, refound
from tests.coordinator.test_workers import opened
from tests.ledger.ground import KEYS


@pytest.mark.parametrize("value", [b"\xc1", msgpack.packb({"schema": SCHEMA + 1})], ids=["garbage", "newer"])
async def test_a_worker_is_heard_later_when_what_it_tells_meets_a_key_that_cannot_be_read(
    tmp_path: Path, clock: MockClock, value: bytes
) -> None:
    async with rebuilding(tmp_path) as r, r.on.worker("A") as worker:
        await opened(worker)
        r.lose()
        await r.lost()
        await r.order()
        await refound(r.on)
        before = r.on.keyspace.entries[KEYS.epoch()].value
        view = r.on.views.views[DB]
        await r.on.put(KEYS.epoch(), value)
        holds(worker, 11, epoch=7)
        assert await r.recovering.recover(view) == 1
        await r.on.put(KEYS.epoch(), before)
        assert await r.recovering.recover(view) == 0


async def test_a_worker_whose_answer_lacks_something_is_asked_again(tmp_path: Path, clock: MockClock) -> None:
    async with rebuilding(tmp_path) as r, r.on.worker("A") as worker:
        await opened(worker)
        r.lose()
        await r.lost()
        await r.order()
        await refound(r.on)
        holds(worker, 11)
        whole = worker.answers["recover"]
        worker.answers["recover"] = lambda args: {}
        assert await r.hear() == 1
        worker.answers["recover"] = whole
        assert await r.hear() == 0
