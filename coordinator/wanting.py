"""Who waits in vain on its own host, which worker of any host gives a session up for it, and who stands back.

Pure. A host says what it wants only where its own workers cannot help: nobody of them has two sessions more
than the one that waits. The leader chooses by the rule that holds within a host (waiting.choose_shed), over
the workers of all hosts; so shares go even and never back and forth. What is freed then is for the want that
was chosen for: on every other host those that came later stand back, for a bounded time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coordinator.ledger.notes import Want
from coordinator.ledger.record import Kind, Session
from coordinator.ledger.rules import Code
from coordinator.ledger.snapshot import Held, Wanted
from coordinator.ledger.states import SessionState
from coordinator.store.api import Compare, Put, Txn, unchanged
from coordinator.waiting import (
    ASK_SECONDS_MAX,
    NO_ROOM,
    Asks,
    Holding,
    Pool,
    Waiter,
    choose_idle,
    choose_shed,
)

WANT_AFTER_SECONDS = 0.1  # what falls idle on the own host meanwhile needs nobody else
ANYWAY_AFTER_SECONDS = 1.0  # whoever has more on the own host does not give it
LINGER_SECONDS = 1.0  # a pool asks again after a pause: that is no end of its waiting
STAND_BACK_SECONDS = 2.0  # after something was freed, for one choice
SPARE_AFTER_SECONDS = 1.0  # nobody has more: whether somebody has one that it does not use
CHOOSE_AGAIN_SECONDS = 3.0  # what was given went to another; longer each time

SHED, SPARE = "shed", "spare"  # how a worker is asked: docs/link.md

_NOBODY = float("inf")  # until sessions come or go
_GIVES = (SessionState.RESERVED, SessionState.CONNECTING, SessionState.OPEN)  # others are gone, or not known


def pool_of(session: Session, db: str) -> Pool:
    """Whose session it is."""
    return Pool(db, session.seats_of, session.user, session.kind)


def wanted_pool(want: Want, db: str) -> Pool:
    """The pool that it is to be a session of."""
    return Pool(db, want.pool, want.user, want.kind)


def holder_of(want: Want, db: str) -> Holding:
    """Who is asked to give one up."""
    return Holding(want.holder, Pool(db, want.holder_pool, want.holder_user, want.kind))


# ---- on the host that waits


def waits_in_vain(
    waiter: Waiter, held: Mapping[Holding, int], linked: frozenset[str], now: float
) -> bool:
    """Whether it is time to look beyond its own host. `held`: sessions of this host's workers."""
    waited = now - waiter.since
    if not may_want(waiter, linked) or waited < WANT_AFTER_SECONDS:
        return False
    sibling = choose_shed(waiter, held, Counter(), linked)
    return sibling is None or is_last_one(waiter, sibling, held) or waited >= ANYWAY_AFTER_SECONDS


def may_want(waiter: Waiter, linked: frozenset[str]) -> bool:
    """Whether others could make room for it at all."""
    return waiter.pool.kind is Kind.MAIN and waiter.reason in NO_ROOM and waiter.boot_id in linked


@dataclass(slots=True)
class Short:
    """A pool of which one worker of this host had none, and another gave it its only session: both are
    served at times, and neither waits long, though the host has too few."""

    waiter: Waiter  # the last such
    first_at: float
    last_at: float

    def heard(self, waiter: Waiter, now: float) -> None:
        """It happened again."""
        if now - self.last_at > LINGER_SECONDS:
            self.first_at = now
        self.waiter, self.last_at = waiter, now

    def lasts(self, now: float) -> bool:
        """Whether it goes on."""
        return self.last_at - self.first_at >= WANT_AFTER_SECONDS and now - self.last_at <= LINGER_SECONDS


def is_last_one(waiter: Waiter, sibling: Holding, held: Mapping[Holding, int]) -> bool:
    """Whether a sibling that gives one to this waiter has less than that one then."""
    return held[sibling] - held.get(waiter.holding, 0) < 2


