"""The console's view of the fleet: questions go to every worker through the coordinator and come back as one.

Without a coordinator a SHOW is answered for this worker alone. A command is refused then: half of a PAUSE
that is told as done would be worse than none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import trio

from coordinator.link import Link, LinkLost, LinkRefused
from pooler.console.as_pgbouncer import AS_PGBOUNCER
from pooler.console.manner import OWN
from pooler.console.merge import KEYS
from pooler.console.session import CommandResult, ConsoleUser, Interrupt, serve_console
from pooler.errors import FleetUnreachable, PoolerError
from pooler.net.login import LoggedIn
from pooler.net.stream import RawSocket
from pooler.pool.permits import Permits
from pooler.serve.as_pgbouncer import PgBouncerView
from pooler.serve.commands import no_client
from pooler.serve.figures import VERSION, Figures
from pooler.serve.registry import Registry
from pooler.serve.stillness import ITEM as STILLNESS
from pooler.serve.stillness import Look, look_at
from pooler.wire.cancel_keys import RANDOM_BYTES, make_key

SUPERVISORS = frozenset({"reload", "shutdown"})
WAITING = frozenset({"pause", "wait_close"})
LOOK_SECONDS = (0.05, 0.5)  # first and longest pause between two looks whether all is still
UNHEARD_SECONDS_MAX = 10.0


class ReloadRefused(PoolerError):
    """The config file has faults: nothing was changed."""

    sqlstate = "F0000"


class WaitEndedByResume(PoolerError):
    """A PAUSE waited, and another administrator said RESUME."""

    sqlstate = "57014"


class FleetView:
    """What the console may ask and order."""

    def __init__(self, registry: Registry, permits: Permits, figures: Figures, link: Link) -> None:
        self._supervisor = link
        self._registry = registry
        self._permits = permits
        self._figures = figures

    async def show(self, item: str, argument: str | None) -> list[dict[str, Any]]:
        """Rows of every worker, each with its `worker`."""
        if item == "version":
            return [{"version": f"pooler {VERSION}"}]
        if item == "ledger":
            return list(await self._permits.ledger_rows())
        if item == "ticket":
            return await self._permits.ticket_rows(argument or "")
        rows: list[dict[str, Any]] = []
        for answer in await self._ask_all(item):
            found = (answer.get("value") or {}).get("rows", [])
            rows += [{**row, "worker": answer["worker"]} for row in found]
        return await self._counted_once(rows) if item == "lists" else rows

    async def _counted_once(self, lists: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """LISTS with the fleet's pools and users: no worker has them all, and several have the same."""
        pools = await self.show("pools", None)
        counts = {"pools": len({tuple(pool[key] for key in KEYS["pools"]) for pool in pools}),
                  "users": len({pool["user"] for pool in pools})}
        return [row | {"items": counts.get(row["list"], row["items"])} for row in lists]

    async def command(self, name: str, args: dict[str, Any]) -> CommandResult:
        """Carry out a command on every worker; RELOAD and SHUTDOWN are the supervisor's. PAUSE and WAIT_CLOSE
        wait until every worker is still, however long that takes. Raises FleetUnreachable where it cannot be
        known that every worker did."""
        name = name.lower()
        if name in SUPERVISORS:
            return await self._tell_supervisor(name, args)
        try:
            answers = await self._permits.fleet("command", {"name": name, "args": args})
        except FleetUnreachable as away:
            raise FleetUnreachable(
                f"{away}: {name.upper()} may hold on none or some of the workers, say it again") from None
        done = [str(a["worker"]) for a in answers if not a.get("error")]
        failed = {str(a["worker"]): str(a["error"]) for a in answers if a.get("error")}
        if name == "kill_client" and done:  # a client is one worker's; the others have not got it
            elsewhere = no_client(str(args.get("client")))
            failed = {worker: why for worker, why in failed.items() if why != elsewhere}
        if name in WAITING and not failed:
            await self._wait(name, args.get("database"), done)
        said = [text for answer in answers for text in (answer.get("value") or {}).get("notices") or ()]
        return CommandResult(done=done, failed=failed, notices=tuple(dict.fromkeys(said)))

    async def _wait(self, name: str, database: str | None, workers: list[str]) -> None:
        """Ask again until it is so; a worker may be out of reach for a moment."""
        pause, longest = LOOK_SECONDS
        heard_at = trio.current_time()
        while True:
            look = await self._look(name, database, workers)
            if look.resumed:
                raise WaitEndedByResume("RESUME was said before every session was idle: nothing is paused")
            if not look.unheard and not look.busy:
                return
            if not look.unheard:
                heard_at = trio.current_time()
            elif trio.current_time() - heard_at > UNHEARD_SECONDS_MAX:
                raise _not_known(name, look.unheard)
            await trio.sleep(pause)  # noqa: TID251 - sessions fall idle in other processes, unheard
            pause = min(pause * 2, longest)

    async def _look(self, name: str, database: str | None, workers: list[str]) -> Look:
        try:
            answers = await self._permits.fleet("show", {"what": STILLNESS})
        except FleetUnreachable as away:
            return Look(unheard=dict.fromkeys(workers, str(away)))
        return look_at(name, database, workers, answers)

    async def _tell_supervisor(self, op: str, args: dict[str, Any]) -> CommandResult:
        try:
            mode = str(args.get("mode", "now"))
            answer = await self._supervisor.call(op, drain=mode != "now", mode=mode)
        except (LinkLost, LinkRefused) as failed:
            raise FleetUnreachable(f"the supervisor does not answer: {failed}") from None
        if answer.get("refused"):
            raise ReloadRefused("; ".join(answer["problems"]))
        notices = [*answer.get("problems", ()), *answer.get("warnings", ())]
        return CommandResult(done=["supervisor"], notices=notices)

    async def _ask_all(self, item: str) -> list[dict[str, Any]]:
        try:
            return await self._permits.fleet("show", {"what": item})
        except FleetUnreachable:
            here = str(self._registry.settings.fleet.name)
            return [{"worker": here, "value": {"rows": self._figures.rows(item)}}]


def _not_known(name: str, unheard: Mapping[str, str]) -> FleetUnreachable:
    said = "; ".join(f"worker {worker}: {why}" for worker, why in sorted(unheard.items()))
    holds = "PAUSE holds, but whether" if name == "pause" else "whether"
    return FleetUnreachable(f"{holds} every session has ended its work is not known ({said}): "
                            f"say {name.upper()} again")


async def open_console(raw: RawSocket, asked: LoggedIn, registry: Registry, view: FleetView) -> None:
    """Greet an admin or stats user and serve the console until it leaves."""
    settings = registry.settings
    is_admin = asked.is_owner or asked.user in settings.admin.users
    user = ConsoleUser(asked.user, is_admin=is_admin, address=asked.address.host)
    key = make_key(
        registry.key_owner, os.urandom(RANDOM_BYTES), protocol_minor=asked.protocol_minor)
    interrupt = registry.consoles[key] = Interrupt(
        user, application_name=asked.parameters.get("application_name", ""),
        number=registry.numbers.reserve(registry.parts.permits.ordinal))
    interrupt.on_query = registry.console_asked
    stand_in = PgBouncerView(view, registry) if settings.admin.as_pgbouncer else None
    try:
        await serve_console(
            raw, user, stand_in or view, owed=asked.owed, leftover=asked.leftover, key=key,
            interrupt=interrupt, manner=AS_PGBOUNCER if settings.admin.as_pgbouncer else OWN)
    finally:
        del registry.consoles[key]
        if stand_in is not None:
            await stand_in.leave()
