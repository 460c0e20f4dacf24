"""A policy file that is not what is in force is told, with what differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.policy import load_policy
from coordinator.policy_difference import WHAT_TO_DO, active_policies, policy_differences
from coordinator.spec import DatabaseSpec
from coordinator.store.api import Put, Txn
from coordinator.store.memory import MemoryStore
from tests.coordinator.parts import policy_text
from tests.coordinator.test_founding import Start, database
from tests.ledger.ground import FLEET, KEYS

DB = KEYS.database
GOOD = policy_text(db=DB)
IN_FORCE, _ = load_policy(GOOD)


def told(policy: str | None) -> list[str]:
    return policy_differences([DatabaseSpec(DB, "shop", "app", ("h:1",), policy=policy)], {DB: IN_FORCE})


def test_what_differs_is_named_with_both_values_and_what_can_be_done() -> None:
    changed = policy_text(3, db=DB).replace("maxQueue: 100", "maxQueue: 7") + "otherClients: 9\n"
    (line,) = told(changed)
    assert line == (
        f"databases.shop.policy differs from generation 1 of {DB}: serverSessionPermits 3 (in force: 4), "
        f"executionClasses.interactive.permits 3 (in force: 4), executionClasses.interactive.maxQueue 7 "
        f"(in force: 100), executionClasses.interactive.maxLend 1 (in force: 2), "
        f"otherClients 9 (in force: 0); {WHAT_TO_DO}")
    assert "hardConnectionLimit 50 (in force: none)" in told(GOOD + "hardConnectionLimit: 50\n")[0]


@pytest.mark.parametrize("same", [
    GOOD, "# a comment\n" + GOOD, GOOD + "otherClients: 0\n",  # a default, spelled out
    None, "nonsense: [",  # none configured; a fault, told as such
])
def test_what_means_the_same_is_no_difference(same: str | None) -> None:
    assert told(same) == []


def test_a_ledger_without_a_policy_differs_from_nothing() -> None:
    spec = DatabaseSpec(DB, "shop", "app", ("h:1",), policy=policy_text(3, db=DB))
    assert policy_differences([spec], {}) == policy_differences([spec], {DB: None}) == []


async def test_the_policies_in_force_are_read_of_every_ledger_that_has_one(tmp_path: Path) -> None:
    store = MemoryStore()
    assert await active_policies(store, FLEET, [DB]) == {}
    await Start(tmp_path, store, database(GOOD)).run()
    assert await active_policies(store, FLEET, [DB, DB, "none/write"]) == {DB: IN_FORCE}


async def test_a_policy_of_a_newer_version_is_compared_with_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    await Start(tmp_path, store, database(GOOD)).run()
    await store.txn(Txn(puts=(Put(KEYS.policy(1), b"\x81\xa1x\x01"),)))
    assert await active_policies(store, FLEET, [DB]) == {}
