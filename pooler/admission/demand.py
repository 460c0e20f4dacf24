"""What the clients of one worker want to execute, by class and tenant, as its coordinator is told. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pooler.admission.classes import Account, Book

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


def rises(now: Mapping[str, Mapping[str, list[int]]], last: Mapping[str, Mapping[str, list[int]]]) -> bool:
    """Whether somebody wants more than before: that is told at once, what falls only as it stays so."""
    return any(queued + executing > sum(last.get(name, {}).get(tenant, [0, 0, 0])[1:])
               for name, tenants in now.items() for tenant, (_, queued, executing) in tenants.items())