@dataclass(slots=True)
class Own:
    """The want of one pool of this host, as it is or is about to be in etcd.

    `base`: sessions of the pool on this host; with one more it has got what it wanted. `sent`: etcd has it.
    """

    key: str
    want: Want
    lease: int
    base: int
    absent_at: float = float("inf")  # since when no request of its worker waits
    below_at: float = float("inf")  # since when there are less than that: one may be on its way
    sent: bool = False


def neediest(
    waiters: Iterable[Waiter], held: Mapping[Holding, int], linked: frozenset[str], now: float
) -> dict[Pool, Waiter]:
    """Of each pool that waits in vain, the request that is to be told of: of the worker that has least."""
    found: dict[Pool, Waiter] = {}
    for waiter in waiters:
        if waits_in_vain(waiter, held, linked, now):
            best = found.get(waiter.pool)
            if best is None or held.get(waiter.holding, 0) < held.get(best.holding, 0):
                found[waiter.pool] = waiter
    return found


def still_wanted(
    own: Own, pool: Pool, best: Waiter | None, held: Mapping[Holding, int], *, chosen: bool, now: float
) -> bool:
    """Whether it stands on. `chosen`: somebody is asked for it; `best`: whom the pool would tell of now."""
    total = sum(count for holding, count in held.items() if holding.pool == pool)
    if total > own.base or now - own.absent_at > LINGER_SECONDS:
        return False
    own.below_at = min(own.below_at, now) if total < own.base else float("inf")
    if now - own.below_at > LINGER_SECONDS:
        own.base, own.below_at = total, float("inf")
    if chosen or best is None:
        return True
    less = held.get(best.holding, 0) < held.get(Holding(own.want.boot_id, pool), 0)
    return best.reason == own.want.reason and not less


# ---- on every other host


def stands_back(
    pool: Pool, own: Iterable[Wanted], others: Iterable[Wanted], until: Mapping[tuple[str, int], float],
    now: float,
) -> bool:
    """Whether what is free now is for another host: somebody was asked to give it up for a want of there.

    `own`: wants of this host, which goes first where its pool is to get one, too, and asked earlier;
    `until`: by key and revision of a choice, how long one stands back for it.
    """
    if pool.kind is not Kind.MAIN:
        return False
    mine = min((each.create_revision for each in own
                if each.want.op == SHED and wanted_pool(each.want, pool.db) == pool), default=None)
    return any(
        until.get((each.key, each.mod_revision), now) > now
        and (each.want.reason != Code.SEATS_FULL or wanted_pool(each.want, pool.db) == pool)
        and (mine is None or each.create_revision < mine)
        for each in others)


# ---- the leader's


def chosen_txn(fence: Compare, wanted: Wanted, want: Want) -> Txn:
    """Writes a choice into a want, if it is as it was read and this leader still leads."""
    return Txn((fence, unchanged(wanted.key, wanted.mod_revision)),
               (Put(wanted.key, want.encode(), wanted.lease),))


@dataclass(slots=True)
class _Sought:
    """What the leader did for one want."""

    waiter: Waiter
    first_at: float
    not_before: float = 0.0
    spare_at: float = 0.0
    turn: int = 0
    pause: float = CHOOSE_AGAIN_SECONDS


