"""The waiters of one class in one pool: round their tenants, by the deficit of each against its weight.

A step of the round costs the same however many tenants wait. A tenant at its inflight limit leaves the round
until it is below it again; a ticket older than the aging limit goes before the round, out of a heap of the
tenants that have such tickets. As long as one tenant waits alone there is one queue and no more. Pure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from pooler.admission.classes import Account, ExecutionClass
from pooler.admission.ticket import Ticket

if TYPE_CHECKING:
    from pooler.admission.line import Line

COST_MIN, COST_MAX = 0.125, 8.0  # of a ticket: what one step of a round is worth is bounded by it
NEVER: Final = float("inf")
_ABSENT: Final = object()


class Flow:
    """The tickets of one tenant in one class of a pool."""

    __slots__ = ("account", "deficit", "has_begun", "in_heap", "in_ring", "is_parked", "tickets", "weight")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.weight = account.weight
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()
        self.deficit = 0.0
        self.has_begun = self.in_heap = self.in_ring = self.is_parked = False


class Group:
    """The tickets of one class in one pool: in `tickets` all of them, in the order in which they came."""

    __slots__ = (
        "__weakref__", "_ages", "_flows", "_heap", "_number", "_parked_size", "_ring", "_solo_parked",
        "_weight", "credit", "klass", "line", "solo", "tickets", "turn",
    )

    def __init__(self, line: Line, klass: ExecutionClass) -> None:
        self.line, self.klass = line, klass
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()
        self.credit = 0  # among the classes of its pool
        self.turn = 0  # among the groups of its class that lack room
        self._number = 0
        self._forget(None)

    def _forget(self, solo: Account | None) -> None:
        """`solo` alone waits, or nobody does."""
        self.solo = solo
        self._solo_parked = False
        self._flows: dict[Account, Flow] = {}
        self._ring: deque[Flow] = deque()
        self._heap: list[tuple[float, int, Flow]] = []
        self._ages: OrderedDict[Ticket, None] = OrderedDict()  # those whose age was not noted yet
        self._parked_size = self._weight = 0

    # ---- what others ask

    @property
    def weight(self) -> int:
        """Of the tenants that may be served together."""
        return max(1, self.solo.weight if self.solo is not None else self._weight)

    def oldest_queued_at(self) -> float:
        """Since when somebody waits here; infinity where nobody does."""
        return next(iter(self.tickets)).queued_at if self.tickets else NEVER

    def overdue_since(self, before: float) -> float:
        """Since when the oldest waits that came before then and may be served; or infinity."""
        if self.solo is not None:
            since = NEVER if self._solo_parked else self.oldest_queued_at()
        else:
            self._note_ages(before)
            since = self._heap[0][0] if self._heap else NEVER
        return since if since <= before else NEVER

    def count_of(self, account: Account) -> int:
        """How many of this account wait here."""
        if self.solo is not None:
            return len(self.tickets) if self.solo is account else 0
        flow = self._flows.get(account)
        return len(flow.tickets) if flow is not None else 0

    def position_of(self, account: Account) -> float:
        """As the how manyth the last of this account is served, if tenants get their shares."""
        size = len(self.tickets)
        if self.solo is not None:
            return size
        return min(size, self.count_of(account) * max(1.0, self._weight / account.weight))

    def holds(self, account: Account) -> bool:
        """Whether somebody of this account waits here."""
        return self.count_of(account) > 0

    def servable(self) -> int:
        """How many could execute now if they had sessions. Who lacks only room in the class is told of it."""
        found = len(self.tickets) - self._parked_size
        if self.solo is not None:
            found = min(len(self.tickets), self.solo.inflight_max - self.solo.executing)
            if found <= 0:
                self._park_solo()
        if found <= 0:
            return 0
        room = self.klass.allotted - self.klass.executing
        if room <= 0:
            self.klass.starve(self)
        return max(0, min(found, room))

    def serve(self, now: float) -> bool:
        """Serve one of them from the pool's idle sessions, if that can be."""
        return self.line.serve(self, now)

    # ---- coming and leaving

    def add(self, ticket: Ticket) -> None:
        """At the end."""
        account = ticket.account
        self.tickets[ticket] = None
        if self.solo is account:
            return
        if len(self.tickets) == 1:
            self._forget(account)
        elif self.solo is None:
            self._enter(ticket)
        else:
            self.solo.parked.pop(self, None)
            self._forget(None)
            for each in self.tickets:
                self._enter(each)

    def remove(self, ticket: Ticket) -> None:
        """It waits here no more, for whatever reason."""
        del self.tickets[ticket]
        if self.solo is None:
            self._leave(ticket)
        if not self.tickets:
            self.emptied()

    def emptied(self) -> None:
        """The last of them has left."""
        if self._solo_parked and self.solo is not None:
            self.solo.parked.pop(self, None)
            self._solo_parked = False
        if self.solo is None:
            self._forget(None)
        self.turn = self.credit = 0
        if self.klass.starved.pop(self, _ABSENT) is not _ABSENT:
            self.klass.moved()

    def count(self, into: dict[Account, int]) -> None:
        """Adds how many of each account wait here."""
        if self.solo is not None:
            if self.tickets:
                into[self.solo] = into.get(self.solo, 0) + len(self.tickets)
            return
        for account, flow in self._flows.items():
            if flow.tickets:
                into[account] = into.get(account, 0) + len(flow.tickets)

    def _enter(self, ticket: Ticket) -> None:
        account = ticket.account
        flow = self._flows.get(account)
        if flow is None:
            flow = self._flows[account] = Flow(account)
        flow.tickets[ticket] = None
        self._ages[ticket] = None
        if flow.is_parked:
            self._parked_size += 1
        elif len(flow.tickets) == 1:
            self._weight += flow.weight
            if account.executing >= account.inflight_max:
                self._park(flow)
            elif not flow.in_ring:
                flow.in_ring = True
                self._ring.append(flow)

    def _leave(self, ticket: Ticket) -> None:
        flow = self._flows[ticket.account]
        del flow.tickets[ticket]
        self._ages.pop(ticket, None)
        self._parked_size -= flow.is_parked
        if flow.tickets:
            return
        flow.deficit, flow.has_begun = 0.0, False
        if flow.is_parked:
            flow.is_parked = False
            flow.account.parked.pop(self, None)
        else:
            self._weight -= flow.weight
        if not flow.in_ring:  # else it is dropped as its turn comes
            del self._flows[flow.account]

    # ---- tenants at their limit

    def _park_solo(self) -> None:
        if not self._solo_parked and self.solo is not None:
            self._solo_parked = True
            self.solo.parked[self] = None

    def _park(self, flow: Flow) -> None:
        flow.is_parked = True
        flow.account.parked[self] = None
        self._parked_size += len(flow.tickets)
        self._weight -= flow.weight

    def unpark(self, account: Account) -> None:
        """It is below its limit again, and no more among `account.parked`."""
        if self.solo is not None:
            self._solo_parked = False
            return
        flow = self._flows[account]
        flow.is_parked = False
        self._parked_size -= len(flow.tickets)
        self._weight += flow.weight
        if not flow.in_ring:
            flow.in_ring = True
            self._ring.append(flow)
        if next(iter(flow.tickets)) not in self._ages:  # its age was noted while it was passed over
            self._note_overdue(flow, NEVER)

    # ---- whose turn it is

    def next(self, now: float) -> Ticket | None:
        """Who is to be served if the class has room; it waits on until it is removed. None: nobody can be."""
        solo = self.solo
        if solo is not None:
            if solo.executing < solo.inflight_max:
                return next(iter(self.tickets))
            self._park_solo()
            return None
        before = now - self.klass.aging_limit_seconds
        self._note_ages(before)
        flow = self._overdue(before) or self._by_deficit()
        return next(iter(flow.tickets)) if flow is not None else None

    def _note_ages(self, before: float) -> None:
        """Whoever came before then: its tenant has a place in the heap."""
        ages = self._ages
        while ages:
            ticket = next(iter(ages))
            if ticket.queued_at > before:
                return
            del ages[ticket]
            self._note_overdue(self._flows[ticket.account], before)

    def _note_overdue(self, flow: Flow, before: float) -> None:
        """Into the heap, by the head of its queue. Whether that is too old is asked when it comes up."""
        if flow.tickets and not flow.in_heap and not flow.is_parked:
            since = next(iter(flow.tickets)).queued_at
            if since <= before:
                self._number += 1
                flow.in_heap = True
                heappush(self._heap, (since, self._number, flow))

    def _overdue(self, before: float) -> Flow | None:
        """The tenant whose oldest ticket is the oldest of those that came before then."""
        heap = self._heap
        while heap and heap[0][0] <= before:
            since, _, flow = heappop(heap)
            flow.in_heap = False
            if not flow.tickets or flow.is_parked:
                continue
            if next(iter(flow.tickets)).queued_at != since:
                self._note_overdue(flow, before)
            elif flow.account.executing >= flow.account.inflight_max:
                self._park(flow)
            else:
                self._number += 1
                flow.in_heap = True
                heappush(heap, (since, self._number, flow))  # until it is served
                flow.deficit = max(flow.deficit - _cost(flow.account), -COST_MAX)
                return flow
        return None

    def _by_deficit(self) -> Flow | None:
        ring = self._ring
        while ring:
            flow = ring[0]
            account = flow.account
            if not flow.tickets or flow.is_parked:
                ring.popleft()
                flow.in_ring = flow.has_begun = False
                if not flow.tickets:
                    del self._flows[account]
            elif account.executing >= account.inflight_max:
                self._park(flow)
            else:
                cost = _cost(account)
                if not flow.has_begun:
                    flow.has_begun = True
                    flow.deficit = min(flow.deficit + flow.weight, flow.weight + COST_MAX)
                if flow.deficit >= cost:
                    flow.deficit -= cost
                    return flow
                flow.has_begun = False
                ring.rotate(-1)
        return None

    def check(self) -> None:
        """Assert what must always hold."""
        assert all(ticket.waiting and ticket.account.klass is self.klass for ticket in self.tickets)
        if self.solo is not None:
            assert all(ticket.account is self.solo for ticket in self.tickets)
            assert self._solo_parked is (self in self.solo.parked)
            return
        assert sum(len(flow.tickets) for flow in self._flows.values()) == len(self.tickets)
        live = [flow for flow in self._flows.values() if flow.tickets]
        assert all(flow.in_ring or flow.is_parked for flow in live)
        assert all(flow.is_parked is (self in flow.account.parked) for flow in live)
        assert self._parked_size == sum(len(flow.tickets) for flow in live if flow.is_parked)
        assert self._weight == sum(flow.weight for flow in live if not flow.is_parked)


def _cost(account: Account) -> float:
    return min(COST_MAX, max(COST_MIN, account.cost))
