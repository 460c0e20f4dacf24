"""What one worker does at its coordinator's word."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import structlog
import trio

from coordinator.ledger.living import Living
from coordinator.ledger.record import Permit
from pooler.observe.events import Event
from pooler.pool import steering
from pooler.pool.holder import LateCheckout
from pooler.pool.ledger_view import LedgerView
from pooler.relay.cancel import cancel_for
from pooler.relay.turns import Turns
from pooler.serve import checkouts
from pooler.serve.registry import Registry

CANCELS_AT_ONCE = 64  # connections to servers

log = structlog.get_logger()


class WorkerHolder:
    """The permits' end of the link calls this. `registry` is set once everything is built."""

    def __init__(self) -> None:
        self.registry: Registry | None = None
        self.show_rows: Callable[[str], list[Any]] | None = None
        self.run_command: Callable[[str, dict[str, Any]], Awaitable[list[str]]] | None = None
        self.epoch_heard: Callable[[LedgerView], None] | None = None
        self._turns: Turns | None = None
        self._limit = trio.CapacityLimiter(CANCELS_AT_ONCE)

    def holds(self, db: str, permit: Permit) -> bool:
        """Is there a session under this permit whose socket is open?"""
        server = self._registry.server(db, permit)
        if server is None:
            return self._registry.replication(db, permit) is not None
        return not server.closing

    def pooled(self) -> set[tuple[str, Permit]]:
        """Every permit whose session one of this worker's pools has, or a replication connection."""
        return checkouts.pooled(self._registry)

    def late_checkouts(self) -> list[LateCheckout]:
        """Sessions whose client is past the transaction limit of its class, the latest first."""
        return checkouts.late_checkouts(self._registry)

    def sessions(self, db: str) -> list[Living]:
        """Every session of this ledger whose socket is open and that is not being closed."""
        registry = self._registry
        found = [(server.opened, server.pool.plan) for server in registry.parts.servers
                 if server.pool.plan.ledger == db and not server.closing]
        found += [(each.opened, each.plan) for each in registry.replications.values()
                  if each.plan.ledger == db]
        return [Living(opened.permit, plan.dbname, plan.user, plan.size_max, opened.pid,
                            opened.backend_start_us, opened.backend, opened.epoch, plan.pool)
                for opened, plan in found]

    def move(self, db: str, permit: Permit, new: Permit) -> None:
        """Its session stands under another permit from now on."""
        server = self._registry.server(db, permit)
        if server is not None:
            server.permit, server.opened = new, replace(server.opened, permit=new)
            if server.row is not None:
                server.row.identify(db, new, server.pid)
        elif (client := self._registry.replication(db, permit)) is not None:
            client.take_permit(new)

    def close_now(self, db: str, permit: Permit) -> None:
        """The ledger no longer has the permit: its session serves nobody any more."""
        server = self._registry.server(db, permit)
        log.error(Event.SESSION_PERMIT_GONE, database=db, permit=str(permit))
        if server is not None:
            server.give_up("the ledger no longer has its permit")
        self._end_replication(db, permit)

    def terminate(self, db: str, permit: Permit) -> None:
        """The session may not be kept: close it with proof."""
        server = self._registry.server(db, permit)
        if server is not None:
            server.give_up("the ledger wants it closed")
        self._end_replication(db, permit)

    def give_up(self, db: str, permit: Permit) -> None:
        """There is no slot for its session any more: close it with proof as it falls idle."""
        server = self._registry.server(db, permit)
        if server is not None:
            steering.give_up(server.pool, server)

    def _end_replication(self, db: str, permit: Permit) -> None:
        client = self._registry.replication(db, permit)
        if client is not None:
            client.break_off("57P01", "the permit of this replication connection is gone")

    def spare(self, db: str, pool: str, user: str, count: int) -> None:
        """Another worker waits: close up to so many that nobody here has needed for a while."""
        for each in self._registry.by_seat(db, pool, user):
            count -= each.spare(count)

    def shed(self, db: str, pool: str, user: str, count: int) -> None:
        """Another worker waits: close so many sessions of the pool as they fall idle."""
        for each in self._registry.by_seat(db, pool, user):
            count -= each.shed(count)
            if count <= 0:
                return

    def ledger_changed(self, view: LedgerView) -> None:
        """A ledger's epoch, policy or reachability changed."""
        if self.registry is not None:
            self.registry.ledger_changed(view)
        if self.epoch_heard is not None:
            self.epoch_heard(view)

    async def cancel(self, key: bytes) -> None:
        """A CancelRequest: cancel what that client runs, or its wait; a console's command. Returns when what
        was sent for it is over."""
        registry = self._registry
        if key in registry.consoles:
            registry.consoles[key].cancel()
        elif key in registry.replications:
            await self._take_turn(key, registry.replications[key].cancel)
        elif (client := registry.clients.get(key)) is not None:
            if client.server is None:
                client.cancel_wait()
            else:
                await self._take_turn(key, partial(self._cancel_running, key))

    async def _take_turn(self, key: bytes, act: Callable[[], Awaitable[None]]) -> None:
        if self._turns is None:
            self._turns = Turns(self._registry.parts.nursery)
        await self._turns.take(key, act)

    async def _cancel_running(self, key: bytes) -> None:
        """What it runs when its turn comes."""
        registry = self._registry
        client = registry.clients.get(key)
        if client is not None and client.server is not None:
            async with self._limit:
                if client.server is not None:
                    await cancel_for(
                        client.server, client, registry.settings.pool.cancel_wait_timeout_seconds)

    def has(self, key: bytes) -> bool:
        """Whether a client of this worker was given this cancel key."""
        registry = self._registry
        return key in registry.clients or key in registry.consoles or key in registry.replications

    async def show(self, what: str) -> list[Any]:
        """This worker's rows of a SHOW."""
        assert self.show_rows is not None
        return self.show_rows(what)

    async def command(self, name: str, args: dict[str, Any]) -> list[str]:
        """This worker's part of a console command; what is to be told of it."""
        assert self.run_command is not None
        return await self.run_command(name, args)

    @property
    def _registry(self) -> Registry:
        assert self.registry is not None
        return self.registry
