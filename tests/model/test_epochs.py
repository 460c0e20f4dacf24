"""Every interleaving of an advance of the epoch: no transaction in either epoch at once in a planned one, no
grant in the old epoch once it is complete (I10), and whatever fails, it heals.

In each, worker A may crash; unplanned, it may also be paused, lose its link and its lease. MODEL=long: in a
drain, too, and with a session of either worker (docs/evidence.md has the figures).
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from coordinator.ledger.invariants import check_ledger
from coordinator.ledger.rules import Release
from coordinator.ledger.states import Actor, Proof
from tests.ledger.ground import KEYS
from tests.model.epoch_mutants import EPOCH_MUTANTS, PLANNED, STOPPING, UNPLANNED
from tests.model.epoch_state import Config, State
from tests.model.epoch_store import (
    DRAINING,
    FREE,
    ONE,
    PROMOTING,
    TWO,
    EpochStore,
    Image,
    grants,
    heard,
    usable,
)
from tests.model.epochs import Epochs
from tests.model.explorer import Explored, Explorer

IS_LONG = os.environ.get("MODEL") == "long"


def explore(config: Config) -> Explored[State]:
    found = Explorer(Epochs(config)).run()
    print(found)  # noqa: T201 - the figures of the run
    return found


BOTH_SESSIONS = (0, 1)
SHORT = {
    "a drain, a session each": replace(PLANNED, owners=BOTH_SESSIONS),
    "one drain after another": replace(PLANNED, again=True),
    "unplanned, serve": UNPLANNED,
    "unplanned, stop": STOPPING,
}
LONG = {
    "a drain, who fails is cut off": replace(PLANNED, owners=BOTH_SESSIONS, cut_off=True),
    "one drain after another, who fails is cut off": replace(PLANNED, again=True, cut_off=True),
    "unplanned, serve, a session each": replace(UNPLANNED, owners=BOTH_SESSIONS),
    "unplanned, stop, a session each": replace(STOPPING, owners=BOTH_SESSIONS),
}


@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("name", [*SHORT, *(LONG if IS_LONG else ())])
def test_an_advance_is_safe_and_heals(name: str) -> None:
    found = explore((SHORT | LONG)[name])
    assert found.sound, found
    assert found.states > 10_000


@pytest.mark.parametrize("name", EPOCH_MUTANTS)
def test_without_this_safeguard_the_model_finds_the_fault(name: str) -> None:
    mutant = EPOCH_MUTANTS[name]
    found = explore(mutant.config)
    assert mutant.finds in str(found), found
    assert not found.sound


def test_what_is_served_in_each_state_of_the_epoch() -> None:
    assert [under for under in (1, 2) if usable(ONE, under)] == [1]
    assert [under for under in (1, 2) if usable(TWO, under)] == [2]
    assert not any(usable(DRAINING, under) for under in (1, 2))
    assert heard(PROMOTING) == heard(DRAINING)
    assert grants(ONE, 1, own_lease=True)
    assert not any(grants(ONE, under, own_lease=under == 2) for under in (1, 2))


def test_an_image_stands_for_a_ledger_that_keeps_the_invariants_of_the_audit() -> None:
    """And what the store is told is read back as it was."""
    store = EpochStore((0, 1))
    image = Image(0, ONE, 0, (1, 1), (FREE, FREE))
    for request in (0, 1):
        txn = store.reserves(request, image)
        assert txn is not None
        after = store.carried_out(txn, image)
        assert after is not None
        image = after
        assert check_ledger(store.snapshot(image), KEYS) == []
    stop = store.carried_out(store.moves("stop", image), image)
    assert stop == image._replace(version=1, epoch=DRAINING, command=1)
    assert store.carried_out(store.moves("stop", image), stop) is None
    assert store.reserves(0, stop._replace(permits=(FREE, FREE))) is None
    unused = Release(store.permit(0), Proof.UNUSED, Actor.OWNER)
    assert store.decided(0, unused, stop) == stop._replace(permits=(FREE, image.permits[1]))
