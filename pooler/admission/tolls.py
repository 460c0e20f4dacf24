"""Token buckets as a policy gives them: what requests of a tenant or a class cost, and who waits for them.

A ticket pays once, as it is queued: all that it owes or nothing, and nothing is given back. `reject`
refuses one that the tokens are not there for; `delay` lets it wait, first come, first served, as long as its
budget and the class's queue allow. Pure: `now` is an argument, in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pooler.admission.token_bucket import Taken, TokenBucket

if TYPE_CHECKING:
    from pooler.admission.ticket import Ticket


class Terms(NamedTuple):
    """What a policy says of one bucket. `cost` is of a transaction, or (`per_connection`) of the first one of
    each connection."""

    rate: float
    burst: float
    cost: float
    delays: bool
    per_connection: bool
    start_full: bool

    @classmethod
    def parse(cls, said: Mapping[str, Any]) -> Terms:
        """By the names of the link."""
        return cls(said["rate"], said["burst"], said.get("cost", 1.0), said.get("mode", "delay") == "delay",
                   said.get("per") == "connection", said.get("startFull", True))


class Toll:
    """The bucket of one tenant or class in this worker. `line`: who waits for tokens, and for which pool."""

    __slots__ = ("admitted_cost", "bucket", "kind", "line", "name", "refused_cost", "terms")

    def __init__(self, kind: str, name: str, terms: Terms, now: float) -> None:
        self.kind, self.name = kind, name
        self.terms: Terms | None = terms  # None: the policy has no bucket there any more
        self.bucket = TokenBucket(terms.rate, terms.burst, terms.burst if terms.start_full else 0.0, now)
        self.line: OrderedDict[Ticket, Any] = OrderedDict()
        self.admitted_cost = self.refused_cost = 0.0

    def learn(self, terms: Terms | None, now: float) -> None:
        """What a generation says; a bucket that changes does not fill."""
        self.terms = terms
        if terms is not None:
            self.bucket.resize(terms.rate, terms.burst, now)

    @property
    def cost(self) -> float:
        """Of one."""
        return self.terms.cost if self.terms is not None else 0.0

    def fits_never(self) -> bool:
        """It costs more than the bucket can ever hold."""
        return self.terms is not None and self.terms.cost > self.bucket.burst

    def is_short(self, now: float) -> bool:
        """The tokens for one are not there."""
        return self.terms is not None and self.terms.cost > self.bucket.settle(now)

    def level(self, now: float) -> float:
        """The tokens that are there."""
        return self.bucket.settle(now)

    def seconds_until(self, now: float, ahead: int = 0) -> float:
        """Until the tokens of one are there, behind so many that come before it."""
        if self.terms is None:
            return 0.0
        return self.bucket.seconds_until(self.terms.cost * (ahead + 1), now)

    def pay(self, now: float) -> None:
        """One passes: the tokens must be there."""
        if self.terms is not None and self.bucket.take(self.terms.cost, now) is Taken.ADMITTED:
            self.admitted_cost += self.terms.cost

    def refuse(self) -> None:
        """Count one that did not pass."""
        self.refused_cost += self.cost

    def wait(self, ticket: Ticket, pool: Any) -> None:
        """At the end of the line."""
        self.line[ticket] = pool
        ticket.toll = self

    def forget(self, ticket: Ticket) -> None:
        """It waits here no more."""
        self.line.pop(ticket, None)
        ticket.toll = None


class Tolls:
    """The buckets of one ledger in this worker."""

    def __init__(self) -> None:
        self._tolls: dict[tuple[str, str], Toll] = {}

    def learn(self, policy: Mapping[str, Any], now: float) -> None:
        """A generation: buckets that it has anew are made, others changed; who waits where there is none any
        more passes."""
        said = {(kind, name): Terms.parse(each["bucket"])
                for kind, names in (("tenant", "tenants"), ("class", "executionClasses"))
                for name, each in (policy.get(names) or {}).items() if each.get("bucket")}
        for key in [key for key in self._tolls if key not in said]:
            self._tolls.pop(key).learn(None, now)
        for (kind, name), terms in said.items():
            toll = self._tolls.get((kind, name))
            if toll is None:
                self._tolls[kind, name] = Toll(kind, name, terms, now)
            elif toll.terms != terms:
                toll.learn(terms, now)

    def of(self, tenant: str, class_name: str) -> tuple[Toll, ...]:
        """What a ticket of this tenant in this class has to pay."""
        found = (self._tolls.get(("tenant", tenant)), self._tolls.get(("class", class_name)))
        return tuple(each for each in found if each is not None)

    def of_tenant(self, tenant: str) -> Toll | None:
        """The tenant's own."""
        return self._tolls.get(("tenant", tenant))

    def tenants(self) -> Iterable[Toll]:
        """Those of tenants."""
        return [toll for (kind, _), toll in self._tolls.items() if kind == "tenant"]


def owed(ticket: Ticket) -> tuple[Toll, ...]:
    """What this ticket still has to pay before it is queued."""
    if ticket.is_prepaid:
        return ()
    tolls: tuple[Toll, ...] = ticket.account.tolls
    if ticket.has_entered:
        return tuple(each for each in tolls if each.terms is not None and not each.terms.per_connection)
    return tolls


def lacking(tolls: Iterable[Toll], now: float) -> Toll | None:
    """The first that its tokens are not there for, one that refuses before one that delays."""
    short = [each for each in tolls if each.is_short(now)]
    return next((each for each in short if each.terms is not None and not each.terms.delays),
                short[0] if short else None)


def pay(ticket: Ticket, tolls: Iterable[Toll], now: float) -> None:
    """All of them, once: the tokens must be there."""
    for each in tolls:
        each.pay(now)
    ticket.is_prepaid = False
    ticket.has_entered = True
