"""One wait, one budget: a checkout waits for the smallest of its limits, and is told which. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class Limit(NamedTuple):
    """One limit of a wait: infinite is none, 0 is no wait at all."""

    name: str
    seconds: float


class Budget(NamedTuple):
    """When a wait ends, and by which limit."""

    deadline: float
    limit: Limit


def smallest(limits: Iterable[Limit]) -> Limit:
    """The limit that ends a wait. Of equal ones the first: name query_wait_timeout first."""
    return min(limits, key=lambda each: each.seconds, default=Limit("", math.inf))


def budget(now: float, limits: Iterable[Limit]) -> Budget:
    """The one deadline of a wait that begins now."""
    limit = smallest(limits)
    return Budget(now + limit.seconds, limit)
