"""Whom a drain waits for, and why: what the ledger tells of workers that have not acknowledged an epoch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.drain_progress import Progress, look_at
from coordinator.ledger.record import COMMAND_INDEX, Epoch, EpochState, Worker
from coordinator.ledger.snapshot import LedgerSnapshot, Registered
from tests.ledger.ground import BACKEND, KEYS, NOW_US

DB = KEYS.database
WORKER = Worker("w1", 1, 1, "db-host", "machine", "kernel", 100, 200, epochs={DB: 7})


def progress(*workers: Worker, epoch: int = 8, since_seconds: float = 1.0) -> Progress:
    snapshot = LedgerSnapshot(
        1, epoch=Epoch(epoch, EpochState.ACTIVE, BACKEND, NOW_US - int(since_seconds * 1e6), "drained"),
        workers={each.boot_id: Registered(each, 1, 1) for each in workers})
    return look_at(snapshot, DB, 7, {}, step="advanced", now_us=NOW_US, elapsed_seconds=1.0,
                   lease_ttl_seconds=5.0)


@pytest.mark.parametrize(("since_seconds", "why"), [
    (1.0, "it has not answered yet; if it is gone, its lease ends within 4.0 s"),
    (5.1, "it lives, for its lease was renewed since, but epoch 7 is the last it acknowledged"),
])
def test_who_is_waited_for_is_named_with_the_reason(since_seconds: float, why: str) -> None:
    seen = progress(WORKER, since_seconds=since_seconds)
    assert [str(each) for each in seen.waits_for] == [f"worker 1 on db-host (pid 100, w1): {why}"]
    assert seen.as_dict()["waits_for"] == [
        {"worker": "w1", "host": "db-host", "index": 1, "pid": 100, "epoch": 7, "why": why}]
    assert seen.as_dict()["not_acknowledged"] == ["w1"]


def test_nobody_is_waited_for_who_has_acknowledged_or_is_only_a_command() -> None:
    command = replace(WORKER, boot_id="c", index=COMMAND_INDEX)
    assert progress(replace(WORKER, epochs={DB: 8}), command).waits_for == ()


def test_before_the_next_epoch_stands_nobody_can_have_acknowledged_it() -> None:
    assert progress(WORKER, epoch=7).waits_for == ()
