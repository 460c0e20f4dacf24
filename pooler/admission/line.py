"""Who waits for a session of one pool, and whose turn it is: weighted-deficit-v2.

Among the classes that have room it goes round in the proportion of their permits; inside a class round its
tenants, by the deficit of each against its weight; inside a tenant first come, first served. A tenant at its
inflight limit is passed over and holds nobody up, and a ticket older than the class's aging limit goes first.
Pure: `now` is an argument, and no order depends on anything but the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import merge
from operator import attrgetter

from pooler.admission.classes import Account, ExecutionClass
from pooler.admission.group import NEVER, Group
from pooler.admission.ticket import Ticket

_queued_at = attrgetter("queued_at")


class Line:
    """All waiters of one pool. `serve(group, now)` is the pool's: one of the group from an idle session."""

    __slots__ = ("_groups", "_only", "serve", "size")

    def __init__(self, serve: Callable[[Group, float], bool]) -> None:
        self.serve = serve
        self.size = 0
        self._groups: dict[ExecutionClass, Group] = {}
        self._only: Group | None = None  # where there is one

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Ticket]:
        """In the order in which they came."""
        return merge(*(group.tickets for group in self._groups.values()), key=_queued_at)

    def __contains__(self, ticket: Ticket) -> bool:
        group = self._groups.get(ticket.account.klass)
        return group is not None and ticket in group.tickets

    def oldest_queued_at(self) -> float:
        """Since when somebody waits; infinity where nobody does."""
        return min((group.oldest_queued_at() for group in self._groups.values()), default=NEVER)

    def servable(self) -> int:
        """How many could execute now if they had sessions."""
        return sum(group.servable() for group in self._groups.values() if group.tickets)

    def lets_pass(self, account: Account) -> bool:
        """Whether nobody of this account waits, whom one that comes now would overtake."""
        group = self._groups.get(account.klass)
        return group is None or not group.tickets or not group.holds(account)

    def add(self, ticket: Ticket) -> None:
        """Somebody waits."""
        account = ticket.account
        klass = account.klass
        group = self._only
        if group is None or group.klass is not klass:
            group = self._groups.get(klass) or self._group(klass)
        self.size += 1
        klass.waiting += 1
        if group.solo is account:
            group.tickets[ticket] = None
        else:
            group.add(ticket)
        if account.executing >= account.inflight_max or (
                klass.executing >= klass.allotted and group not in klass.starved):
            group.servable()

    def _group(self, klass: ExecutionClass) -> Group:
        group = Group(self, klass)
        # those in which nobody waits may be of classes that a policy has no more: there would be two for ever
        self._groups = {of: each for of, each in self._groups.items() if each.tickets} | {klass: group}
        self._only = group if len(self._groups) == 1 else None
        klass.groups.add(group)
        return group

    def remove(self, ticket: Ticket) -> None:
        """It waits no more; nothing if it does not."""
        account = ticket.account
        group = self._groups.get(account.klass)
        if group is not None and ticket in group.tickets:
            self._take(group, ticket)

    def take_all(self) -> list[Ticket]:
        """Everybody leaves, to be added again: what they wait by is about to change."""
        tickets = list(self)
        for ticket in tickets:
            self.remove(ticket)
        self._groups.clear()
        self._only = None
        return tickets

    def next(self, now: float) -> Ticket | None:
        """Who is served by a session that is free now; it has left the line. None: nobody can be."""
        group = self._only
        if group is None:
            return self._next_of_many(now)
        solo, klass, tickets = group.solo, group.klass, group.tickets
        if (solo is not None and tickets and solo.executing < solo.inflight_max
                and (klass.executing < klass.allotted or klass.has_room_for(group))):
            # as most pools are: take(), without its steps
            ticket, _ = tickets.popitem(last=False)
            self.size -= 1
            klass.waiting -= 1
            if not tickets:
                group.emptied()
            return ticket
        return self.take(group, now)

    def _next_of_many(self, now: float) -> Ticket | None:
        groups = self._groups
        ready = [group for group in groups.values() if group.tickets]
        for group in sorted(ready, key=_by_credit):
            ticket = self.take(group, now)
            if ticket is not None:
                _pay(group, ready)
                return ticket
        return None

    def take(self, group: Group, now: float) -> Ticket | None:
        """The next of one class; it has left the line."""
        if not group.tickets or not group.klass.has_room_for(group):
            return None
        ticket = group.next(now)
        if ticket is not None:
            self._take(group, ticket)
        return ticket

    def _take(self, group: Group, ticket: Ticket) -> None:
        self.size -= 1
        group.klass.waiting -= 1
        group.remove(ticket)

    def check(self) -> None:
        """Assert what must always hold."""
        assert self.size == sum(len(group.tickets) for group in self._groups.values())
        for klass, group in self._groups.items():
            assert group.klass is klass
            group.check()


def _by_credit(group: Group) -> int:
    return -group.credit - group.klass.permits


def _pay(served: Group, ready: list[Group]) -> None:
    """Each that stood ready earns its permits, and the one that was served pays for all."""
    together = 0
    for group in ready:
        if group.klass.executing < group.klass.allotted:
            group.credit += group.klass.permits
            together += group.klass.permits
    served.credit = served.credit - together if served.tickets else 0
