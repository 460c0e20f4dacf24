"""Interleavings by chance of several clients over few sessions: each client hears what it hears with a
session of its own, and what is committed is the same.

POOLER_DIFFERENTIAL_STEPS is how many messages to send (of all clients), POOLER_DIFFERENTIAL_SEED where to
begin: each round's seed is printed, and the short form begins at the same one each time. A failing script is
kept in a file; POOLER_DIFFERENTIAL_SCRIPT=that file has test_kept_script shorten and show it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from pooler.demo.client import Disconnected, RawClient, ServerSaid
from tests.differential.conftest import POOLS, Rig
from tests.differential.generated import COMMITTED, EMPTY, SETUP, pieces, scripts
from tests.differential.players import Cut, differences, play_straight, run
from tests.differential.script import Reference, Write, kinds

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]

STEPS = int(os.environ.get("POOLER_DIFFERENTIAL_STEPS", "2500"))
# a failure takes ten seconds to be seen, and so too long to be made short
PHASES = (Phase.generate,)
ROUND = 40  # scripts between two looks at the number of steps


def cutter(seed_: int) -> Cut:
    """Bytes in the pieces of `pieces`."""
    sizes = pieces(seed_)

    def cut(data: bytes) -> Sequence[bytes]:
        found, at, n = [], 0, 0
        while at < len(data) and n < 200:
            found.append(data[at : at + sizes[n % len(sizes)]])
            at += len(found[-1])
            n += 1
        return [*found, data[at:]] if at < len(data) else found

    return cut


def breaks_the_server(expected: Reference) -> bool:
    """Whether the server itself met an internal error, which is no measure: 18 does at the first command
    behind a group that a query has ended and its Sync, which may be the pooler's own instead."""
    return any(said.type == "E" and said.error().sqlstate == "XX000"
               for heard in expected.heard.values() for said in heard)


class Compared:
    """A rig whose tables are emptied before each run."""

    def __init__(self, rig: Rig, pool: str) -> None:
        self.rig, self.pool = rig, pool
        self.steps = 0
        self.owner = self._owner()

    def _owner(self) -> RawClient:
        owner = self.rig.straight()
        run(owner, "set client_min_messages = error", SETUP)
        return owner

    def compare(self, steps: list[Write], cut_seed: int) -> None:
        """Both runs. Fails with the difference. A script that the server itself crashes at is no measure: 18
        may, at an Execute of the unnamed portal that a query which failed in a block left behind."""
        try:
            self._compare(steps, cut_seed)
        except (AssertionError, Disconnected, OSError, ServerSaid):
            if not self._has_crashed():
                raise
            print("the server itself has crashed")  # noqa: T201
            self.rig.database.server.wait_until_up()
            self.owner.close()
            self.owner = self._owner()
            self.rig.watch.go_on_with(self.rig.superuser())

    def close(self) -> None:
        """Its own connection."""
        self.owner.close()

    def _has_crashed(self) -> bool:
        """Nothing else ends a session at which nothing is wrong."""
        try:
            self.owner.query("select 1")
        except (Disconnected, OSError, ServerSaid):
            return True
        return False

    def _compare(self, steps: list[Write], cut_seed: int) -> None:
        run(self.owner, EMPTY)
        expected = play_straight(steps, self.rig.straight, self.rig.watch)
        if breaks_the_server(expected):
            return
        committed = self.owner.query(COMMITTED)
        run(self.owner, EMPTY)
        sessions = POOLS[self.pool][1]
        found = differences(steps, expected, partial(self.rig.pooled, self.pool), sessions, cutter(cut_seed))
        assert not found, "\n".join(f"client {n}: {said}" for n, said in found.items())
        assert self.owner.query(COMMITTED) == committed
        self.steps += sum(len(kinds(write.data)) or 1 for write in steps)


def kept(pool: str, steps: list[Write], cut_seed: int) -> Path:
    """Where a script that failed lies from now on."""
    said = {"pool": pool, "cut_seed": cut_seed, "steps": [(step.data.hex(), step.client) for step in steps]}
    with tempfile.NamedTemporaryFile("w", prefix="pooler-script-", suffix=".json", delete=False) as file:
        json.dump(said, file)
    return Path(file.name)


@pytest.mark.timeout(6 * 3600 if STEPS > 10_000 else 300)
@pytest.mark.parametrize("pool", ["_one", "", "_session"])
def test_any_interleaving_is_heard_as_straight_from_the_server(newest: Rig, pool: str) -> None:
    first = int(os.environ.get("POOLER_DIFFERENTIAL_SEED", "77"))
    compared = Compared(newest, pool)
    number = 0
    with closing(compared):
        while compared.steps < STEPS // 3:
            print(f"POOLER_DIFFERENTIAL_SEED={first + number} of {compared.steps} steps")  # noqa: T201
            _round(compared, first + number)
            number += 1


def _round(compared: Compared, seed_: int) -> None:
    @seed(seed_)
    @settings(max_examples=ROUND, database=None, deadline=None, phases=PHASES,
              suppress_health_check=list(HealthCheck))
    @given(steps=scripts(), cut_seed=st.integers(0, 1 << 16))
    def compare(steps: list[Write], cut_seed: int) -> None:
        try:
            compared.compare(steps, cut_seed)
        except AssertionError:
            note(f"POOLER_DIFFERENTIAL_SCRIPT={kept(compared.pool, steps, cut_seed)}")
            raise

    compare()
