"""What a worker of this host may ask of client-named tickets: the operations of its link, one method each.

A refusal of the rules is an answer, not an error: {refused, …}. A worker is told plainly when etcd does not
answer, and asks again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coordinator.ledger.ledger import Ledger
from coordinator.ledger.tickets import (
    Begin,
    End,
    NamedTicket,
    Outcome,
    Refused,
    Register,
    TicketState,
    Write,
    id_fault,
)
from coordinator.link import Args, Handler, LinkLost, LinkRefused
from coordinator.link_values import parse_permit
from coordinator.registry import Local, Registry
from coordinator.tickets import Tickets


class WorkerTickets:
    """The operations of one link. `worker` raises LinkRefused before hello."""

    def __init__(
        self, tickets: Tickets, registry: Registry, ledgers: dict[str, Ledger], host: str,
        worker: Callable[[], Local],
    ) -> None:
        self._tickets = tickets
        self._registry = registry
        self._ledgers = ledgers
        self._host = host
        self._worker = worker

    def operations(self) -> tuple[Handler, ...]:
        """By the names of their methods."""
        return (self.ticket_register, self.ticket_begin, self.ticket_end, self.ticket_show)

    async def ticket_register(self, args: Args) -> Args:
        """It waits for a session from now on; whoever waited under this name on this host is told."""
        db, ticket_id = self._named(args)
        decision = await self._tickets.apply(db, ticket_id, Register(
            ticket_id, self._worker().boot_id, self._host, args["client"], args["tenant"], args["class"]))
        if isinstance(decision, Refused):
            return _refusal(decision)
        joined = isinstance(decision, Write) and decision.moved_from is not None
        if isinstance(decision, Write) and decision.moved_from is not None:
            self._tell(db, decision.moved_from)
        return {"attempt": decision.ticket.attempt, "joined": joined}

    def _tell(self, db: str, moved: NamedTicket) -> None:
        """On another host it hears of it as it begins."""
        local = self._registry.workers.get(moved.owner)
        if local is not None and local.link is not None:
            try:
                local.link.notify("ticket_moved", db=db, id=moved.id, attempt=moved.attempt)
            except LinkLost:
                return  # it does not read: its link ends by itself

    async def ticket_begin(self, args: Args) -> Args:
        """Nothing was sent to its session yet: what is refused here never is."""
        db, ticket_id = self._named(args)
        decision = await self._tickets.apply(db, ticket_id, Begin(
            args["attempt"], self._worker().boot_id, parse_permit(args["permit"]), args["pid"]))
        return _refusal(decision) if isinstance(decision, Refused) else {}

    async def ticket_end(self, args: Args) -> Args:
        db, ticket_id = self._named(args)
        decision = await self._tickets.apply(db, ticket_id, End(
            args["attempt"], self._worker().boot_id, TicketState(args["state"]), Outcome(args["outcome"])))
        return _refusal(decision) if isinstance(decision, Refused) else {}

    async def ticket_show(self, args: Args) -> Args:
        """The rows of SHOW TICKET: of each ledger that has this name."""
        rows = []
        for db in self._ledgers:
            found = await self._tickets.find(db, args["id"])
            if found is not None:
                rows.append(row_of(db, found))
        return {"rows": rows}

    def _named(self, args: Args) -> tuple[str, str]:
        db, ticket_id = args["db"], args["id"]
        fault = id_fault(ticket_id)
        if fault or db not in self._ledgers:
            raise LinkRefused("bad_request", fault or f"no ledger {db}")
        return db, ticket_id


def _refusal(refused: Refused) -> Args:
    standing = refused.ticket
    if standing is None:
        return {"refused": str(refused.why)}
    return {"refused": str(refused.why), "owner": standing.owner, "host": standing.host,
            "state": str(standing.state), "outcome": str(standing.outcome)}


def row_of(db: str, ticket: NamedTicket) -> dict[str, Any]:
    """A record as it is shown."""
    return {
        "database": db, "ticket": ticket.id, "state": str(ticket.state), "outcome": str(ticket.outcome),
        "attempt": ticket.attempt, "worker": ticket.owner, "host": ticket.host, "client": ticket.client,
        "tenant": ticket.tenant, "class": ticket.ticket_class, "permit": ticket.permit, "pid": ticket.pid,
        "queued_at_us": ticket.queued_at_us, "changed_at_us": ticket.changed_at_us}
