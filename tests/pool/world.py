"""A worker's permits, a coordinator and a server, all in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from coordinator.ledger.living import Living
from coordinator.ledger.record import Permit
from pooler.pool.holder import LateCheckout
from pooler.pool.ledger_view import LedgerView
from pooler.pool.link_up import Identity
from pooler.pool.opener import OpenPlan
from pooler.pool.permits import Permits
from pooler.wire.auth import ServerSecret
from tests.pool.fake_coordinator import DB, FakeCoordinator, FakeLedger
from tests.pool.fake_server import FakeServer


@dataclass
class FakeHolder:
    """Records what it is told. `held`: permits whose sessions are open."""

    held: set[tuple[str, Permit]] = field(default_factory=set)
    closed: list[Permit] = field(default_factory=list)
    terminated: list[Permit] = field(default_factory=list)
    shed_for: list[tuple[str, str, str, int]] = field(default_factory=list)
    spared_for: list[tuple[str, str, str, int]] = field(default_factory=list)
    views: list[LedgerView] = field(default_factory=list)
    cancelled: list[bytes] = field(default_factory=list)
    open: list[Living] = field(default_factory=list)
    moved: list[tuple[Permit, Permit]] = field(default_factory=list)
    late: list[LateCheckout] = field(default_factory=list)
    given_up: list[Permit] = field(default_factory=list)

    def holds(self, db: str, permit: Permit) -> bool:
        return (db, permit) in self.held

    def pooled(self) -> set[tuple[str, Permit]]:
        return set(self.held)

    def late_checkouts(self) -> list[LateCheckout]:
        return self.late

    def sessions(self, db: str) -> list[Living]:
        return [each for each in self.open if (db, each.permit) in self.held]

    def move(self, db: str, permit: Permit, new: Permit) -> None:
        self.held.discard((db, permit))
        self.held.add((db, new))
        self.moved.append((permit, new))

    def close_now(self, db: str, permit: Permit) -> None:
        self.held.discard((db, permit))
        self.closed.append(permit)

    def terminate(self, db: str, permit: Permit) -> None:
        self.terminated.append(permit)

    def give_up(self, db: str, permit: Permit) -> None:
        self.given_up.append(permit)

    def shed(self, db: str, pool: str, user: str, count: int) -> None:
        self.shed_for.append((db, pool, user, count))

    def spare(self, db: str, pool: str, user: str, count: int) -> None:
        self.spared_for.append((db, pool, user, count))

    def ledger_changed(self, view: LedgerView) -> None:
        self.views.append(view)

    async def cancel(self, key: bytes) -> None:
        self.cancelled.append(key)

    async def show(self, what: str) -> list[Any]:
        if what == "nonsense":
            raise ValueError(what)
        return [[what, 1]]

    async def command(self, name: str, args: dict[str, Any]) -> list[str]:
        self.cancelled.append(name.encode())
        return []


@dataclass
class World:
    """Everything of one test."""

    permits: Permits
    coordinator: FakeCoordinator
    ledger: FakeLedger
    server: FakeServer
    holder: FakeHolder

    def plan(self, **changes: Any) -> OpenPlan:
        values: dict[str, Any] = {
            "db": DB, "dbname": "orders", "user": "app", "secret": ServerSecret(), "seats": 10,
            "wait_seconds": 3.0, "connect_timeout_seconds": 4.0}
        return OpenPlan(**(values | changes))

    async def settled(self) -> None:
        """Until the ledger has answered for everything, on a link that works."""
        self.coordinator.down = False
        self.coordinator.fault = lambda op, nth: None
        await self.permits.settled()
        await self.server.ended()

    def check(self) -> None:
        """What must hold once all is settled and nobody holds a session: no permit without a path."""
        for slot in self.ledger.slots.values():
            assert slot.state == "SESSION_UNKNOWN", f"{slot} has nobody who will ever free it"
            assert slot.pid or slot.abandoned, f"{slot} can be proven neither absent nor never born"
        statistics = self.permits.statistics()
        assert statistics.requests_open == statistics.errands_open == statistics.permits_gone_total == 0
        assert sum(statistics.held.values()) == len(self.ledger.slots)
        assert not self.server.alive


@asynccontextmanager
async def world(directory: Path) -> AsyncIterator[World]:
    """A world whose link is up."""
    server = FakeServer(directory)
    ledger = FakeLedger(server.address, lambda tag: tag in server.alive)
    holder = FakeHolder()
    async with trio.open_nursery() as nursery:
        coordinator = FakeCoordinator(ledger, nursery)
        permits = Permits(coordinator.connect, Identity("boot-1", 0, 1, 1), holder)
        nursery.start_soon(server.run)
        await nursery.start(permits.run)
        await permits.registered.wait()
        yield World(permits, coordinator, ledger, server, holder)
        nursery.cancel_scope.cancel()
