"""Tickets of several tenants at one worker's pool, with what must hold of each: it ends once, nobody starves.

The tickets and the pool core are the production ones; this only asks, cancels, and watches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from pooler.admission.ticket import ENDS, Ticket, TicketState
from pooler.pool.core import PoolCore
from tests.model.judge import Judge

TENANTS = ("acme", "bolt", "cove", "dune")
WAIT_SECONDS = 900.0


class Tenants:
    """One worker's tickets. `now` is in seconds."""

    def __init__(self, core: PoolCore[Any], judge: Judge, give_back: Callable[[Any], None]) -> None:
        self.now = 0.0
        self._give_back = give_back
        self._core = core
        self._judge = judge
        self._open: dict[Ticket, str] = {}  # every ticket that has not ended, with its tenant
        self._using: dict[Any, Ticket] = {}

    @property
    def busy(self) -> bool:
        return bool(self._open)

    @property
    def waiting(self) -> int:
        return self._core.count_waiting()

    def ask(self, tenant: str) -> Ticket:
        """A ticket of this tenant, queued or granted at once."""
        ticket = Ticket(lambda session: self._granted(ticket, session), self._refused, tenant)
        ticket.start(self.now, self.now + WAIT_SECONDS)
        self._open[ticket] = tenant
        self._judge.figures["tickets"] += 1
        session = self._core.request(ticket)
        if session is not None:
            self._granted(ticket, session)
        return ticket

    def cancel(self, random: Random) -> None:
        """A client leaves; where a session is free this instant, cancel and grant meet."""
        if not self._core.waiting:
            return
        ticket = random.choice(list(self._core.waiting))
        self._judge.figures["fault: ticket cancelled"] += 1
        session = next((each for each in self._using if each in self._core.active), None)
        if session is None or random.random() < 0.5:
            self._withdraw(ticket)
            return
        if random.random() < 0.5:
            self._withdraw(ticket)
            self._give_back(session)
        else:
            self._give_back(session)
            self._withdraw(ticket)
        self._judge.figures["cancel meets grant"] += 1

    def expire(self) -> None:
        for ticket in self._core.expired(self.now):
            self._ended(ticket, "expired")

    def released(self, session: Any) -> None:
        """The transaction on this session is over, if there was one."""
        ticket = self._using.pop(session, None)
        if ticket is not None:
            ticket.release()
            self._ended(ticket, "released")

    def die(self) -> None:
        """The worker died: what ran is unknown, who waited lost its connection."""
        self._judge.figures["tickets unknown"] += len(self._using)
        self._judge.figures["tickets cancelled"] += len(self._open) - len(self._using)
        self._open.clear()
        self._using.clear()

    def _withdraw(self, ticket: Ticket) -> None:
        was_waiting = ticket.waiting
        if self._core.withdraw(ticket, TicketState.CANCELLED):
            self._ended(ticket, "cancelled")
        elif was_waiting or ticket not in self._using.values():
            raise self._judge.broken("a ticket ended neither by its cancel nor by its grant")

    def _granted(self, ticket: Ticket, session: Any) -> None:
        if ticket not in self._open or ticket in self._using.values() or session in self._using:
            raise self._judge.broken("I6: a ticket was granted twice, or a session to two")
        if session.epoch != self._core.epoch or session.stage != "idle":
            raise self._judge.broken(f"I10: a session of epoch {session.epoch}, {session.stage}, was granted")
        overtaken = sum(each.queued_at < ticket.queued_at for each in self._core.waiting)
        if overtaken:
            raise self._judge.broken(f"I12: {self._open[ticket]} overtook {overtaken} who waited longer")
        self._using[session] = ticket
        self._judge.figures["tickets granted"] += 1
        self._judge.figures[f"tickets of {self._open[ticket]} granted"] += 1

    def _refused(self, error: Exception) -> None:
        raise self._judge.broken(f"nobody refuses here: {error}")

    def _ended(self, ticket: Ticket, how: str) -> None:
        del self._open[ticket]
        if ticket.state not in ENDS:
            raise self._judge.broken(f"I6: a ticket that is {ticket.state} was taken for over")
        self._judge.figures[f"tickets {how}"] += 1


def balance(figures: Counter[str], in_use: int) -> int:
    """I6: how many granted tickets neither ended, nor are in use, nor unknown."""
    return figures["tickets granted"] - figures["tickets released"] - figures["tickets unknown"] - in_use
