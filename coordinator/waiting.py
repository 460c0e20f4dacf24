"""Who waits for a session permit on this host, in what order they may try, and who is asked to make room.

Pure. Waiters of one ledger are served first come, first served; a waiter that lacks a seat of its own pool
does not hold up the other pools. Room is made by asking one worker to shed one session as it falls idle:
only one that would still have at least as many as the asker then has, so that it cannot go back and forth.
An asker that has none gets somebody's only one, or it would wait until that idles for its full time. Where
nobody has more than the asker, one worker after the other is asked for a session that nobody uses there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from coordinator.ledger.record import Kind
from coordinator.ledger.rules import Code

WAITED_FOR = frozenset({Code.FULL, Code.SEATS_FULL, Code.DRAINING, Code.FROZEN, Code.LEDGER_UNAVAILABLE})
NO_ROOM = frozenset({Code.FULL, Code.SEATS_FULL})  # until somebody gives something back
ASK_SECONDS_MAX = 30.0  # whoever was asked to shed and has not by then is not counted on any more


@dataclass(frozen=True, slots=True)
class Pool:
    """The sessions of one pool of one ledger, on slots of one kind. `name`: record.pool_name."""

    db: str
    name: str
    user: str
    kind: Kind = Kind.MAIN


@dataclass(frozen=True, slots=True)
class Holding:
    """One worker's share of one pool."""

    boot_id: str
    pool: Pool


@dataclass(eq=False, slots=True)
class Waiter:
    """One reservation that could not be made yet. `reason`: the last refusal; `generation`: the policy that
    decides it, while a takeover shares the requests out among two; `since`: seconds, our clock."""

    boot_id: str
    pool: Pool
    reason: Code
    generation: int = 0
    request_id: str = ""
    since: float = 0.0

    @property
    def holding(self) -> Holding:
        """What it waits to add to."""
        return Holding(self.boot_id, self.pool)


@dataclass(eq=False, slots=True)
class Ask:
    """One session that `holder` was asked at `at` (seconds, our clock) to shed for `waiter`."""

    holder: Holding
    waiter: Waiter
    at: float


class Asks:
    """What was asked for and not given yet. It outlives the waiter: the next one of its pool gets it."""

    def __init__(self) -> None:
        self._asks: list[Ask] = []

    def add(self, holder: Holding, waiter: Waiter, now: float) -> None:
        self._asks.append(Ask(holder, waiter, now))

    def given(self, holder: Holding) -> Waiter | None:
        """One permit of it came back: that was for whoever asked first, if anybody did."""
        first = next((ask for ask in self._asks if ask.holder == holder), None)
        if first is None:
            return None
        self._asks.remove(first)
        return first.waiter

    def take_back(self, waiter: Waiter) -> None:
        """What was to be asked for this one was not."""
        self._asks = [ask for ask in self._asks if ask.waiter is not waiter]

    def keep(self, reachable: frozenset[str], now: float) -> None:
        """Forgets those that will not be answered: too old, or their worker's link is lost."""
        self._asks = [ask for ask in self._asks
                      if ask.holder.boot_id in reachable and now - ask.at < ASK_SECONDS_MAX]

    def waits(self, waiter: Waiter) -> bool:
        """Whether somebody was asked for this one."""
        return any(ask.waiter is waiter for ask in self._asks)

    def by_holder(self) -> Counter[Holding]:
        return Counter(ask.holder for ask in self._asks)

    def coming(self, holding: Holding) -> int:
        """How many were asked for on behalf of this one."""
        return sum(ask.waiter.holding == holding for ask in self._asks)


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

    def reason_before(self, pool: Pool, generation: int = 0) -> Code | None:
        """What those wait for whom a newcomer of this pool may not overtake; None: there are none. Whom
        another policy generation refuses holds nobody up whom this one may grant."""
        return next((w.reason for w in self._waiters
                     if w.pool.kind is pool.kind and w.generation == generation
                     and (w.reason is not Code.SEATS_FULL or w.pool == pool)), None)


@dataclass(slots=True)
class Round:
    """One pass over a queue after something changed: who may still try in it."""

    stopped: set[int] = field(default_factory=set)  # policy generations
    full_pools: set[Pool] = field(default_factory=set)

    def may_try(self, waiter: Waiter) -> bool:
        return waiter.generation not in self.stopped and waiter.pool not in self.full_pools

    def refused(self, waiter: Waiter, code: Code) -> None:
        """This waiter tried in vain: what that says of those behind it."""
        if code is Code.SEATS_FULL:
            self.full_pools.add(waiter.pool)
        else:
            self.stopped.add(waiter.generation)


def choose_shed(
    waiter: Waiter, held: Mapping[Holding, int], asked: Counter[Holding], reachable: frozenset[str],
    coming: int = 0,
) -> Holding | None:
    """Which worker's pool should give one session up for this waiter, or None.

    `held` counts open sessions, `asked` what was asked for and not yet given, `coming` what of that is for
    the asker's own pool; `reachable` are the boot ids with a live link. The pool's own sessions on other
    workers come first; for want of a slot, then any pool. Only sessions that serve one transaction after
    another can be shed.
    """
    mine = held.get(waiter.holding, 0) + coming
    least = 2 if mine else 1

    def surplus(holding: Holding) -> int:
        return held[holding] - asked[holding] - mine

    candidates = [
        holding for holding in held
        if holding.boot_id in reachable and surplus(holding) >= least and holding.pool.db == waiter.pool.db
        and holding != waiter.holding and holding.pool.kind is waiter.pool.kind is Kind.MAIN
    ]
    own_pool = [holding for holding in candidates if holding.pool == waiter.pool]
    if waiter.reason is Code.SEATS_FULL:
        candidates = own_pool
    return max(own_pool or candidates, key=lambda each: (surplus(each), each.boot_id), default=None)


def choose_idle(
    waiter: Waiter, held: Mapping[Holding, int], reachable: frozenset[str], turn: int
) -> Holding | None:
    """Which worker's pool to ask for a session that is idle there, or None: each in its `turn`, the pool's
    own sessions before those of others. It gives none that it may need itself."""
    others = sorted(
        (holding for holding in held
         if holding.boot_id in reachable and holding.pool.db == waiter.pool.db and holding != waiter.holding
         and holding.pool.kind is waiter.pool.kind is Kind.MAIN
         and (holding.pool == waiter.pool or waiter.reason is not Code.SEATS_FULL)),
        key=lambda each: (each.pool != waiter.pool, each.boot_id, each.pool.name, each.pool.user))
    return others[turn % len(others)] if others else None
