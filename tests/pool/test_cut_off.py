"""on_ledger_loss: stop: past the end of the worker's lease nobody is granted a session, and all wait on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from pooler.admission.ticket import Ticket
from pooler.pool import cut_off
from pooler.pool.core import PoolCore
from pooler.pool.cut_off import CutOff
from tests.pool.fake_coordinator import TTL_SECONDS
from tests.pool.fake_session import FakeSession
from tests.pool.world import world


def ticket_at(now: float) -> tuple[Ticket, list[Any]]:
    granted: list[Any] = []
    ticket = Ticket(granted.append, lambda error: None, None)
    ticket.start(now, now + 100)
    return ticket, granted


def core_until(until: float) -> tuple[PoolCore[FakeSession], FakeSession]:
    core: PoolCore[FakeSession] = PoolCore(4, 2)
    session = FakeSession()
    core.opening += 1
    assert core.opened(session, 0.0)
    core.grants_until = until
    return core, session


def test_who_asks_past_the_end_waits_beside_an_idle_session_and_gets_it_when_it_is_renewed() -> None:
    core, session = core_until(10.0)
    ticket, granted = ticket_at(10.0)
    assert core.request(ticket) is None
    assert core.wake(11.0) == []
    assert (granted, core.idle) == ([], [session])
    core.grants_until = 20.0
    assert core.wake(11.0) == []
    assert granted == [session]
    core.check()


def test_who_asks_before_the_end_is_served() -> None:
    core, session = core_until(10.0)
    assert core.request(ticket_at(9.9)[0]) is session


def test_a_session_that_comes_back_past_the_end_goes_to_nobody_and_is_not_closed() -> None:
    core, session = core_until(10.0)
    assert core.request(ticket_at(9.0)[0]) is session
    ticket, granted = ticket_at(9.5)
    assert core.request(ticket) is None
    assert core.give(session, 10.0)
    assert (granted, core.idle, core.count_waiting()) == ([], [session], 1)


class Pools:
    """Pools that count how often they were woken."""

    def __init__(self) -> None:
        self.woken = 0
        self.core = SimpleNamespace(grants_until=0.0)

    def wake(self) -> None:
        self.woken += 1


def test_each_renewal_moves_the_end_and_wakes_only_who_was_past_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, left = 100.0, 5.0
    monkeypatch.setattr(cut_off, "monotonic", lambda: now)
    pool = Pools()
    over = CutOff(lambda: True, lambda: left, lambda: [pool])  # type: ignore[list-item]
    now = 102.0
    over.renewed()
    assert (pool.core.grants_until, pool.woken, over.is_over) == (107.0, 0, False)
    now = 107.0
    assert over.is_over
    over.renewed()
    assert (pool.core.grants_until, pool.woken) == (112.0, 1)


def test_with_serve_there_is_no_end_and_a_changed_setting_counts_from_the_next_renewal() -> None:
    stops = False
    pool = Pools()
    over = CutOff(lambda: stops, lambda: -float("inf"), lambda: [pool])  # type: ignore[list-item]
    assert (over.until, over.is_over) == (float("inf"), False)
    stops = True
    over.renewed()
    assert over.is_over
    stops = False
    over.renewed()
    assert (pool.core.grants_until, pool.woken) == (float("inf"), 1)


def test_a_worker_without_a_lease_yet_grants_nothing() -> None:
    assert CutOff(lambda: True, lambda: -float("inf")).is_over


async def test_the_end_follows_the_heartbeats_that_are_answered_and_no_others(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with world(tmp_path) as w:
        ends: list[float] = []
        w.permits.on_renewed(lambda: ends.append(w.permits.lease_left_seconds() + trio.current_time()))
        await trio.sleep(TTL_SECONDS)  # noqa: TID251 - on a clock that jumps
        assert len(ends) >= 2
        assert ends == sorted(ends)
        w.coordinator.alive = False
        w.coordinator.registers = False
        count = len(ends)
        await trio.sleep(2 * TTL_SECONDS)  # noqa: TID251 - on a clock that jumps
        assert len(ends) == count
        assert w.permits.lease_left_seconds() < 0
