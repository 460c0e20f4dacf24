"""Execution permits over all interleavings: never more execute than there are permits, and all heals."""

from __future__ import annotations

import pytest

from tests.model.executions import Executions, Rules
from tests.model.explorer import Explorer

MUTANTS = {
    "a write that compares no share": Rules(compares_share=False),
    "raises that do not exclude each other": Rules(bumps_raise=False),
    "registering again leaves the share as it is": Rules(registering_rewrites=False),
    "an unknown lowering is taken for lost": Rules(settles_unknown=False),
    "a stale event is believed": Rules(ignores_stale_events=False),
    "a worker writes before it stops": Rules(stops_before_it_writes=False),
    "a silent worker's permits are taken though it has a session": Rules(keeps_with_sessions=False),
}


def test_no_interleaving_executes_more_than_there_are_permits_and_every_one_heals() -> None:
    found = Explorer(Executions()).run()
    assert found.sound, found
    assert found.states > 15_000


@pytest.mark.parametrize("rules", MUTANTS.values(), ids=MUTANTS.keys())
def test_without_a_safeguard_too_much_executes(rules: Rules) -> None:
    found = Explorer(Executions(rules)).run(healing=False)
    assert found.violation is not None, found
