"""How a worker leaves in PgBouncer's way: the shared port is shut, who is inside stays as long as he likes.

The unix socket stays open for the console until the end; clients that come in by it are refused.
"""

from __future__ import annotations

from pathlib import Path

import structlog
import trio

from coordinator.link import Args, LinkRefused
from pooler.net.listener import Acceptor
from pooler.observe.events import Event
from pooler.serve.commands import Commands
from pooler.serve.drain import end_streams
from pooler.serve.moving import move_clients
from pooler.serve.registry import Registry

LOOK_SECONDS = 0.05
WAITS = ("clients", "servers", "moved")

log = structlog.get_logger()


class Leaving:
    """Ops of the supervisor's link. `doors`: the acceptors that are shut."""

    def __init__(self, registry: Registry, commands: Commands) -> None:
        self._registry = registry
        self._commands = commands
        self.doors: list[Acceptor] = []
        self.unix_doors: list[Acceptor] = []

    async def leave(self, args: Args) -> Args:
        """Returns once the last client is gone (`wait_for` clients), everything is paused and no session is
        in use (servers), or every client is gone or has moved over to the worker at `to` (moved)."""
        wait_for = args.get("wait_for")
        if wait_for not in WAITS:
            raise LinkRefused("no_wait", f"wait_for must be one of {', '.join(WAITS)}")
        self._registry.leaving = True
        self._commands.wake()
        for door in self.doors:
            door.stop()
        if wait_for == "moved":
            for door in self.unix_doors:
                door.stop()
            await self._move(Path(str(args.get("to"))))
        if wait_for == "servers":
            await self._commands.run("pause", {})
        while self._is_held(wait_for):
            if wait_for == "servers":
                self._refuse_waiting()
            await trio.sleep(LOOK_SECONDS)  # noqa: TID251 - clients leave in the reactor, unheard
        return {}

    async def order(self, args: Args) -> Args:
        """A console command that came by a signal: `name` and its `args`."""
        await self._commands.run(str(args["name"]), dict(args.get("args") or {}))
        return {}

    async def _move(self, to: Path) -> None:
        try:
            await move_clients(self._registry, to)
        except OSError as fault:  # those that are left leave by themselves
            log.error(Event.SOMETHING_FAILED, what="clients cannot move", why=str(fault))

    def _refuse_waiting(self) -> None:
        """Who has no session gets none any more."""
        for pool in self._registry.by_name(None):
            for client in list(pool.clients):
                if client.ticket.waiting:
                    client.break_off("57P01", "server shutting down")

    def _is_held(self, wait_for: str) -> bool:
        if wait_for == "moved":
            end_streams(self._registry)
        if wait_for != "servers":
            return bool(self._registry.clients or self._registry.replications)
        return any(pool.core.active for pool in self._registry.by_name(None))
