"""The console's view of the fleet: questions go to every worker through the coordinator and come back as one.

Without a coordinator a SHOW is answered for this worker alone. A command is refused then: half of a PAUSE
that is told as done would be worse than none.
"""

from __future__ import annotations

from typing import Any

from coordinator.link import Link, LinkLost, LinkRefused
from pooler.console.session import CommandResult, ConsoleUser, serve_console
from pooler.errors import FleetUnreachable, PoolerError
from pooler.net.login import LoggedIn
from pooler.net.stream import RawSocket
from pooler.pool.permits import Permits
from pooler.serve.figures import VERSION, Figures
from pooler.serve.registry import Registry
from pooler.settings import Settings


class ReloadRefused(PoolerError):
    """The config file has faults: nothing was changed."""

    sqlstate = "F0000"


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
        rows: list[dict[str, Any]] = []
        for answer in await self._ask_all(item):
            found = (answer.get("value") or {}).get("rows", [])
            rows += [{**row, "worker": answer["worker"]} for row in found]
        return rows

    async def command(self, name: str, args: dict[str, Any]) -> CommandResult:
        """Carry out a command on every worker; RELOAD and SHUTDOWN are the supervisor's. Raises
        FleetUnreachable where it cannot be known that every worker did."""
        if name.lower() in ("reload", "shutdown"):
            return await self._tell_supervisor(name.lower(), args)
        try:
            answers = await self._permits.fleet("command", {"name": name, "args": args})
        except FleetUnreachable as away:
            raise FleetUnreachable(
                f"{away}: {name.upper()} may hold on none or some of the workers, say it again") from None
        done = [str(a["worker"]) for a in answers if not a.get("error")]
        failed = {str(a["worker"]): str(a["error"]) for a in answers if a.get("error")}
        return CommandResult(done=done, failed=failed)

    async def _tell_supervisor(self, op: str, args: dict[str, Any]) -> CommandResult:
        try:
            answer = await self._supervisor.call(op, drain=bool(args.get("mode")))
        except (LinkLost, LinkRefused) as failed:
            raise FleetUnreachable(f"the supervisor does not answer: {failed}") from None
        if answer.get("refused"):
            raise ReloadRefused("; ".join(answer["problems"]))
        return CommandResult(done=["supervisor"])

    async def _ask_all(self, item: str) -> list[dict[str, Any]]:
        try:
            return await self._permits.fleet("show", {"what": item})
        except FleetUnreachable:
            here = str(self._registry.settings.fleet.name)
            return [{"worker": here, "value": {"rows": self._figures.rows(item)}}]


async def open_console(raw: RawSocket, asked: LoggedIn, settings: Settings, view: FleetView) -> None:
    """Greet an admin or stats user and serve the console until it leaves."""
    user = ConsoleUser(asked.user, is_admin=asked.user in settings.admin.users, address=asked.address.host)
    await serve_console(raw, user, view, owed=asked.owed, leftover=asked.leftover)
