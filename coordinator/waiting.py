"""Who waits for a session permit on this host, in what order they may try, and who is asked to make room.

Pure. Waiters of one ledger are served first come, first served; a waiter that lacks a seat of its own pool
does not hold up the other pools. Room is made by asking one worker to shed one session as it falls idle:
only one that would still have at least as many as the asker then has, so that it cannot go back and forth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from coordinator.ledger.rules import Code

WAITED_FOR = frozenset({Code.FULL, Code.SEATS_FULL, Code.DRAINING, Code.LEDGER_UNAVAILABLE})


@dataclass(frozen=True, slots=True)
class Pool:
    """The sessions of one role in one database of one ledger."""

    db: str
    dbname: str
    user: str


@dataclass(frozen=True, slots=True)
class Holding:
    """One worker's share of one pool."""

    boot_id: str
    pool: Pool


@dataclass(eq=False, slots=True)
class Waiter:
    """One reservation that could not be made yet. `reason`: the last refusal."""

    boot_id: str
    pool: Pool
    reason: Code
    shed: Holding | None = None  # who was asked to make room for it


class Queue:
    """The waiters of one ledger, oldest first."""

    def __init__(self) -> None:
        self._waiters: dict[Waiter, None] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(tuple(self._waiters))

    def __contains__(self, waiter: Waiter) -> bool:
        return waiter in self._waiters

    def join(self, waiter: Waiter) -> None:
        self._waiters[waiter] = None

    def leave(self, waiter: Waiter) -> None:
        self._waiters.pop(waiter, None)

    def must_wait_behind(self, pool: Pool) -> bool:
        """Whether a newcomer of this pool would jump a queue."""
        return any(w.reason is not Code.SEATS_FULL or w.pool == pool for w in self._waiters)


@dataclass(slots=True)
class Round:
    """One pass over a queue after something changed: who may still try in it."""

    stopped: bool = False
    full_pools: set[Pool] = field(default_factory=set)

    def may_try(self, waiter: Waiter) -> bool:
        return not self.stopped and waiter.pool not in self.full_pools

    def refused(self, waiter: Waiter, code: Code) -> None:
        """This waiter tried in vain: what that says of those behind it."""
        if code is Code.SEATS_FULL:
            self.full_pools.add(waiter.pool)
        else:
            self.stopped = True


def choose_shed(
    waiter: Waiter, held: Mapping[Holding, int], asked: Counter[Holding], reachable: frozenset[str]
) -> Holding | None:
    """Which worker's pool should give one session up for this waiter, or None.

    `held` counts open sessions, `asked` what was asked for and not yet given; `reachable` are the boot ids
    with a live link. The pool's own sessions on other workers come first; for want of a slot, then any pool.
    """
    mine = held.get(Holding(waiter.boot_id, waiter.pool), 0)

    def surplus(holding: Holding) -> int:
        return held[holding] - asked[holding] - mine

    candidates = [
        holding for holding in held
        if holding.boot_id in reachable and surplus(holding) > 1 and holding.pool.db == waiter.pool.db
        and (holding.boot_id, holding.pool) != (waiter.boot_id, waiter.pool)
    ]
    own_pool = [holding for holding in candidates if holding.pool == waiter.pool]
    if waiter.reason is Code.SEATS_FULL:
        candidates = own_pool
    return max(own_pool or candidates, key=lambda each: (surplus(each), each.boot_id), default=None)
