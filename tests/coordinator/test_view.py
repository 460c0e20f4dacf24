"""What a coordinator knows of each ledger: trouble of one ledger, or of its disk, is nobody else's."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest
from trio.testing import MockClock

from coordinator.store.api import Put, Txn
from tests.coordinator.stage import DB, stage
from tests.ledger.ground import FLEET


async def test_a_record_of_a_newer_version_makes_its_own_ledger_unreachable(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        keys = FLEET.db(DB)
        await on.store.txn(Txn((), (Put(keys.epoch(), msgpack.packb({"schema": 99})),)))
        assert await on.views.refresh()
        assert not on.views.views[DB].reachable


async def test_a_full_disk_ends_no_coordinator(
    tmp_path: Path, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, text: str) -> int:
        raise OSError(28, "No space left on device")

    async with stage(tmp_path) as on:
        monkeypatch.setattr(Path, "write_text", full)
        await on.store.txn(Txn((), (Put("/anything", b""),)))
        assert await on.views.refresh()
        assert on.views.views[DB].reachable
