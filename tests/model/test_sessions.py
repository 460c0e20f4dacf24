"""Every interleaving of the session permit's protocol is safe and heals; every safeguard is needed.

Two slots with two owners of which both may fail: MODEL=long (two minutes of processor time, 800 MB; seen:
1,441,589 orbits, which stand for four times as many states, and 12,658,158 transitions). Else one may fail.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from coordinator.ledger.invariants import check_ledger
from coordinator.ledger.limits import Limits
from coordinator.ledger.snapshot import snapshot_from, snapshot_txn
from coordinator.store.api import Lost
from tests.ledger.ground import FLEET, KEYS
from tests.model.explorer import Explored, Explorer, Step
from tests.model.image import Image
from tests.model.mutants import MOVES, MUTANTS, ONE_FAILS
from tests.model.sessions import Sessions
from tests.model.state import Config, State
from tests.model.symmetry import Reduced, Weighed

IS_LONG = os.environ.get("MODEL") == "long"


def explore(config: Config) -> tuple[Sessions, Explored[State]]:
    model = Sessions(config)
    return model, Explorer(model).run()


def explore_reduced(config: Config) -> tuple[Weighed, Explored[State]]:
    weighed = Weighed(Reduced(Sessions(config)))
    found = Explorer(weighed).run()
    print(f"{found}; they stand for {weighed.states:,} states, "  # noqa: T201 - the figures of the run
          f"{weighed.transitions:,} transitions")
    return weighed, found


def test_two_failing_owners_of_one_slot_are_safe_and_every_permit_becomes_free() -> None:
    _, found = explore(Config())
    print(found)  # noqa: T201 - the figures of the run
    assert found.sound, found
    assert found.states > 200_000
    weighed, reduced = explore_reduced(Config())
    assert reduced.sound, reduced
    assert reduced.states < found.states * 0.6
    assert (weighed.states, weighed.transitions) == (found.states, found.transitions)


@pytest.mark.timeout(1_800)
def test_two_slots_and_two_owners_are_safe_and_every_permit_becomes_free() -> None:
    weighed, found = explore_reduced(Config(slots=2) if IS_LONG else replace(ONE_FAILS, slots=2))
    assert found.sound, found
    assert weighed.states > (5_000_000 if IS_LONG else 600_000)


def test_sessions_that_move_to_the_first_slot_are_safe_and_every_permit_becomes_free() -> None:
    """Their owners hear late, or never; MODEL=long: and one of them may fail."""
    _, found = explore(MOVES)
    print(found)  # noqa: T201 - the figures of the run
    assert found.sound, found
    assert found.states > 100_000
    weighed, reduced = explore_reduced(MOVES)
    assert reduced.sound, reduced
    assert (weighed.states, weighed.transitions) == (found.states, found.transitions)


def test_a_session_that_moves_twice_before_its_owner_hears_is_never_told_to_be_gone() -> None:
    found = Explorer(Sessions(replace(MOVES, slots=3), (0,))).run()
    print(found)  # noqa: T201 - the figures of the run
    assert found.sound, found


@pytest.mark.skipif(not IS_LONG, reason="MODEL=long")
@pytest.mark.timeout(1_800)
def test_sessions_that_move_are_safe_while_an_owner_fails_and_two_writes_are_late() -> None:
    for config in (replace(MOVES, failing=(True, False)), replace(MOVES, pipe=2)):
        _, found = explore(config)
        print(found)  # noqa: T201 - the figures of the run
        assert found.sound, found


def test_permits_that_were_granted_together_never_take_each_others_place() -> None:
    _, found = explore(replace(MOVES, siblings=True))
    assert found.sound, found


def test_two_slots_that_change_places_are_the_same_state() -> None:
    nobody_fails = Config(slots=2, failing=(False, False))
    _, found = explore(nobody_fails)
    weighed, reduced = explore_reduced(nobody_fails)
    assert found.sound, found
    assert reduced.states < found.states * 0.3
    assert (weighed.states, weighed.transitions) == (found.states, found.transitions)


def test_a_violation_is_found_in_the_reduced_space_too() -> None:
    """Also one that takes both slots; the shortest trace is as long as in the whole space."""
    for name in ("release without the compare", "reservation without the receipt's compare"):
        config = replace(MUTANTS[name].config, slots=2)
        _, whole = explore(config)
        _, reduced = explore_reduced(config)
        assert whole.violation == reduced.violation is not None
        assert len(whole.trace) == len(reduced.trace)


@pytest.mark.parametrize("config", [
    replace(ONE_FAILS, restart=True), replace(ONE_FAILS, terminate=True), replace(ONE_FAILS, pipe=2),
], ids=["the server restarts", "sessions are terminated", "two late writes at once"])
def test_more_failures_with_one_failing_owner_are_safe_and_heal(config: Config) -> None:
    _, found = explore(config)
    print(found)  # noqa: T201 - the figures of the run
    assert found.sound, found


@pytest.mark.parametrize("name", MUTANTS)
def test_without_this_safeguard_the_model_finds_the_fault(name: str) -> None:
    mutant = MUTANTS[name]
    _, found = explore(mutant.config)
    print(name, found)  # noqa: T201
    assert mutant.finds in str(found), found
    assert not found.sound


def test_every_state_of_the_ledger_that_was_reached_keeps_the_invariants_of_the_audit() -> None:
    model = Sessions(ONE_FAILS)
    images: set[Image] = set()
    Explorer(Watched(model, images)).run(healing=False)
    assert len(images) > 50
    for image in images:
        outcome = model.production.keyspace(image).txn(snapshot_txn(KEYS, FLEET))
        assert isinstance(outcome, Lost)
        limits = {1: Limits(1, admin=2)}
        assert check_ledger(snapshot_from(outcome.reads, outcome.revision, limits), KEYS) == []


class Watched:
    """A model whose images are noted."""

    def __init__(self, model: Sessions, images: set[Image]) -> None:
        self._model = model
        self._images = images
        self.initial = model.initial
        self.steps = model.steps
        self.is_good = model.is_good

    def violation(self, state: State) -> str | None:
        self._images.add(state.image)
        return self._model.violation(state)


# the explorer itself

class Counter:
    """Counts to three; from two it may fall into a hole."""

    def __init__(self, hole: bool, bound: int = 3) -> None:
        self.hole = hole
        self.bound = bound

    def initial(self) -> int:
        return 0

    def steps(self, state: int) -> list[Step[int]]:
        steps: list[Step[int]] = [("up", state + 1, True, None)] if 0 <= state < 3 else []
        if self.hole and state == 2:
            steps.append(("fall", -1, False, None))
        return steps

    def violation(self, state: int) -> str | None:
        return f"{state} is too high" if state > self.bound else None

    def is_good(self, state: int) -> bool:
        return state == 3


def test_the_explorer_finds_everything_reachable_and_calls_it_sound() -> None:
    found = Explorer(Counter(hole=False)).run()
    assert (found.states, found.transitions, found.sound) == (4, 3, True)


def test_the_explorer_finds_a_violation_by_the_shortest_way() -> None:
    found = Explorer(Counter(hole=False, bound=1)).run()
    assert (found.violation, found.trace) == ("2 is too high", ["up", "up"])


def test_the_explorer_finds_states_that_never_heal() -> None:
    found = Explorer(Counter(hole=True)).run()
    assert (found.leaks, found.trace, found.sound) == (1, ["up", "up", "fall"], False)


def test_an_exploration_that_was_cut_short_is_not_sound() -> None:
    assert not Explorer(Counter(hole=False), states_max=2).run().sound
