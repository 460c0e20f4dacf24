"""The scenarios' own judges reject what they are for: each case is a small edit of one that passes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from chaos.clients import Told
from chaos.drain import StoppedSeen, judge_errors, judge_gap, judge_stopped
from chaos.reserve import RECOVERS, RECOVERY_SAMPLES_MAX, AdminReserve
from pooler.demo.postgres import Server

STOPPED = StoppedSeen(3, frozenset({"main/1.5"}), frozenset({"main/1.5", "main/2.6"}), True, True,
                      {"absent": 2}, 0.5)


def reserve(**outcomes: int) -> AdminReserve:
    made = AdminReserve(cast(Server, Path()), 2, "shop", "shop_web")
    made.outcomes = Counter({name.replace("_", " "): count for name, count in outcomes.items()})
    return made


def told(times: list[float], **more: Any) -> Told:
    tenant = {"acknowledged": [(f"t{at}", at) for at in times], "errors": {}, "unknown": 0, "disconnects": 0,
              "done": len(times), "unknown_tokens": [], "refused_tokens": []}
    return Told(times[0], times[-1], [{**tenant, **more}])


STEADY = [100 + number / 100 for number in range(400)]


def test_a_reserve_that_let_every_login_in_passes() -> None:
    assert reserve(**{"in": 100}).verdict().held
    assert reserve(**{"in": 100, RECOVERS: RECOVERY_SAMPLES_MAX}).verdict(recoveries=1).held


@pytest.mark.parametrize(("outcomes", "recoveries"), [
    ({"in": 1000, "NO SLOT": 1}, 1), ({"in": 1000, "28P01": 1}, 1), ({"in": 1000, RECOVERS: 1}, 0),
    ({"in": 1000, RECOVERS: RECOVERY_SAMPLES_MAX + 1}, 1), ({"in": 1, RECOVERS: 2}, 1), ({}, 1)])
def test_a_reserve_that_was_eaten_or_not_looked_at_fails(outcomes: dict[str, int], recoveries: int) -> None:
    assert not reserve(**outcomes).verdict(recoveries).held


def test_a_stopped_server_whose_permits_waited_for_their_proof_passes() -> None:
    assert judge_stopped("continued", STOPPED, {"absent"}).held


@pytest.mark.parametrize("change", [
    {"exit_code": 0}, {"exit_code": 4}, {"listed": frozenset()}, {"listed": frozenset({"main/9.9"})},
    {"has_resolve_line": False}, {"held": False}, {"proofs": {"absent": 1}}, {"proofs": {"attested": 2}}])
def test_a_stopped_server_whose_permits_were_not_told_or_not_proven_fails(change: dict[str, Any]) -> None:
    assert not judge_stopped("continued", replace(STOPPED, **change), {"absent"}).held


def test_a_drain_that_nobody_noticed_passes() -> None:
    assert judge_gap(told(STEADY), 101, 102).held
    assert judge_errors(told(STEADY)).held


def test_a_drain_with_a_long_gap_or_too_few_writes_fails() -> None:
    assert not judge_gap(told([*STEADY, STEADY[-1] + 2.1]), 101, 102).held
    assert not judge_gap(told(STEADY), 200, 201).held


@pytest.mark.parametrize("change", [{"errors": {"57P01": 1}}, {"unknown": 1}, {"disconnects": 1}])
def test_a_drain_that_a_client_noticed_fails(change: dict[str, Any]) -> None:
    assert not judge_errors(told(STEADY, **change)).held
