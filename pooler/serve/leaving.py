"""How a worker leaves in PgBouncer's way: the shared port is shut, who is inside stays as long as he likes.

The unix socket stays open for the console until the end; clients that come in by it are refused.
"""

from __future__ import annotations

import trio

from coordinator.link import Args, LinkRefused
from pooler.net.listener import Acceptor
from pooler.serve.commands import Commands
from pooler.serve.registry import Registry

LOOK_SECONDS = 0.05
WAITS = ("clients", "servers")


class Leaving:
    """Ops of the supervisor's link. `doors`: the acceptors that are shut."""

    def __init__(self, registry: Registry, commands: Commands) -> None:
        self._registry = registry
        self._commands = commands
        self.doors: list[Acceptor] = []

    async def leave(self, args: Args) -> Args:
        """Returns once the last client is gone (`wait_for` clients), or everything is paused and no session
        is in use (servers)."""
        wait_for = args.get("wait_for")
        if wait_for not in WAITS:
            raise LinkRefused("no_wait", f"wait_for must be one of {', '.join(WAITS)}")
        self._registry.leaving = True
        for door in self.doors:
            door.stop()
        if wait_for == "servers":
            await self._commands.run("pause", {})
        while self._is_held(wait_for):  # noqa: ASYNC110 - as the next line says
            await trio.sleep(LOOK_SECONDS)  # noqa: TID251 - clients leave in the reactor, unheard
        return {}

    async def order(self, args: Args) -> Args:
        """A console command that came by a signal: `name` and its `args`."""
        await self._commands.run(str(args["name"]), dict(args.get("args") or {}))
        return {}

    def _is_held(self, wait_for: str) -> bool:
        if wait_for == "clients":
            return bool(self._registry.clients)
        return any(pool.core.active for pool in self._registry.by_name(None))