@dataclass(slots=True)
class Choices:
    """Whom the leader asked for whom in its term, of one ledger; times are of one clock, in seconds."""

    db: str
    _asks: Asks = field(default_factory=Asks)
    _sought: dict[str, _Sought] = field(default_factory=dict)
    _holders: dict[str, Holding] = field(default_factory=dict)  # by the key of the session, as last read
    _hosts: dict[str, str] = field(default_factory=dict)  # of those who hold some
    _live: frozenset[str] = frozenset()

    def gone(self, key: str, now: float) -> None:
        """This session is gone: what its worker was asked for first was given by that."""
        holder = self._holders.pop(key, None)
        if holder is None:
            return
        waiting = [each for each in self._sought.values() if self._asks.waits(each.waiter)]
        self._asks.given(holder)
        for each in waiting:
            if not self._asks.waits(each.waiter):
                each.not_before, each.pause = now + each.pause, min(2 * each.pause, ASK_SECONDS_MAX)

    def is_due(self, keys: Iterable[str], now: float, *, moved: bool) -> bool:
        """Whether to choose now. `keys`: the wants that stand; `moved`: sessions came or went since."""
        self._asks.keep(self._live, now)
        return any(key not in self._sought or self._may_choose(self._sought[key], now, moved) for key in keys)

    def _may_choose(self, each: _Sought, now: float, moved: bool) -> bool:
        if self._asks.waits(each.waiter) or now < each.not_before:
            return False
        return moved or now >= max(each.spare_at, each.first_at + SPARE_AFTER_SECONDS)

    def choose(
        self, wants: Sequence[Wanted], sessions: Mapping[str, Held], live: frozenset[str], now: float
    ) -> list[tuple[Wanted, Want]]:
        """For which wants somebody is to be asked now, each with who that is written into it: a worker of
        another host than the one that waits, which sees to its own.

        `sessions` by key; `live`: boot ids with a worker key. Who is chosen counts as asked from here on.
        """
        standing = {each.key for each in wants}
        self._sought = {key: each for key, each in self._sought.items() if key in standing}
        for sought in self._sought.values():
            sought.spare_at = now if sought.spare_at == _NOBODY else sought.spare_at
        self._live = live
        self._asks.keep(live, now)
        self._hosts = {each.session.owner: each.session.host for each in sessions.values()}
        self._holders = {key: Holding(each.session.owner, pool_of(each.session, self.db))
                         for key, each in sessions.items() if each.session.state in _GIVES}
        held = Counter(self._holders.values())
        chosen = []
        for each in sorted(wants, key=lambda wanted: wanted.create_revision):
            found = self._for_one(each, held, now)
            if found is not None:
                op, holder = found
                chosen.append((each, replace(each.want, op=op, holder=holder.boot_id,
                                             holder_pool=holder.pool.name, holder_user=holder.pool.user)))
        return chosen

    def _for_one(self, wanted: Wanted, held: Counter[Holding], now: float) -> tuple[str, Holding] | None:
        want = wanted.want
        if want.reason not in NO_ROOM:  # a newer version's
            never = Waiter(want.boot_id, wanted_pool(want, self.db), Code.FULL)
            self._sought[wanted.key] = _Sought(never, now, not_before=float("inf"))
            return None
        sought = self._sought.get(wanted.key)
        if sought is None or sought.waiter.reason != want.reason:
            waiter = Waiter(want.boot_id, wanted_pool(want, self.db), Code(want.reason))
            sought = self._sought[wanted.key] = _Sought(waiter, now)
        waiter = sought.waiter
        if self._asks.waits(waiter) or now < sought.not_before:
            return None
        elsewhere = frozenset(each for each in self._live if self._hosts.get(each, want.host) != want.host)
        holder = choose_shed(waiter, held, self._asks.by_holder(), elsewhere,
                             self._asks.coming(waiter.holding))
        if holder is not None:
            self._asks.add(holder, waiter, now)
            return SHED, holder
        return self._spare(sought, held, elsewhere, now)

    def _spare(
        self, sought: _Sought, held: Counter[Holding], elsewhere: frozenset[str], now: float
    ) -> tuple[str, Holding] | None:
        """Each worker is asked once, one a second; from then on one at times."""
        if now < max(sought.first_at + SPARE_AFTER_SECONDS, sought.spare_at):
            return None
        idle = choose_idle(sought.waiter, held, elsewhere, sought.turn)
        if idle is None:
            sought.spare_at = _NOBODY
            return None
        sought.turn += 1
        first_round = sought.turn < len({each for each in held if each.boot_id in elsewhere})
        sought.spare_at = now + (SPARE_AFTER_SECONDS if first_round else ASK_SECONDS_MAX)
        return SPARE, idle

    def forget(self, wanted: Wanted) -> None:
        """The choice for this want was not written: it changed, or is gone."""
        sought = self._sought.pop(wanted.key, None)
        if sought is not None:
            self._asks.take_back(sought.waiter)
