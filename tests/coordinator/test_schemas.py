"""A new schema is written only when all live workers read it; who cannot read it is not let in then."""

from __future__ import annotations

from pathlib import Path

import pytest
from trio.testing import MockClock

from coordinator.ledger.record import SCHEMA
from coordinator.ledger.schemas import NoCommonSchema, schema_to_write, why_unread
from coordinator.registry import Introduction, Local, Unregistered
from tests.coordinator.stage import stage
from tests.ledger.ground import FLEET


def test_a_new_schema_waits_for_the_last_worker_of_the_older_version() -> None:
    assert schema_to_write({"old": (1,), "new": (1, 2)}, writable=(1, 2)) == 1
    assert schema_to_write({"a": (1, 2), "new": (1, 2)}, writable=(1, 2)) == 2
    assert schema_to_write({}, writable=(1, 2)) == 2


def test_what_some_worker_reads_nothing_of_is_not_written_at_all() -> None:
    with pytest.raises(NoCommonSchema, match="not read by ancient"):
        schema_to_write({"ancient": (1,), "new": (2, 3)}, writable=(2, 3))


def test_this_version_writes_what_its_own_workers_read() -> None:
    assert schema_to_write({"a": (SCHEMA,)}) == SCHEMA
    assert why_unread((SCHEMA,)) == ""


async def test_a_worker_that_cannot_read_what_is_written_is_not_registered(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        ahead = Local(Introduction("ahead", 0, 1, 1, "", (SCHEMA + 1,)))
        with pytest.raises(Unregistered, match="it needs another version"):
            await on.registry.register(ahead)
        assert FLEET.worker("ahead") not in on.keyspace.entries
