"""Scripts on a rig: straight, then through pools of it, from empty tables."""

from __future__ import annotations

from functools import partial

from tests.differential.conftest import POOLS, Rig
from tests.differential.players import differences, play_straight, run
from tests.differential.script import Steps
from tests.differential.scripts import SETUP, TABLES

TRANSACTIONS = ("_one", "")
# an outdated plan is refused by the session that has it: another prepares the text anew, and answers
SAME_SESSION = frozenset({"a changed plan"})


def empty(rig: Rig) -> None:
    """The tables of the scripts are there and empty."""
    with rig.straight() as client:
        run(client, "set client_min_messages = error", SETUP, f"truncate {', '.join(TABLES)}")


def wrong(rig: Rig, scripts: dict[str, Steps], *pools: str) -> dict[tuple[str, str], object]:
    """(script, pool): what was heard otherwise there. Where statements are pooled, scripts with a transaction
    block are left out."""
    found: dict[tuple[str, str], object] = {}
    for name, steps in scripts.items():
        empty(rig)
        expected = play_straight(steps, rig.straight, rig.watch)
        for pool in pools:
            mode, sessions = POOLS[pool]
            if mode == "statement" and expected.blocks:
                continue
            if name in SAME_SESSION and mode != "session" and sessions > 1:
                continue
            empty(rig)
            said = differences(steps, expected, partial(rig.pooled, pool), sessions)
            if said:
                found[name, pool] = said
    return found


def same(rig: Rig, steps: Steps, *pools: str) -> None:
    """Fails where a pool (default: those of transactions) is heard otherwise than the server."""
    assert wrong(rig, {"": steps}, *(pools or TRANSACTIONS)) == {}
