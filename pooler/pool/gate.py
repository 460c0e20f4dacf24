"""The gate before a connect: who opens a session asks this host's coordinator to be let in.

So few are under way of one pool, and at one server, over all workers. Who stands at the gate holds no permit,
and who has one already does not wait there. A session that came back meanwhile ends the wish for another,
until the wait has lasted for the gate's budget: then the pool is short of sessions, and one is insisted on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Protocol

import trio

from pooler.errors import PoolerError

HOLD_MARGIN_SECONDS = 10.0  # for the permit, and for the word that the connect is over
HOLD_SECONDS_UNBOUNDED = 60.0  # where server_connect_timeout is off
BUSY = "gate_busy"  # why there is no permit: others connect


class NotWanted(PoolerError):
    """While it stood at the gate, whoever it was for got a session that came back."""


class Asks(Protocol):
    """The way to the coordinator."""

    async def enter_gate(self, wait_seconds: float, **ask: Any) -> tuple[bool, bool]:
        """Whether it is let in by then, and whether it had to wait. Raises NoPermit where nobody answers."""

    def leave_gate(self, request_id: str) -> None:
        """Its connect is over, or it is not wanted any more."""


class Gate(Protocol):
    """The gate as one opening sees it."""

    async def enter(self, *, waits: bool) -> bool:
        """Whether it is let in; not `waits`: at once. Raises NoPermit, NotWanted."""

    def connecting(self) -> None:
        """It has its permit."""

    def leave(self) -> None:
        """It has connected, or will not. Any number of times."""


class OpenGate:
    """No gate: for sessions of no pool."""

    async def enter(self, *, waits: bool) -> bool:
        """At once."""
        return True

    def connecting(self) -> None:
        """It does."""

    def leave(self) -> None:
        """It has."""


@dataclass(slots=True)
class ScalingCounts:
    """How one pool of this worker grew: under way now, and since its making."""

    inflight_creates: int = 0
    creates_started: int = 0
    burst_gate_waits: int = 0
    burst_gate_budget_exhausted: int = 0
    anticipation_wakes_notify: int = 0
    anticipation_wakes_timeout: int = 0
    create_fallback: int = 0  # opened because none came back in the time expected
    replenish_deferred: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Which gate: of a pool of a ledger, and what it and its server let in."""

    db: str
    pool: str
    user: str
    pool_max: int
    server_max: int
    connect_timeout_seconds: float

    def ask(self) -> dict[str, Any]:
        """What the coordinator is told of it."""
        bounded = self.connect_timeout_seconds < float("inf")
        hold = self.connect_timeout_seconds + HOLD_MARGIN_SECONDS if bounded else HOLD_SECONDS_UNBOUNDED
        return {"db": self.db, "pool": self.pool, "user": self.user, "pool_max": self.pool_max,
                "server_max": self.server_max, "hold_seconds": hold}


@dataclass(slots=True, eq=False)
class PoolGate:
    """The gate for one opening of a pool. `wanted`: somebody waits; `insists`: none is idle."""

    asks: Asks
    place: Place
    counts: ScalingCounts
    wait_seconds: float
    budget_seconds: float
    wanted: Callable[[], bool]
    insists: Callable[[], bool]
    _request_id: str = ""
    _is_in: bool = False
    _connects: bool = False

    async def enter(self, *, waits: bool) -> bool:
        """See Gate."""
        asked_at = trio.current_time()
        waited = await self._ask(self.wait_seconds if waits else 0.0)
        is_spent = trio.current_time() - asked_at >= self.budget_seconds
        self.counts.burst_gate_waits += waited
        self.counts.burst_gate_budget_exhausted += waited and is_spent
        if self._is_in and waited and not self.wanted() and not (is_spent and self.insists()):
            self.leave()
            raise NotWanted
        return self._is_in

    async def _ask(self, wait_seconds: float) -> bool:
        """Whether it had to wait."""
        self._request_id, answered = token_hex(8), False
        try:
            self._is_in, waited = await self.asks.enter_gate(
                wait_seconds, request_id=self._request_id, **self.place.ask())
            answered = True
        finally:
            if not answered:  # it may have been let in all the same
                self.asks.leave_gate(self._request_id)
        return waited

    def connecting(self) -> None:
        """See Gate."""
        self._connects = True
        self.counts.creates_started += 1
        self.counts.inflight_creates += 1

    def leave(self) -> None:
        """See Gate."""
        if self._connects:
            self._connects = False
            self.counts.inflight_creates -= 1
        if self._is_in:
            self._is_in = False
            self.asks.leave_gate(self._request_id)


class NoGate:
    """Where there is no coordinator to ask."""

    async def enter_gate(self, wait_seconds: float, **ask: Any) -> tuple[bool, bool]:
        """Always."""
        return True, False

    def leave_gate(self, request_id: str) -> None:
        """Nothing to tell."""


@dataclass(frozen=True, slots=True)
class Gates:
    """What all pools of a worker share of it. `workers`: how many this host has."""

    asks: Asks = field(default_factory=NoGate)
    workers: int = 1
