"""What the clients of one worker want to execute, by class and tenant, as its coordinator is told. Pure."""

from __future__ import annotations

from typing import Any

from pooler.admission.classes import FOREVER, Account, Book

Wanted = dict[str, dict[str, list[int]]]  # by class and tenant: weight, queued, in flight


def demand_of(book: Book) -> Wanted:
    """Of every class that has any. Tickets of the pooler itself are no demand: nothing bounds them."""
    found: Wanted = {name: {} for name in book.classes}
    queued: dict[Account, int] = {}
    for klass in book.classes.values():
        for group in klass.groups:
            group.count(queued)
    for account in {*queued, *book.executing()}:
        each = found.setdefault(account.klass.name, {}).setdefault(account.tenant, [account.weight, 0, 0])
        each[1] += queued.get(account, 0)
        each[2] += account.executing
    return {name: tenants for name, tenants in found.items() if tenants}


def message(book: Book, wanted: Wanted, now: float) -> dict[str, Any]:
    """`classes` of the link's `demand`."""
    return {name: {"oldest_seconds": oldest_seconds(book, name, now), "tenants": tenants}
            for name, tenants in wanted.items()}


def oldest_seconds(book: Book, name: str, now: float) -> float:
    """How long the oldest of a class has waited; 0 where nobody does."""
    klass = book.classes.get(name)
    since = min((group.oldest_queued_at() for group in klass.groups), default=now) if klass else now
    return max(0.0, now - min(since, now))


def most(one: Wanted, other: Wanted) -> Wanted:
    """Of each tenant the greater one."""
    found = {name: dict(tenants) for name, tenants in one.items()}
    for name, tenants in other.items():
        into = found.setdefault(name, {})
        for tenant, each in tenants.items():
            if tenant not in into or each[1] + each[2] > into[tenant][1] + into[tenant][2]:
                into[tenant] = each
    return found


def sums(wanted: Wanted) -> dict[tuple[str, str], int]:
    """Tickets by class and tenant, whether they wait or execute."""
    return {(name, tenant): queued + executing
            for name, tenants in wanted.items() for tenant, (_, queued, executing) in tenants.items()}


class Lingering:
    """What is told of demand that comes and goes: more of anything at once, less as it has stayed so."""

    def __init__(self, fall_seconds: float) -> None:
        self._fall_seconds = fall_seconds
        self._told: Wanted = {}
        self._since = 0.0
        self._peak: Wanted | None = None  # since then, of what is less than was told

    def look(self, now: Wanted, at: float) -> tuple[Wanted | None, float]:
        """What is to be told now, if anything; and after how long to look again, without a move."""
        wanted, told, tell = sums(now), sums(self._told), None
        if any(tickets > told.get(key, 0) for key, tickets in wanted.items()):
            self._told = tell = most(now, self._told)
        if wanted == sums(self._told):
            self._peak = None
            return tell, FOREVER
        if self._peak is None:
            self._since, self._peak = at, now
        else:
            self._peak = most(self._peak, now)
        if at - self._since >= self._fall_seconds:
            if sums(self._peak) != sums(self._told):
                self._told = tell = self._peak
            self._since, self._peak = at, None if wanted == sums(self._told) else now
            return tell, FOREVER if self._peak is None else self._fall_seconds
        return tell, self._since + self._fall_seconds - at
