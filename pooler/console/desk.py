"""Carries an administrator's commands out, through the console's view of the fleet."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import structlog
import trio

from pooler.console.commands import Act, Answer, Command, Nothing, Show
from pooler.console.manner import OWN, Manner
from pooler.console.merge import merge_rows
from pooler.console.tables import cells
from pooler.errors import PoolerError
from pooler.observe.events import Event
from pooler.wire import messages
from pooler.wire.messages import Column

PER_WORKER = "workers"
SOCKETS = frozenset({"sockets", "active_sockets"})

# what SOCKETS tells of buffers: bytes pass through at once, none stays in ours while a row is made
_NOTHING_BUFFERED = dict.fromkeys(
    ("recv_pos", "pkt_pos", "pkt_remain", "send_pos", "send_remain", "pkt_avail", "send_avail"), 0)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ConsoleUser:
    """Who is here. A user that is no admin may only SHOW."""

    name: str
    is_admin: bool
    address: str


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Who carried a command out, who could not and why, and who did not answer in time. `notices`: what the
    user must know although it was carried out."""

    done: Sequence[str]
    failed: Mapping[str, str] = field(default_factory=dict)
    missing: Sequence[str] = ()
    notices: Sequence[str] = ()


class FleetView(Protocol):
    """The fleet as the console sees it. What cannot be had is a PoolerError."""

    async def show(self, item: str, argument: str | None) -> list[dict[str, Any]]:
        """Rows of every worker, each with its `worker`."""

    async def command(self, name: str, args: dict[str, Any]) -> CommandResult:
        """Carry it out on every worker; returns when it holds, however long that takes (PAUSE, WAIT_CLOSE:
        cancelled when the user leaves), or when a worker has refused or is out of time."""


class Refused(PoolerError):
    """The console will not do it. `code` is the SQLSTATE."""

    def __init__(self, message: str, *, code: str, hint: str = "", detail: str = "") -> None:
        super().__init__(message)
        self.code, self.hint, self.detail = code, hint, detail


@dataclass(frozen=True, slots=True)
class Result:
    """What a command answers."""

    tag: str
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[str | int | None, ...], ...] = ()
    notices: tuple[str, ...] = ()


class Interrupt:
    """A console user, and his cancel requests: they end the command that is carried out, if there is one."""

    def __init__(
        self, who: ConsoleUser | None = None, *, application_name: str = "", number: int = 0
    ) -> None:
        self.who = who
        self.application_name = application_name
        self.number = number  # among the clients
        self.since = time.time()
        self.scope: trio.CancelScope | None = None
        self.on_query: Callable[[], None] = lambda: None

    def cancel(self) -> None:
        """End it."""
        if self.scope is not None:
            self.scope.cancel()


class Desk:
    """Carries commands out for one user."""

    def __init__(
        self, who: ConsoleUser, fleet: FleetView, interrupt: Interrupt, manner: Manner = OWN
    ) -> None:
        self.manner = manner
        self._who = who
        self._fleet = fleet
        self._interrupt = interrupt
        self.in_block = False

    @property
    def status(self) -> Literal[b"I", b"T"]:
        """The transaction status that a driver that said BEGIN wants to see."""
        return b"T" if self.in_block else b"I"

    async def run(self, command: Command) -> Result:
        """Raises PoolerError with what to tell the user."""
        self._interrupt.on_query()
        try:
            return await self._run(command)
        except PoolerError as error:
            raise self.manner.reworded(command, error) from error

    async def _run(self, command: Command) -> Result:
        if isinstance(command, Show):
            return await self._show(command)
        if isinstance(command, Act):
            return await self._act(command)
        if isinstance(command, Answer):
            return _answer(command)
        if isinstance(command, Nothing):
            if command.opens is not None:
                self.in_block = command.opens
            return Result(command.tag, notices=(command.notice,) if command.notice else ())
        raise Refused(command.text, code=command.sqlstate, hint=command.hint)

    async def _show(self, show: Show) -> Result:
        if show.item == "help":
            return Result("SHOW", notices=(self.manner.help(),))
        if show.item == "version":
            return self._table("version", [{"version": self.manner.version}])
        if show.item in SOCKETS:
            return self._table(show.item, await self._sockets(only_active=show.item == "active_sockets"))
        if show.item == "fds" and not self._who.is_admin:
            raise Refused(f'user "{self._who.name}" may not see descriptors', code="42501")
        per_worker = show.item != "ticket" and show.argument is not None and (
            show.argument.lower() == PER_WORKER)
        rows = await self._fleet.show(show.item, None if per_worker else show.argument)
        if show.item == "ledger" and show.argument is not None:
            rows = [row for row in rows if show.argument in (row.get("database"), row.get("state"))]
        return self._table(show.item, rows if per_worker else merge_rows(show.item, rows))

    async def _sockets(self, *, only_active: bool) -> list[dict[str, Any]]:
        rows = [*await self._fleet.show("clients", None), *await self._fleet.show("servers", None)]
        return [_NOTHING_BUFFERED | row for row in rows if not only_active or row.get("state") == "active"]

    def _table(self, item: str, rows: Sequence[Mapping[str, Any]]) -> Result:
        columns = self.manner.columns(item, rows)
        return Result("SHOW", columns, tuple(tuple(cells(columns, row)) for row in rows))

    async def _act(self, act: Act) -> Result:
        if not self._who.is_admin:
            raise Refused(f'user "{self._who.name}" may only SHOW', code="42501")
        arguments = dict(act.arguments)
        log.info(Event.COMMAND_ISSUED, user=self._who.name, address=self._who.address, command=act.name, **{
            name: arguments[name] for name in ("database", "mode", "client", "key") if name in arguments})
        outcome = await self._uninterrupted(act, arguments)
        if outcome.failed or outcome.missing:
            raise _incomplete(act, outcome)
        return Result(act.tag, notices=tuple(outcome.notices))

    async def _uninterrupted(self, act: Act, arguments: dict[str, Any]) -> CommandResult:
        """Raises Refused if the user cancels it: that ends the wait, and takes nothing back."""
        with trio.CancelScope() as self._interrupt.scope:
            return await self._fleet.command(act.name, arguments)
        raise Refused("canceling statement due to user request", code="57014",
                      detail=f"What {act.name.upper()} has done so far holds.")


def _incomplete(act: Act, outcome: CommandResult) -> Refused:
    said = [f"{worker}: {reason}" for worker, reason in outcome.failed.items()]
    said += [f"{worker}: no answer" for worker in outcome.missing]
    reasons = set(outcome.failed.values())
    detail = "; ".join(said) + (f"; done by {', '.join(outcome.done)}" if outcome.done else "")
    if len(reasons) == 1 and not outcome.missing and not outcome.done:
        return Refused(reasons.pop(), code="08P01", detail=detail)
    return Refused(f"{act.name.upper()} was not carried out by every worker", code="58000", detail=detail)


def _answer(answer: Answer) -> Result:
    make = messages.int4_column if isinstance(answer.value, int) else messages.text_column
    return Result(answer.tag, (make(answer.column),), ((answer.value,),))
