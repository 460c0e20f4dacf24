"""The console's commands as one worker carries them out."""

from __future__ import annotations

from typing import Any

import trio

from coordinator.link import LinkRefused
from pooler.serve.registry import Registry
from pooler.serve.standing import Standing

PAUSE_POLL_SECONDS = 0.02


class Commands:
    """One worker's part of PAUSE, RESUME and the rest; each returns when it holds here."""

    def __init__(self, registry: Registry, standing: Standing) -> None:
        self._registry = registry
        self._standing = standing
        self._actions = {
            "pause": self._pause, "resume": self._resume, "disable": self._disable, "enable": self._enable,
            "reconnect": self._reconnect, "kill": self._kill,
        }

    async def run(self, name: str, args: dict[str, Any]) -> None:
        """Carry out `name` on args["database"] (None: all). Raises LinkRefused with the reason."""
        database = args.get("database")
        if database is not None and database not in self._registry.settings.databases:
            raise LinkRefused("no_database", f"no such database: {database}")
        action = self._actions.get(name.lower())
        if action is None:
            raise LinkRefused("no_command", f"a worker knows no command {name}")
        await action(database)

    def recall(self) -> None:
        """Take over what was paused and disabled before this worker started."""
        paused, disabled = self._standing.read()
        self._registry.disabled |= disabled
        self._registry.paused |= paused
        for name in paused:
            for pool in self._registry.by_name(name):
                pool.pause()

    async def _pause(self, database: str | None) -> None:
        """Nothing more is granted; done when no session is in use."""
        self._mark_paused(database)
        while any(pool.core.active for pool in self._registry.by_name(database)):
            if not self._is_paused(database):
                return  # resumed meanwhile
            await trio.sleep(PAUSE_POLL_SECONDS)  # noqa: TID251 - sessions fall idle in the reactor, unheard

    async def _resume(self, database: str | None) -> None:
        registry = self._registry
        registry.paused -= {database} if database is not None else set(registry.paused)
        self._keep()
        for pool in registry.by_name(database):
            pool.resume()

    async def _disable(self, database: str | None) -> None:
        if database is None:
            raise LinkRefused("no_database", "DISABLE needs the name of a database")
        self._registry.disabled.add(database)
        self._keep()

    async def _enable(self, database: str | None) -> None:
        if database is None:
            raise LinkRefused("no_database", "ENABLE needs the name of a database")
        self._registry.disabled.discard(database)
        self._keep()

    async def _reconnect(self, database: str | None) -> None:
        for pool in self._registry.by_name(database):
            pool.reconnect()

    async def _kill(self, database: str | None) -> None:
        """Drop every client and session of a database, and serve nobody until RESUME."""
        self._mark_paused(database)
        for pool in self._registry.by_name(database):
            for client in list(pool.clients):
                client.break_off("57P01", "database killed by an administrator")
            pool.close_idle("killed by an administrator")

    def _keep(self) -> None:
        self._standing.keep(self._registry.paused, self._registry.disabled)

    def _mark_paused(self, database: str | None) -> None:
        registry = self._registry
        registry.paused |= {database} if database is not None else set(registry.settings.databases)
        self._keep()
        for pool in registry.by_name(database):
            pool.pause()

    def _is_paused(self, database: str | None) -> bool:
        paused = self._registry.paused
        return database in paused if database is not None else bool(paused)
