"""A machine that booted anew knows the dead of its earlier boot from their permits alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from trio.testing import MockClock

from coordinator.deaths import HOW, bury_earlier_boots, of_earlier_boots
from coordinator.ledger.record import WorkerExit
from coordinator.ledger.states import SessionState
from tests.coordinator.stage import DB, stage
from tests.ledger.ground import FLEET, session

MACHINE = "abc:i-1"
STORED = session(SessionState.UNKNOWN, machine=MACHINE, kernel_boot="before", pid=0, backend_start_us=0)


@pytest.mark.parametrize(("machine", "host", "boot", "known"), [
    (MACHINE, "host", "after", {"A"}),
    (MACHINE, "host", "before", set()),
    ("abc:i-2", "host", "after", set()),
    (MACHINE, "another", "after", set()),
    (MACHINE, "host", "", set()),
    ("", "host", "after", set()),
])
def test_only_a_later_boot_of_the_same_machine_proves_a_death(
    machine: str, host: str, boot: str, known: set[str]
) -> None:
    assert of_earlier_boots([STORED], host=host, machine_id=machine, kernel_boot_id=boot) == known


def test_an_images_machine_id_is_no_machine() -> None:
    stored = session(SessionState.UNKNOWN, machine="abc", kernel_boot="before")
    assert of_earlier_boots([stored], host="host", machine_id="abc", kernel_boot_id="after") == set()


def test_a_permit_of_an_older_version_says_nothing() -> None:
    assert of_earlier_boots([session()], host="host", machine_id=MACHINE, kernel_boot_id="after") == set()


async def test_a_reservation_records_where_its_owner_runs_and_a_later_boot_buries_it(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        on.registry._machine_id = MACHINE
        async with on.worker("A") as worker:
            await worker.reserve(db=DB)
        buried: list[str] = []
        for boot in ("k", "later"):  # `k`: of now
            await bury_earlier_boots(
                {DB: on.ledger}, on.registry, host="host", machine_id=MACHINE, kernel_boot_id=boot,
                now_us=lambda: 5, on_buried=lambda: buried.append("A"))
            assert bool(buried) == (boot == "later")
        record = WorkerExit.decode(on.keyspace.entries[FLEET.worker_exit("A")].value)
        assert (record.how, record.at_us) == (HOW, 5)
        assert FLEET.worker("A") not in on.keyspace.entries
        await on.reconcile()
        assert await on.states() == {0: "SESSION_UNKNOWN"}
