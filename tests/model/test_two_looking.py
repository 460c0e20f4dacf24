"""A leader that was deposed while its look was under way does no harm, whenever it acts on what it saw.

MODEL=long: also where sessions may be terminated.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.model.explorer import Explored, Explorer
from tests.model.mutants import MUTANTS, ONE_FAILS
from tests.model.state import Config
from tests.model.two_looking import Looking, Pair, TwoLooking

IS_LONG = os.environ.get("MODEL") == "long"
UNCOMPARED = MUTANTS["reaper's release without the compare"].config
LOOKING_MUTANTS = {
    "a deposed leader's release goes by an old look, without the compare": (
        Looking(UNCOMPARED, evidence_ends=False), "I2"),
    "two leaders' first looks taken for the two that are needed": (
        Looking(ONE_FAILS, waits_between_looks=False), "I2"),
    "a session that came back terminated by who marked it before": (
        Looking(MUTANTS["reassert though it is being terminated"].config), "terminated"),
}


def explore(looking: Looking) -> Explored[Pair]:
    found = Explorer(TwoLooking(looking)).run()
    print(found)  # noqa: T201 - the figures of the run
    return found


@pytest.mark.parametrize("config", [ONE_FAILS, replace(ONE_FAILS, terminate=True)][: 1 + IS_LONG])
def test_two_that_look_and_act_at_any_time_are_safe_and_every_permit_becomes_free(config: Config) -> None:
    found = explore(Looking(config))
    assert found.sound, found
    assert found.states > 30_000


@pytest.mark.parametrize("name", LOOKING_MUTANTS)
def test_without_this_safeguard_the_model_finds_the_fault(name: str) -> None:
    looking, finds = LOOKING_MUTANTS[name]
    found = explore(looking)
    assert finds in str(found), found
    assert not found.sound
