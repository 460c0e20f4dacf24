"""The console's commands as one worker carries them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from coordinator.link import LinkRefused
from pooler.errors import UsageFault
from pooler.observe.events import Event
from pooler.pool import steering
from pooler.serve.registry import EVERY, Registry
from pooler.serve.runtime_settings import TLS_KEYS, with_setting
from pooler.serve.standing import Standing, Stands
from pooler.settings import Settings

TLS_WAITS = "TLS settings could not be applied, still using old configuration"  # PgBouncer's words

log = structlog.get_logger()


def no_client(number: str) -> str:
    """What a worker says that has no such client."""
    return f"no client has the id {number}: SHOW CLIENTS lists them"


def _not_by_itself(database: str | None, *, suspended: bool) -> str:
    how = "suspended" if suspended else "paused"
    return f"database {database} cannot be resumed by itself: everything is {how}, say RESUME without a name"


class Commands:
    """One worker's part of PAUSE, RESUME and the rest. Each holds when it returns, and waits for nobody: what
    PAUSE and WAIT_CLOSE wait for, the console asks after.
    """

    def __init__(
        self, registry: Registry, standing: Standing, take_settings: Callable[[Settings], list[str]]
    ) -> None:
        self._registry = registry
        self._standing = standing
        self._take_settings = take_settings
        self._actions = {
            "pause": self._pause, "resume": self._resume, "disable": self._disable, "enable": self._enable,
            "reconnect": self._reconnect, "kill": self._kill, "wait_close": self._wait_close,
            "suspend": self._suspend,
        }
        self._special = {"kill_client": self._kill_client, "set": self._set}

    @property
    def names(self) -> frozenset[str]:
        """What `run` knows."""
        return frozenset((*self._actions, *self._special))

    async def run(self, name: str, args: dict[str, Any]) -> list[str]:
        """Carry out `name` on args["database"] (None: all), KILL_CLIENT on args["client"], SET args["key"] to
        args["value"] → what the administrator must know although it was done. Raises LinkRefused with the
        reason."""
        special = self._special.get(name.lower())
        if special is not None:
            return special(args)
        database = args.get("database")
        if database is not None and not self._is_known(database):
            raise LinkRefused("no_database", f"no such database: {database}")
        action = self._actions.get(name.lower())
        if action is None:
            raise LinkRefused("no_command", f"a worker knows no command {name}")
        await action(database)
        return []

    def _is_known(self, database: str) -> bool:
        """An entry, or a name that the entry for any name has served."""
        return database in self._registry.settings.databases or any(self._registry.by_name(database))

    def recall(self) -> None:
        """Take over what was paused, disabled and set before this worker started."""
        stands = self._standing.read()
        self._registry.disabled |= stands.disabled
        self._registry.paused |= stands.paused
        for name in stands.paused:
            for pool in self._registry.by_name(name if name != EVERY else None):
                pool.pause()
        for key, value in stands.settings.items():
            try:
                self._change(key, value)
            except UsageFault as fault:
                log.error(Event.SOMETHING_FAILED, what=f"SET {key} = {value}, as before", why=str(fault))

    def reloaded(self) -> None:
        """The config was read again: what was SET is over."""
        if self._registry.set_here:
            self._registry.set_here.clear()
            self._keep()

    async def _pause(self, database: str | None) -> None:
        """Nothing more is granted."""
        self._mark_paused(database)

    async def _wait_close(self, database: str | None) -> None:
        """Nothing is to be done: the console waits."""

    async def _resume(self, database: str | None) -> None:
        """One database does not go on by itself while everything is held: that is refused, but for who stands
        for PgBouncer, which has it that this one is not paused besides."""
        registry = self._registry
        held = database is not None and (registry.suspended or EVERY in registry.paused)
        if held and not registry.settings.admin.as_pgbouncer:
            raise LinkRefused("all_paused", _not_by_itself(database, suspended=registry.suspended))
        registry.paused -= {database} if database is not None else set(registry.paused)
        self._keep()
        if database is None:
            self.wake()
        for pool in registry.by_name(database):
            if not held:
                pool.resume()

    async def _suspend(self, database: str | None) -> None:
        """Nothing is granted, and no byte passes: what clients and servers send stays with the kernel."""
        self._registry.suspended = True
        for pool in self._registry.by_name(None):
            pool.pause()
        self._registry.parts.reactor.hold()

    def wake(self) -> None:
        """What was suspended moves again; what is paused stays so."""
        registry = self._registry
        if registry.suspended:
            registry.suspended = False
            registry.parts.reactor.release()
            for pool in registry.by_name(None):
                if not registry.is_paused(pool.plan.name):
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
            steering.reconnect(pool)

    async def _kill(self, database: str | None) -> None:
        """Drop every client and session of a database, and serve nobody until RESUME."""
        self._mark_paused(database)
        for pool in self._registry.by_name(database):
            for client in list(pool.clients):
                client.break_off("57P01", "database killed by an administrator")
            pool.close_idle("killed by an administrator")
        for replication in tuple(self._registry.replications.values()):
            if database in (None, replication.plan.name):
                replication.break_off("57P01", "database killed by an administrator")

    def _set(self, args: dict[str, Any]) -> list[str]:
        try:
            notices = self._change(str(args["key"]), str(args["value"]))
        except UsageFault as fault:
            raise LinkRefused("no_setting", str(fault)) from None
        self._keep()
        return notices

    def _change(self, key: str, value: str) -> list[str]:
        """Settings of TLS hold one by one, though they are of use only together: until they are, those of
        before serve, which is told. Raises UsageFault."""
        before = self._registry.settings
        changed = with_setting(before, key, value)
        problems = self._take_settings(changed)
        if problems and key not in TLS_KEYS:
            stood = self._take_settings(before)
            caused = [each for each in problems if each not in stood]
            if caused:
                raise UsageFault("; ".join(caused))
            self._take_settings(changed)
        self._registry.set_here[key] = value
        return [f"{TLS_WAITS}\n{'; '.join(problems)}"] if problems and key in TLS_KEYS else []

    def _kill_client(self, args: dict[str, Any]) -> list[str]:
        number = str(args.get("client"))
        is_number = number.isascii() and number.isdigit() and len(number) <= 10
        client = self._registry.numbers.find(int(number)) if is_number else None
        if client is None:
            raise LinkRefused("no_client", no_client(number))
        client.break_off("57P01", "connection ended by an administrator")
        return []

    def _keep(self) -> None:
        registry = self._registry
        self._standing.keep(Stands(
            frozenset(registry.paused), frozenset(registry.disabled), dict(registry.set_here)))

    def _mark_paused(self, database: str | None) -> None:
        registry = self._registry
        registry.paused |= {database} if database is not None else {EVERY}
        self._keep()
        for pool in registry.by_name(database):
            pool.pause()
