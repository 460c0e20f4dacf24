"""The simulation finds nothing in the product, and finds what is broken on purpose.

SIMULATION_ROUNDS=100000 (as in CI) and SIMULATION_SEED=N, or `python -m tests.model.simulation`. A failure
names the seed of its shard: `python -m tests.model.simulation --rounds 1000 --seed THAT` shows it again.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

from tests.model.judge import Fault
from tests.model.product_mutants import PRODUCT_MUTANTS
from tests.model.simulation import FAULT_NAMES, ROWS, simulate, simulate_shards
from tests.model.tenants import TENANTS

IS_CI = bool(os.environ.get("CI"))
ROUNDS = int(os.environ.get("SIMULATION_ROUNDS") or (100_000 if IS_CI else 4_000))
SEED = int(os.environ.get("SIMULATION_SEED") or time.time_ns() % 1_000_000_000)
PROCESSES = 2
MUTANT_ROUNDS_MAX = 100_000
MUTANT_ROUNDS = 500  # of each seed that is tried


def show(figures: Counter[str]) -> None:
    for name in sorted({*figures, *ROWS, *FAULT_NAMES}):
        print(f"{figures[name]:>9}  {name}")  # noqa: T201 - the figures of the run


@pytest.mark.timeout(1_800)
def test_every_round_ends_whole_with_no_permit_lost_and_nobody_starved() -> None:
    print(f"seed {SEED}")  # noqa: T201 - repeats the run
    figures = simulate_shards(ROUNDS, SEED, PROCESSES)
    show(figures)
    assert figures["rounds"] >= ROUNDS
    assert figures["grants"] == figures["releases"] > figures["rounds"] / 2
    granted = [figures[f"tickets of {tenant} granted"] for tenant in TENANTS]
    assert min(granted) > 0.8 * max(granted)
    if ROUNDS >= 100_000:
        assert {name for name in ROWS if figures[name] < 100} == set()
        assert {name for name in FAULT_NAMES if figures[name] < 1_000} == set()


def test_the_same_seed_repeats_the_same_run_and_another_is_another() -> None:
    first = simulate(150, 8)
    assert simulate(150, 8) == first
    assert simulate(150, 9) != first


@pytest.mark.parametrize("name", PRODUCT_MUTANTS)
def test_a_product_without_this_safeguard_is_found_out(name: str) -> None:
    mutant = PRODUCT_MUTANTS[name]
    with mutant.applied():
        for number in range(MUTANT_ROUNDS_MAX // MUTANT_ROUNDS):
            try:
                simulate(MUTANT_ROUNDS, mutant.first + number, mutant.tamper, mutant.make)
            except Fault as found:
                print(f"{name}: after at most {(number + 1) * MUTANT_ROUNDS} rounds from seed "  # noqa: T201
                      f"{mutant.first} on: {found}")
                return
    pytest.fail(f"{MUTANT_ROUNDS_MAX} rounds without a fault")
