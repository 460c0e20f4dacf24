"""What a worker of this host may ask of permits: the operations of its link, one method each.

Every answer rests on etcd; a worker is told plainly when etcd does not answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import structlog

from coordinator.events import Event
from coordinator.granting import Granting
from coordinator.greeting import Greeter
from coordinator.ledger.ledger import Applied, Granted, Ledger, Voided
from coordinator.ledger.record import Kind, Permit, backend_from
from coordinator.ledger.reservation import Reserve
from coordinator.ledger.rules import (
    Closing,
    Code,
    Command,
    Connecting,
    Open,
    Reassert,
    Refused,
    Release,
    Unknown,
)
from coordinator.ledger.states import Actor, Proof
from coordinator.link import Args, Handler, LinkRefused
from coordinator.link_values import parse_permit, permit_list
from coordinator.registry import Local
from coordinator.view import Views

_log = structlog.get_logger("coordinator.workers")


class Server(Protocol):
    """What the operations work on."""

    @property
    def host(self) -> str:
        """This coordinator's."""

    @property
    def ledgers(self) -> dict[str, Ledger]:
        """By database."""

    @property
    def granting(self) -> Granting:
        """Reservations and who waits for one."""

    @property
    def on_decided(self) -> list[Callable[[str, Reserve, Granted | Refused], None]]:
        """Who hears of every answer to a reservation."""

    @property
    def views(self) -> Views:
        """What is known of each ledger now."""

    @property
    def greeter(self) -> Greeter:
        """Who knows of lost ledgers."""

    def drop(self, local: Local, db: str, permit: Permit) -> None:
        """The worker does not hold it any more."""


class WorkerPermits:
    """The operations of one link. `worker` raises LinkRefused before hello."""

    def __init__(self, server: Server, worker: Callable[[], Local]) -> None:
        self._server = server
        self._worker = worker

    def operations(self) -> tuple[Handler, ...]:
        """By the names of their methods."""
        return (self.reserve, self.void, self.connecting, self.open, self.closing, self.release, self.unknown,
                self.reassert)

    async def reserve(self, args: Args) -> Args:
        local, db = self._worker(), args["db"]
        if self._server.greeter.is_lost(db):
            raise LinkRefused(Code.LEDGER_LOST, "the ledger is lost: nobody grows until it is rebuilt")
        no_growth = self._server.views.views[db].growth
        if no_growth:
            raise LinkRefused(Code.NO_GROWTH, f"nothing more is granted: {no_growth}")
        ask = Reserve(
            request_id=args["request_id"], kind=Kind(args["kind"]), dbname=args["dbname"], user=args["user"],
            pool=args.get("pool") or "", seats=args["seats"], owner=local.boot_id, host=self._server.host)
        outcome = await self._server.granting.reserve(local, db, ask, args["wait_seconds"])
        for listener in self._server.on_decided:
            listener(db, ask, outcome)
        if isinstance(outcome, Granted):
            return {"permit": permit_list(outcome.permit), "epoch": outcome.epoch,
                    "address": outcome.address, "tag": outcome.tag}
        raise LinkRefused(outcome.code, outcome.detail)

    async def void(self, args: Args) -> Args:
        local, db = self._worker(), args["db"]
        outcome = await self._ledger(db).void(args["request_id"], local.boot_id)
        if not isinstance(outcome, Voided):
            raise LinkRefused(outcome.code, outcome.detail)
        if outcome.given_back is not None:
            self._server.drop(local, db, outcome.given_back)
        else:
            await self._give_back_without_receipt(local, db, args["request_id"])
        return {}

    async def _give_back_without_receipt(self, local: Local, db: str, request_id: str) -> None:
        """A worker paused past its lease gives up what it had been granted: the receipt went with the lease,
        and the slot stands. Raises LinkRefused: say it again."""
        granted = local.requests.get(request_id)
        if granted is None or granted[0] != db:
            return
        outcome = await self._ledger(db).apply(
            Release(granted[1], Proof.UNUSED, Actor.OWNER, observer=local.boot_id))
        if isinstance(outcome, Refused) and outcome.code != Code.GONE:
            raise LinkRefused(outcome.code, outcome.detail)
        self._server.drop(local, db, granted[1])

    async def connecting(self, args: Args) -> Args:
        return await self._command(args, Connecting(parse_permit(args["permit"])))

    async def open(self, args: Args) -> Args:
        backend = backend_from(args["backend"])
        if backend is None:
            raise ValueError("an open session without a backend")
        command = Open(parse_permit(args["permit"]), args["pid"], args["backend_start_us"], backend)
        return await self._command(args, command)

    async def closing(self, args: Args) -> Args:
        return await self._command(args, Closing(parse_permit(args["permit"])))

    async def unknown(self, args: Args) -> Args:
        return await self._command(args, Unknown(parse_permit(args["permit"]), bool(args.get("abandoned"))))

    async def reassert(self, args: Args) -> Args:
        return await self._command(args, Reassert(parse_permit(args["permit"]), bool(args.get("closing"))))

    async def release(self, args: Args) -> Args:
        """Idempotent: a second release finds nothing, changes nothing, and says so."""
        local, db, permit = self._worker(), args["db"], parse_permit(args["permit"])
        release = Release(permit, Proof(args["proof"]), Actor.OWNER, observer=local.boot_id)
        outcome = await self._apply(local, db, release)
        if isinstance(outcome, Applied):
            _log.debug(Event.PERMIT_RELEASED, database=db, permit=str(permit), proof=args["proof"],
                       owner=local.boot_id, observer=local.boot_id)
            self._server.drop(local, db, permit)
            return {"released": True}
        if outcome.code is Code.GONE:
            self._server.drop(local, db, permit)
            return {"released": False}
        raise LinkRefused(outcome.code, outcome.detail)

    async def _command(self, args: Args, command: Command) -> Args:
        local, db = self._worker(), args["db"]
        outcome = await self._apply(local, db, command)
        if isinstance(outcome, Refused):
            if outcome.code is Code.GONE:
                self._server.drop(local, db, command.permit)
            raise LinkRefused(outcome.code, outcome.detail)
        return {}

    async def _apply(self, local: Local, db: str, command: Command) -> Applied | Refused:
        self._heard(local, db, command.permit)
        outcome, moved = await self._ledger(db).apply_for(local.boot_id, command)
        if moved is not None:
            local.call(db, moved, command.permit)  # it has not heard of the move yet
        return outcome

    def _heard(self, local: Local, db: str, permit: Permit) -> None:
        """It has the answer to the request that this permit came from: the receipt may go."""
        for request_id, granted in tuple(local.requests.items()):
            if granted == (db, permit):
                del local.requests[request_id]
                local.answered.setdefault(db, set()).add(request_id)

    def _ledger(self, db: str) -> Ledger:
        return self._server.ledgers[db]
