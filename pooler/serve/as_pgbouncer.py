"""The fleet as a console shows it that stands for PgBouncer's: with the console among what it shows.

PgBouncer counts its console as a database, a pool and a user, its administrators as clients, and knows the
users of its auth_file before they come. Consoles are those of the worker that is asked.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import trio

from pooler.console.as_pgbouncer import PROTOCOL_VIOLATION
from pooler.console.desk import Refused
from pooler.console.merge import merge_rows
from pooler.console.pgbouncer_state import CONSOLE, State, why_not
from pooler.console.session import CommandResult, Interrupt
from pooler.console.session import FleetView as View
from pooler.console.tables import COLUMNS
from pooler.errors import PoolerError
from pooler.observe.rows import clock_text
from pooler.serve.registry import EVERY, Registry
from pooler.settings_models import ANY_DATABASE

CONSOLE_POOL_SIZE: Final = 2
UNLIMITED_PERMITS: Final = 10_000  # what a drop-in sets where the ini sets no limit
FIRST_LINK_SECONDS: Final = 20.0
LOOK_SECONDS: Final = 0.02
LEAVE_SECONDS: Final = 5.0
STATS: Final = frozenset({"stats", "stats_totals", "stats_averages"})
_TOTALS: Final = {"received": "client_bytes", "recv": "client_bytes", "sent": "server_bytes"}
Row = dict[str, Any]


def or_else(own: int | None, of_all: int) -> int:
    """A limit of one, or that of all."""
    return of_all if own is None else own


def totals_rows(stats: Sequence[Row]) -> list[Row]:
    """SHOW TOTALS of the rows of SHOW STATS: its own names for bytes and prepared statements."""
    (merged,) = merge_rows("stats", [row | {"database": CONSOLE} for row in stats])
    found = []
    for column in COLUMNS["stats"][1:]:
        kind, _, name = column.name.partition("_")
        if name != "client_login_count":  # it came later
            name = f"ps_{name}" if name.endswith(("parse_count", "bind_count")) else _TOTALS.get(name, name)
            found.append({"name": f"{kind}_{name}", "value": merged[column.name]})
    return found


class PgBouncerView:
    """Wraps the fleet's view: the same commands, PgBouncer's rows."""

    def __init__(self, view: View, registry: Registry) -> None:
        self._view = view
        self._registry = registry
        self._suspends = False

    async def command(self, name: str, args: dict[str, Any]) -> CommandResult:
        """As the fleet's; what is said in the first moments waits until the workers can be told."""
        permits = self._registry.parts.permits
        with trio.move_on_after(FIRST_LINK_SECONDS):
            while not permits.statistics().linked:  # noqa: ASYNC110 - as the next line says
                await trio.sleep(LOOK_SECONDS)  # noqa: TID251 - the link tells nobody that it is up
        refused = self._why_not(name, args.get("database"))
        if refused:
            raise Refused(refused, code=PROTOCOL_VIOLATION)
        self._suspends = name == "suspend" or (self._suspends and name != "resume")
        done = await self._view.command(name, args)
        if name == "shutdown" and args.get("mode", "now") != "now":
            with trio.move_on_after(LEAVE_SECONDS):
                while not self._registry.leaving:  # noqa: ASYNC110 - the supervisor tells us over another link
                    await trio.sleep(LOOK_SECONDS)  # noqa: TID251 - as above
        return done

    async def leave(self) -> None:
        """The console goes: what it suspended moves again, for nobody may be able to say so any more."""
        if self._suspends and self._registry.suspended:
            with trio.move_on_after(LEAVE_SECONDS, shield=True), suppress(PoolerError):
                await self._view.command("resume", {})

    def _why_not(self, name: str, database: str | None) -> str:
        registry = self._registry
        if name == "resume" and database is not None and database != CONSOLE and not self._exists(database):
            return f"no such database: {database}"
        named = registry.paused - {EVERY}
        halted = registry.suspended or EVERY in registry.paused
        return why_not(name, database, State(named, halted=halted, leaving=registry.leaving))

    def _exists(self, name: str) -> bool:
        return name in self._registry.settings.databases or any(self._registry.by_name(name))

    async def show(self, item: str, argument: str | None) -> list[Row]:
        """As the fleet's, and what PgBouncer has besides."""
        rows = await self._view.show(item, argument)
        if item == "databases":
            return [*self._databases(rows), self._console_database()]
        if item == "peers":
            peers = self._registry.settings.admin.show_peers
            return [dict(zip(("peer_id", "host", "port", "pool_size"), peer, strict=True)) for peer in peers]
        if item == "pools":
            return [*rows, self._console_pool()]
        if item in STATS:
            return [*rows, self._console_stats(item)]
        if item == "totals":
            return totals_rows(await self.show("stats", None))
        if item == "clients":
            return [*rows, *map(self._console_client, self._registry.consoles.values())]
        if item == "users":
            return self._users(rows)
        if item == "lists":
            return self._lists(rows)
        return rows

    def _databases(self, rows: Sequence[Row]) -> list[Row]:
        """The entry for any name is not shown; names it has served are."""
        settings = self._registry.settings
        named = [self._database(row) for row in rows if row["name"] != ANY_DATABASE]
        served = {pool.plan.name: pool.plan.dbname for pool in self._registry.by_name(None)
                  if pool.plan.name not in settings.databases}
        for row in rows:
            if row["name"] == ANY_DATABASE:
                named += [self._database(row) | {"name": name, "database": dbname}
                          for name, dbname in sorted(served.items())]
        return named

    def _database(self, row: Row) -> Row:
        """Overrides are shown where there are some; our number for `no limit` is none."""
        entry = self._registry.settings.databases.get(str(row["name"]))
        limit = row.get("max_connections")
        own: Row = {} if entry is None else {
            "pool_mode": entry.pool_mode, "server_lifetime": entry.server_lifetime_seconds}
        said = self._hosts().get(str(row["name"]))
        if said is not None:
            own |= {"host": said[0], "load_balance_hosts": said[1]}
        return row | own | {"max_connections": 0 if limit == UNLIMITED_PERMITS else limit}

    def _hosts(self) -> dict[str, tuple[str | int | None, str | int | None]]:
        rows = self._registry.settings.admin.show_hosts
        return {str(name): (host, balance) for name, host, balance in rows}

    def _console_database(self) -> Row:
        return {
            "name": CONSOLE, "port": self._port(), "database": CONSOLE, "force_user": CONSOLE,
            "pool_size": CONSOLE_POOL_SIZE, "min_pool_size": 0, "reserve_pool_size": 0,
            "pool_mode": "statement", "max_connections": 0, "current_connections": 0,
            "max_client_connections": self._registry.settings.pool.max_db_client_connections,
            "current_client_connections": len(self._registry.consoles),
            "paused": 0, "disabled": 0}

    def _console_stats(self, item: str) -> Row:
        """Its commands are its queries, and its transactions."""
        names = [column.name for column in COLUMNS[item]]
        asked = self._registry.console_queries
        wanted = ("xact_count", "query_count")
        counts = {name: asked for name in names if name.removeprefix("total_") in wanted}
        return dict.fromkeys(names, 0) | (counts if item != "stats_averages" else {}) | {"database": CONSOLE}

    def _console_pool(self) -> Row:
        counts = dict.fromkeys((
            "cl_waiting", "cl_active_cancel_req", "cl_waiting_cancel_req", "sv_active", "sv_active_cancel",
            "sv_being_canceled", "sv_idle", "sv_used", "sv_tested", "sv_login", "maxwait", "maxwait_us"), 0)
        return {"database": CONSOLE, "user": CONSOLE, "cl_active": len(self._registry.consoles),
                "pool_mode": "statement", **counts}

    def _console_client(self, console: Interrupt) -> Row:
        who, port = console.who, self._port()
        at = clock_text(int(console.since * 1e6))
        return {
            "type": "C", "user": who.name if who is not None else CONSOLE, "database": CONSOLE,
            "replication": "none", "state": "active", "addr": who.address if who is not None else "unix",
            "port": port, "local_addr": "unix", "local_port": port, "connect_time": at, "request_time":
            clock_text(time.time_ns() // 1000), "wait": 0, "wait_us": 0, "close_needed": 0,
            "ptr": f"{id(console):#x}", "link": "", "remote_pid": 0, "tls": "",
            "application_name": console.application_name, "prepared_statements": 0, "id": console.number}

    def _users(self, rows: Sequence[Row]) -> list[Row]:
        """Every user that is known, and administrators among the clients."""
        here = Counter(console.who.name for console in self._registry.consoles.values() if console.who)
        idle = {"current_connections": 0, "current_client_connections": 0}
        found = {str(row["name"]): row for row in rows}
        known = {*found, *here, *self._registry.known_users, *self._registry.settings.users, CONSOLE}
        shown = []
        for name in sorted(known):
            row = idle | found.get(name, {}) | self._own(name) | {"name": name}
            shown.append(row | {"current_client_connections":
                                int(row["current_client_connections"]) + here[name]})
        return shown

    def _own(self, name: str) -> Row:
        """What the config says of a user: sizes are text, empty where unset."""
        own, of_all = self._registry.settings.user(name), self._registry.settings.pool
        size, reserve = own.pool_size, own.reserve_pool_size
        return {"pool_size": "" if size is None else str(size), "pool_mode": own.pool_mode,
                "reserve_pool_size": "" if reserve is None else str(reserve),
                "max_user_connections": or_else(own.max_user_connections, of_all.max_user_connections),
                "max_user_client_connections": or_else(
                    own.max_user_client_connections, of_all.max_user_client_connections)}

    def _lists(self, rows: Sequence[Mapping[str, Any]]) -> list[Row]:
        """Logged-in administrators are clients, the console is a database and a pool."""
        consoles = len(self._registry.consoles)
        users = len({*self._registry.known_users, CONSOLE})
        more = {"databases": 1, "pools": 1, "used_clients": consoles, "login_clients": -consoles}
        shown = []
        for row in rows:
            name, items = str(row["list"]), int(row["items"])
            items = max(items, users) if name == "users" else max(0, items + more.get(name, 0))
            shown.append({**row, "items": items})
        return shown

    def _port(self) -> int:
        fleet = self._registry.settings.fleet
        return fleet.listen[0].port if fleet.listen else fleet.unix_socket_port or 0
