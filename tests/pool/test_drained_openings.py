"""What is being opened at a server that is drained is given up when its time is over, as what runs is."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from time import monotonic
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from coordinator.ledger.record import EpochState, LedgerState
from pooler.admission.ticket import Ticket
from pooler.pool import growth, janitor, steering
from pooler.pool.ledger_view import LedgerView
from tests.pool.running import Running, running

ACTIVE = LedgerView("orders-primary/write", state=LedgerState.ACTIVE, reachable=True, epoch=1,
                    epoch_state=EpochState.ACTIVE)
DRAINS = replace(ACTIVE, epoch_state=EpochState.DRAINING, drain_timeout_seconds=3.0)
ADVANCED = replace(ACTIVE, epoch=2, drain_timeout_seconds=3.0)


class Silent:
    """A server that takes connections and says nothing: how many attempts hang there, and how many ended."""

    def __init__(self) -> None:
        self.begun = self.given_up = 0

    async def open_session(self, *_: Any) -> Any:
        self.begun += 1
        try:
            await trio.sleep_forever()
        finally:
            self.given_up += 1


async def hanging(run: Running, monkeypatch: pytest.MonkeyPatch) -> Silent:
    """One attempt hangs, under epoch 1."""
    server = Silent()
    monkeypatch.setattr(growth, "open_session", server.open_session)
    steering.ledger_changed(run.pool, ACTIVE)
    asks: Ticket = Ticket(lambda _: None, lambda _: None)
    asks.start(monotonic(), inf)
    assert run.pool.request(asks) is None
    await wait_all_tasks_blocked()
    assert (server.begun, server.given_up) == (1, 0)
    return server


async def test_an_opening_is_given_up_with_the_drain_timeout_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(monkeypatch, size=1) as run:
        server = await hanging(run, monkeypatch)
        steering.ledger_changed(run.pool, DRAINS)
        janitor.end_overdue_drain(run.pool, monotonic())
        await wait_all_tasks_blocked()
        assert server.given_up == 0
        janitor.end_overdue_drain(run.pool, monotonic() + DRAINS.drain_timeout_seconds)
        await wait_all_tasks_blocked()
        assert server.given_up == 1


async def test_a_drain_that_is_given_up_lets_it_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, size=1) as run:
        server = await hanging(run, monkeypatch)
        steering.ledger_changed(run.pool, DRAINS)
        steering.ledger_changed(run.pool, ACTIVE)
        janitor.end_overdue_drain(run.pool, monotonic() + 100)
        await wait_all_tasks_blocked()
        assert server.given_up == 0


async def test_what_is_opened_at_the_next_server_meanwhile_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, size=2) as run:
        server = await hanging(run, monkeypatch)
        steering.ledger_changed(run.pool, ADVANCED)
        asks: Ticket = Ticket(lambda _: None, lambda _: None)
        asks.start(monotonic(), inf)
        assert run.pool.request(asks) is None
        await wait_all_tasks_blocked()
        assert server.begun == 2
        janitor.end_overdue_drain(run.pool, monotonic() + ADVANCED.drain_timeout_seconds)
        await wait_all_tasks_blocked()
        assert server.given_up == 1
