"""The leader's passes over execution permits: who gets more, who is to give back, what the gone still had.

A pass stands on one reading of the shares, the workers, what other hosts want and (where sessions may have
become unknown, or a worker is gone) the sessions, made anew when one of them moved; what this host wants is
in memory. What was read may be old: a write that stands on it only loses. Nothing is written where all is as
it should be, and a load that moves no permit reads nothing. The first pass that finds a class without shares
gives all of them; not before every worker keeps to them: one that does not would neither heed its share nor
give any back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog
import trio

from coordinator.allotment import Moves, moves
from coordinator.events import Event
from coordinator.host_shares import HostShares
from coordinator.ledger.demand import Classes, demands_from, together
from coordinator.ledger.execution import (
    RAISES_MAX,
    RECALLS_MAX,
    Gift,
    Seat,
    Shares,
    raise_txn,
    recall_txn,
    shares_from,
    shares_txn,
    take_back_txn,
    taken_back,
)
from coordinator.ledger.keys import DbKeys, FleetKeys, prefix_end
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.limits import Limits
from coordinator.ledger.record import LedgerState, UnknownSchema
from coordinator.ledger.rules import session_of
from coordinator.ledger.snapshot import LedgerSnapshot, snapshot_from, snapshot_txn
from coordinator.ledger.states import SessionState
from coordinator.ledger.strange import Sieve
from coordinator.policy import Policy
from coordinator.store.api import Change, Compare, Lost, Store, StoreUnavailable, StoreUnknown, Txn, Won
from coordinator.view import View, Views

SETTLE_SECONDS = 0.02  # changes come in flocks: one reading for all of them
TURN_SECONDS = 0.5  # where workers are more than permits
BACKOFF_SECONDS = 0.5
LOST_SECONDS = 0.1  # where something had moved: what that was is news, too
PAUSE_PER_WORK = 4  # however large the ledger is: a fifth of the time at most goes into reading it

_log = structlog.get_logger("coordinator.allotting")


@dataclass(frozen=True, slots=True)
class _Read:
    """One reading, at one revision."""

    shares: Shares
    others: Sequence[Classes]  # what every other host wants
    snapshot: LedgerSnapshot | None


@dataclass(slots=True)
class _Watched:
    """What this leader knows of one ledger. `last`: its last reading, while nothing has moved since."""

    news: trio.Event = field(default_factory=trio.Event)
    last: _Read | None = None
    read_at: float = 0.0
    look: bool = True  # at the sessions: what is unknown, or of the gone, may be other than it was
    unusable: int = 0
    gone: bool = False  # somebody who is gone has a share
    strange: frozenset[str] = frozenset()


class Allotting:
    """`heard` takes what the leader's watch says; `lead` allots while this coordinator leads."""

    def __init__(
        self, store: Store, keys: FleetKeys, ledgers: Mapping[str, Ledger], views: Views, shares: HostShares,
        *, host: str, ttl_seconds: float,
    ) -> None:
        self._store = store
        self._keys = keys
        self._ledgers = ledgers
        self._views = views
        self._shares = shares
        self._host = host
        self._ttl = ttl_seconds
        self._watched: dict[str, _Watched] = {}
        shares.on_demand.append(self._stir)
        views.on_change.append(lambda view: self._reread(view.db))

    async def lead(self, fence: Compare) -> None:
        """For ever."""
        self._watched = {db: _Watched() for db in self._ledgers}
        try:
            async with trio.open_nursery() as nursery:
                for db in self._ledgers:
                    nursery.start_soon(self._allot_for_ever, db, fence)
        finally:
            self._watched = {}

    def _stir(self, db: str) -> None:
        if db in self._watched:
            self._watched[db].news.set()

    def _reread(self, db: str, *, look: bool = False) -> None:
        """What was read is not as it was."""
        if db in self._watched:
            watched = self._watched[db]
            watched.last = None
            watched.look = watched.look or look
            watched.news.set()

    def heard(self, change: Change) -> None:
        """One event of a watch on the fleet."""
        what = change.key.removeprefix(self._keys.root).partition("/")[0]
        for db, watched in self._watched.items():
            keys = self._keys.db(db)
            if what in ("worker", "worker-exit"):
                self._reread(db, look=change.entry is None or what == "worker-exit")
            elif change.key.startswith((keys.shares(), keys.demands())):
                self._reread(db)
            elif change.key.startswith(keys.sessions()) and _matters(change, watched):
                self._reread(db, look=True)

    async def _allot_for_ever(self, db: str, fence: Compare) -> None:
        watched = self._watched[db]
        while True:
            watched.news = trio.Event()
            began = trio.current_time()
            again = await self._allot_safely(db, fence)
            await trio.sleep(  # noqa: TID251 - let the flock land
                max(SETTLE_SECONDS, PAUSE_PER_WORK * (trio.current_time() - began)))
            with trio.move_on_after(again):
                await watched.news.wait()

    async def _allot_safely(self, db: str, fence: Compare) -> float:
        """→ seconds until it is time for another pass, without news."""
        try:
            return await self.allot(db, fence)
        except (StoreUnavailable, StoreUnknown):
            self._watched[db].last, self._watched[db].look = None, True  # what was written is read again
            return BACKOFF_SECONDS
        except (UnknownSchema, ValueError) as fault:
            self._watched[db].last, self._watched[db].look = None, True
            _log.error(Event.SOMETHING_FAILED, database=db, why=f"allotting: {fault}")
            return self._ttl

    async def allot(self, db: str, fence: Compare) -> float:
        """One pass. Raises StoreUnavailable, StoreUnknown, UnknownSchema, ValueError."""
        view, watched = self._views.views[db], self._watched[db]
        policy = _granting(view)
        if policy is None or self._ledgers[db].lost:
            return self._ttl
        read = await self._read(db, watched)
        shares = read.shares
        if shares.unread or shares.generation != policy.generation:
            return self._ttl
        if not shares.raised and not (shares.workers and shares.workers.keys() <= shares.hears):
            return self._ttl
        keys = self._ledgers[db].keys
        watched.gone = any(seat.boot_id not in shares.workers for seat in shares.held)
        if read.snapshot is not None:
            watched.unusable = _unusable(read.snapshot, shares)
            if left := taken_back(read.snapshot, shares.held):
                watched.last = None
                await self._store.txn(take_back_txn(fence, shares.held, left, keys))
                return 0.0
        live = shares.hears & shares.workers.keys()
        demand = together([*read.others, self._shares.needs(db)])
        found = moves(policy, shares, demand, live=live, unusable=watched.unusable,
                      turn=int(trio.current_time() / TURN_SECONDS))
        given = greeted(policy, shares, found, live)
        if found.keep or any(given.values()):
            watched.last = None
        if not await self._write(fence, shares, given, found, keys):
            return LOST_SECONDS
        return TURN_SECONDS if found.crowded else self._ttl

    async def _read(self, db: str, watched: _Watched) -> _Read:
        now, last = trio.current_time(), watched.last
        if last is not None and not watched.look and now - watched.read_at < self._ttl:
            return last
        keys = self._ledgers[db].keys
        own, demands = shares_txn(keys), (keys.demands(), prefix_end(keys.demands()))
        looks, watched.look, watched.read_at = watched.look, False, now
        whole = snapshot_txn(keys, self._keys).reads if looks else ()
        moved = watched.last = _Read(Shares(), (), None)  # another one is there if something moves meanwhile
        outcome = await self._store.txn(Txn(own.compares, reads=(*own.reads, demands, *whole)))
        if isinstance(outcome, Won):  # its compare cannot hold
            raise StoreUnavailable("the store believes the impossible")
        cut, sieve = len(own.reads), Sieve()
        shares = shares_from(outcome.reads[:cut], outcome.revision, keys, sieve)
        others = demands_from(outcome.reads[cut], sieve, but=self._host)
        self._name_strange(db, watched, sieve)
        snapshot = snapshot_from(outcome.reads[cut + 1:], outcome.revision, _no_limits) if looks else None
        if watched.last is moved:
            watched.last = _Read(shares, others, None)
        return _Read(shares, others, snapshot)

    async def _write(
        self, fence: Compare, shares: Shares, given: Mapping[str, Mapping[Seat, Gift]], found: Moves,
        keys: DbKeys,
    ) -> bool:
        """False: something had moved meanwhile. What does not fit, the next pass writes."""
        txns = [raise_txn(fence, shares, dict(list(gifts.items())[:RAISES_MAX]), giver, keys)
                for giver, gifts in given.items() if gifts]
        if found.keep:
            txns.append(recall_txn(fence, shares, dict(list(found.keep.items())[:RECALLS_MAX]), keys))
        outcomes = [await self._store.txn(txn) for txn in txns]
        return not any(isinstance(each, Lost) for each in outcomes)

    def _name_strange(self, db: str, watched: _Watched, sieve: Sieve) -> None:
        """Each key once for as long as it is so."""
        before, watched.strange = watched.strange, frozenset(each.key for each in sieve.strange)
        for each in sieve.strange:
            if each.key not in before:
                _log.error(Event.KEY_STRANGE, database=db, key=each.key, why=each.why)


