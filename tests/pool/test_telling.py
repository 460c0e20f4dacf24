"""What a worker's heartbeat tells once a lease cycle of the permits that its pools hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from coordinator.ledger.record import Kind, Permit
from coordinator.ledger.states import SessionState
from pooler.pool import telling
from pooler.pool.holder import LateCheckout
from pooler.pool.holdings import Holdings
from pooler.pool.telling import lost_permits, tell_cycle
from pooler.pool.transaction_limit import transaction_limit_seconds
from tests.pool.fake_coordinator import TTL_SECONDS
from tests.pool.world import FakeHolder, world

P = Permit(Kind.MAIN, 3, 17)
RAW = ["main", 3, 17]


def holding(state: SessionState, *, ending: bool = False) -> Holdings:
    holdings = Holdings()
    holdings.granted("db", P)
    holdings.moved("db", P, state)
    if ending:
        holdings.ended("db", P, SessionState.RELEASED)
    return holdings


def told(holdings: Holdings, holder: FakeHolder) -> dict[str, Any]:
    return tell_cycle(holdings, holder, lost_permits(holdings, holder))


def test_an_open_session_in_no_pool_is_not_named() -> None:
    assert told(holding(SessionState.OPEN), FakeHolder())["held"] == []
    assert told(holding(SessionState.OPEN), FakeHolder(held={("db", P)}))["held"] == [["db", RAW]]


@pytest.mark.parametrize("holdings", [
    holding(SessionState.RESERVED), holding(SessionState.CONNECTING), holding(SessionState.CLOSING),
    holding(SessionState.OPEN, ending=True)], ids=["reserved", "connecting", "closing", "ended"])
def test_what_is_being_opened_or_has_begun_to_end_is_in_no_pool_by_right(holdings: Holdings) -> None:
    assert told(holdings, FakeHolder())["held"] == [["db", RAW]]


def test_the_word_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "HELD_MAX", 0)
    holder = FakeHolder(held={("db", P)}, late=[LateCheckout("db", P, 42, "acme", n, 1.0) for n in range(99)])
    word = told(holding(SessionState.OPEN), holder)
    assert "held" not in word  # half of it would make leaks of the rest
    assert len(word["late"]) == telling.LATE_MAX
    assert word["late"][0] == {"db": "db", "permit": RAW, "pid": 42, "tenant": "acme", "age_us": 0,
                               "limit_seconds": 1.0, "holder": ""}


def test_the_limit_is_that_of_the_clients_class_or_of_the_first() -> None:
    policy = {"executionClasses": {"interactive": {"transactionLimitSeconds": 3.0},
                                   "batch": {"transactionLimitSeconds": 60.0}}}
    assert [transaction_limit_seconds(policy, name) for name in ("batch", "", "other")] == [60.0, 3.0, 3.0]
    assert transaction_limit_seconds({}, "batch") == 0.0


async def test_a_heartbeat_tells_once_a_lease_cycle(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with world(tmp_path) as w:
        await trio.sleep(4 * TTL_SECONDS + 1)  # noqa: TID251 - on a clock that jumps
        assert [bool(word) for word in w.coordinator.beats].count(True) == 4
        assert all(word in ({}, {"held": [], "late": []}) for word in w.coordinator.beats)
