"""Every interleaving of a ledger that is lost and made anew: nobody grows meanwhile, nobody closes a session
for a permit that is missing, each session has one permit in the end, and nothing stands that is nobody's.

Else than with MODEL=long nobody fails where the store was put back to an older state.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.model.explorer import Explored, Explorer
from tests.model.lost import Config, LostLedger, State

IS_LONG = os.environ.get("MODEL") == "long"
NOBODY_FAILS = (False, False)
WIPED, PUT_BACK = Config(), Config(wiped=False)
SHORT = {
    "wiped": WIPED,
    "wiped, and a slot too few": Config(slots=2, failing=NOBODY_FAILS),
    "put back": replace(PUT_BACK, failing=NOBODY_FAILS),
    "put back, and a slot too few": replace(PUT_BACK, slots=2, failing=NOBODY_FAILS),
}
LONG = {
    "wiped, a slot too few, and a worker fails": Config(slots=2),
    "put back, and a worker fails": PUT_BACK,
    "put back, and the other worker fails": replace(PUT_BACK, failing=(False, True)),
}
MUTANTS = {
    "a coordinator that remembers nothing": (replace(PUT_BACK, remembers=False), "grew"),
    "a Won that went back is believed": (replace(PUT_BACK, believes_nothing_older=False), "grew"),
    "a recovered row is freed without a proof": (replace(WIPED, proves_recovered=False), "I2"),
    "a permit of the lost ledger is called gone": (replace(WIPED, knows_of_before=False), "closed"),
    "a recovered session's receipt ends with a lease": (replace(WIPED, receipts_stay=False), "I2"),
    "what a worker does not hold stays its": (
        replace(PUT_BACK, disowns=False, failing=NOBODY_FAILS), "heal"),
}


def explore(config: Config) -> Explored[State]:
    found = Explorer(LostLedger(config)).run()
    print(found)  # noqa: T201 - the figures of the run
    return found


@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("name", [*SHORT, *(LONG if IS_LONG else ())])
def test_a_lost_ledger_is_made_anew_whatever_happens_meanwhile(name: str) -> None:
    found = explore((SHORT | LONG)[name])
    assert found.sound, found
    assert found.states > 200


@pytest.mark.parametrize("name", MUTANTS)
def test_without_this_safeguard_the_model_finds_the_fault(name: str) -> None:
    config, finds = MUTANTS[name]
    found = explore(config)
    assert finds in str(found), found
    assert not found.sound