def greeted(
    policy: Policy, shares: Shares, found: Moves, live: frozenset[str]
) -> dict[str, dict[Seat, Gift]]:
    """What is given, and nothing to who has no share yet and gets none: that one knows that it is seen."""
    given = {giver: dict(gifts) for giver, gifts in found.given.items()}
    getting = {seat for gifts in given.values() for seat in gifts}
    for name in policy.classes:
        for worker in sorted(live):
            seat = Seat(name, worker)
            if seat not in shares.held and seat not in getting:
                given.setdefault(name, {})[seat] = Gift(0)
    return given


def _granting(view: View) -> Policy | None:
    """The policy that grants; None while the ledger is not to be believed."""
    if view.lost or view.head is None or view.head.state is not LedgerState.ACTIVE:
        return None
    return view.policy


def _unusable(snapshot: LedgerSnapshot, shares: Shares) -> int:
    """Slots of sessions that are unknown, but those that a share of somebody gone still stands for."""
    unknown = sum(each.session.state is SessionState.UNKNOWN for each in snapshot.sessions)
    gone = sum(each.share.permits for seat, each in shares.held.items() if seat.boot_id not in shares.workers)
    return max(0, unknown - gone)


def _no_limits(raw: bytes) -> Limits:
    return Limits(0)


def _matters(change: Change, watched: _Watched) -> bool:
    """A session that becomes unknown, or goes where some are, or where somebody gone has a share."""
    if change.entry is None:
        return watched.gone or watched.unusable > 0
    if change.entry.create_revision == change.entry.mod_revision:
        return False
    try:
        unknown = session_of(change.entry).state is SessionState.UNKNOWN
    except ValueError:
        return True
    return unknown or watched.unusable > 0
