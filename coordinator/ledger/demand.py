"""What the workers of one host want to execute: `demand/<db>/<host>`, and when it has to be written. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from coordinator.ledger.record import Record
from coordinator.ledger.strange import Sieve
from coordinator.store.api import Entry

Classes = Mapping[str, Mapping[str, Mapping[str, int]]]  # by class, worker and tenant: tickets


@dataclass(frozen=True, slots=True)
class HostDemand(Record):
    """`demand/<db>/<host>`, on its coordinator's lease: by class, worker and tenant."""

    name: ClassVar[str] = "demand"

    host: str
    classes: Classes = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def check(self) -> None:
        if any(tickets < 0 for workers in self.classes.values() for tenants in workers.values()
               for tickets in tenants.values()):
            raise ValueError("tickets are below 0")


def together(demands: Iterable[Classes]) -> dict[str, dict[str, Mapping[str, int]]]:
    """Of all hosts; a worker is at one of them."""
    found: dict[str, dict[str, Mapping[str, int]]] = {}
    for each in demands:
        for name, workers in each.items():
            found.setdefault(name, {}).update(workers)
    return found


def demands_from(entries: Iterable[Entry], sieve: Sieve, but: str) -> list[Classes]:
    """What every host has written but this one; what cannot be read is no demand, and named in `sieve`."""
    read = sieve.each(entries, lambda entry: HostDemand.decode(entry.value))
    return [each.classes for each in read if each.host != but]


def changes_allotment(written: Classes, now: Classes, allotted: Mapping[tuple[str, str], int]) -> bool:
    """Whether what is wanted now may lead to other shares than what was written. `allotted`: by class and
    worker.

    A tenant that begins or ceases, or wants more than twice or less than a quarter of what was written; a
    worker that wants more than it has and did not, or no longer does. What moves in between moves no permit,
    so that a steady load writes nothing.
    """
    for name in {*written, *now}:
        before, after = written.get(name, {}), now.get(name, {})
        for worker in {*before, *after}:
            was, wants = before.get(worker, {}), after.get(worker, {})
            has = allotted.get((name, worker), 0)
            if (sum(was.values()) > has) != (sum(wants.values()) > has):
                return True
            if any(_differ(was.get(tenant, 0), wants.get(tenant, 0)) for tenant in {*was, *wants}):
                return True
    return False


def _differ(was: int, wants: int) -> bool:
    return wants > 2 * was or 4 * wants < was
