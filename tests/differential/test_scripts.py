"""What a client hears through the pooler is what it hears from PostgreSQL itself, in every pool mode."""

from __future__ import annotations

from functools import partial

import pytest

from tests.differential.conftest import POOLS, Rig
from tests.differential.players import differences, play_straight, run
from tests.differential.script import Reference, Steps
from tests.differential.scripts import BOUND, EVERYWHERE, SETUP, TABLES, TWO

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]


def reference(rig: Rig, steps: Steps) -> Reference:
    """Straight at the server, from empty tables."""
    empty(rig)
    return play_straight(steps, rig.straight, rig.watch)


def empty(rig: Rig) -> None:
    with rig.straight() as client:
        run(client, "set client_min_messages = error", SETUP, f"truncate {', '.join(TABLES)}")


def wrong(rig: Rig, scripts: dict[str, Steps], pools: tuple[str, ...]) -> dict[tuple[str, str], object]:
    """(script, pool): what was heard otherwise there."""
    found: dict[tuple[str, str], object] = {}
    for name, steps in scripts.items():
        expected = reference(rig, steps)
        for pool in pools:
            mode, sessions = POOLS[pool]
            if mode == "statement" and expected.blocks:
                continue
            empty(rig)
            said = differences(steps, expected, partial(rig.pooled, pool), sessions)
            if said:
                found[name, pool] = said
    return found


@pytest.mark.parametrize("pool", POOLS)
def test_every_script_is_answered_as_by_the_server(rig: Rig, pool: str) -> None:
    assert wrong(rig, EVERYWHERE, (pool,)) == {}


def test_what_a_session_keeps_it_keeps_in_session_pooling(rig: Rig) -> None:
    assert wrong(rig, BOUND, ("_session",)) == {}


@pytest.mark.parametrize("pool", POOLS)
def test_two_clients_hear_only_their_own(rig: Rig, pool: str) -> None:
    assert wrong(rig, TWO, (pool,)) == {}
