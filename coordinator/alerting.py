"""Tells of permits of this host's workers that are stuck, leaked or checked out for too long.

Each coordinator watches its own workers, the leader everybody else's (`alerts.unwatched`). Once told, an
alert stands in the metrics until it is over. A worker that lost its link is watched on; one that was buried
is the leader's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import structlog
import trio

from coordinator.alerts import Alert, Told, Watchlist, What, alert_of
from coordinator.events import Event
from coordinator.inspect import read_activities
from coordinator.leaks import Key, Reports
from coordinator.ledger.keys import DbKeys
from coordinator.ledger.record import Permit, Session, UnknownSchema
from coordinator.ledger.rules import session_of
from coordinator.ledger.snapshot import Held
from coordinator.ledger.states import SessionState
from coordinator.link_values import parse_permit
from coordinator.registry import Local, Registry
from coordinator.store.api import TXN_OPERATIONS_MAX, Store, StoreUnavailable, StoreUnknown
from coordinator.view import Views

WORD_CYCLES = 3.0  # a worker tells once a cycle: what it told longer ago may be long over
CYCLES = 1.0  # how long a permit may stand in a state that should pass; looked at twice a cycle
HELD_MAX, LATE_MAX, HOLDER_CHARACTERS_MAX = 8192, 64, 512  # of one worker's word

_EVENTS = {What.UNKNOWN: Event.PERMIT_STUCK, What.CLOSING: Event.PERMIT_STUCK,
           What.LATE_CHECKOUT: Event.CHECKOUT_LATE, What.LEAKED: Event.SESSION_LEAKED}

_log = structlog.get_logger("coordinator.alerts")


class Alerting:
    """The watch over this host's workers. `standing` is what is wrong now."""

    def __init__(
        self, store: Store, views: Views, registry: Registry, *, host: str, run_dir: Path,
        ttl_seconds: float, clock_us: Callable[[], int],
    ) -> None:
        self._store = store
        self._views = views
        self._registry = registry
        self._host = host
        self._run_dir = run_dir
        self._ttl = ttl_seconds
        self._clock_us = clock_us
        self._reports = Reports()
        self._late: dict[str, tuple[int, list[Alert]]] = {}  # by worker: when it told, and what
        self._watchlists: dict[str, Watchlist] = defaultdict(Watchlist)
        self._told = Told()
        self._news = trio.Event()

    @property
    def standing(self) -> tuple[Alert, ...]:
        """Every alert that stands."""
        return tuple(self._told.standing.values())

    def watches(self, db: str, session: Session) -> bool:
        """Whether it looks after this permit: one of this host's workers has it, be its lease over or not."""
        local = self._registry.workers.get(session.owner)
        return local is not None and (db, session.permit) in local.permits

    def reported(self, local: Local, word: Mapping[str, Any]) -> None:
        """A worker told what its pools hold (`held`), and which checkouts last too long (`late`)."""
        try:
            self._take(local, word)
        except (KeyError, TypeError, ValueError) as fault:  # it may be of another version: its lease is kept
            _log.error(Event.SOMETHING_FAILED, worker=local.boot_id, why=f"its word of its pools: {fault!r}")

    def _take(self, local: Local, word: Mapping[str, Any]) -> None:
        now = self._clock_us()
        late = [_late(local.boot_id, self._host, each, now) for each in word["late"][:LATE_MAX]]
        self._late[local.boot_id] = now, late
        is_news = bool(late)
        held = word.get("held")
        if held is not None and len(held) <= HELD_MAX:
            said = {(str(db), parse_permit(permit)) for db, permit in held}
            is_news |= self._reports.heard(local.boot_id, said, local.permits.keys(), now)
        if is_news:
            self._news.set()

    async def run(self) -> None:
        """For ever: twice a lease cycle, and when a worker's word asks for it."""
        while True:
            with trio.move_on_after(self._ttl / 2):
                await self._news.wait()
            self._news = trio.Event()
            try:
                await self.look()
            except (StoreUnavailable, StoreUnknown):
                continue  # the views say so
            except (UnknownSchema, ValueError) as fault:
                _log.error(Event.SOMETHING_FAILED, why=f"alerts: {fault}")

    async def look(self) -> None:
        """One look at every permit of this host's workers; of a ledger that cannot be read, or is lost, what
        was told stands: nothing that is missing there is over. A late checkout is over, too, when its worker
        has not told of it for WORD_CYCLES: nobody knows of it any more.

        Raises StoreUnavailable, UnknownSchema.
        """
        away = {db for db, view in self._views.views.items() if not view.reachable or view.lost}
        workers = self._registry.workers
        asked_at = self._clock_us()
        held = await self._read(key for each in workers.values() for key in tuple(each.permits))
        limit_us = int(CYCLES * self._ttl * 1_000_000)
        alerts = [each for each in self._told.standing.values() if each.db in away]
        for db in self._views.views.keys() - away:
            of_db = [each for (name, _), each in held.items() if name == db]
            alerts += self._watchlists[db].look(db, of_db, asked_at, limit_us)
        alerts += [alert_of(What.LEAKED, key[0], held[key], since)
                   for key, since in self._reports.leaked(workers.keys()).items()
                   if key in held and held[key].session.state is SessionState.OPEN]
        told_after = asked_at - int(WORD_CYCLES * self._ttl * 1_000_000)
        self._late = {boot_id: (told_at, late) for boot_id, (told_at, late) in self._late.items()
                      if boot_id in workers and told_at > told_after}
        alerts += [each for _, late in self._late.values() for each in late if (each.db, each.permit) in held]
        if alerts:
            doing = read_activities(self._run_dir)
            alerts = [each.told_by(doing.get((each.db, each.permit))) for each in alerts]
        tell(self._told, alerts, self._clock_us())

    async def _read(self, keys: Iterable[Key]) -> dict[Key, Held]:
        """Those of them that stand in the ledger as they are known; none of a ledger that is lost."""
        at: dict[str, list[Key]] = {}
        for db, permit in keys:
            view = self._views.views.get(db)
            if view is not None and view.reachable and not view.lost:
                at.setdefault(self._slot(db, permit), []).append((db, permit))
        found: dict[Key, Held] = {}
        names = list(at)
        for first in range(0, len(names), TXN_OPERATIONS_MAX):
            snapshot = await self._store.read(*names[first:first + TXN_OPERATIONS_MAX])
            for entry in snapshot.entries:
                try:
                    session = session_of(entry)
                except ValueError:
                    continue  # the leader tells of it
                for key in at[entry.key]:
                    if session.permit == key[1]:
                        found[key] = Held(session, entry.mod_revision)
        return found

    def _slot(self, db: str, permit: Permit) -> str:
        keys: DbKeys = self._registry.keys.db(db)
        return keys.session(permit.kind, permit.slot)


def tell(told: Told, alerts: Iterable[Alert], now_us: int) -> None:
    """Logs those of `alerts`, which are all that stand now, that are new, and what is over."""
    before = dict(told.standing)
    for each in told.news(alerts):
        _log.error(
            _EVENTS[each.what], database=each.db, permit=str(each.permit), state=each.state,
            owner=each.owner, host=each.host, pid=each.pid, tenant=each.tenant, ticket=each.ticket,
            age_seconds=each.age_seconds(now_us),
            **({"limit_seconds": each.limit_seconds, "holder": each.holder} if each.limit_seconds else {}))
    for key in before.keys() - told.standing.keys():
        _log.info(Event.ALERT_OVER, alert=str(key[0]), database=key[1], permit=str(key[2]))


def _late(owner: str, host: str, word: Mapping[str, Any], now_us: int) -> Alert:
    """Raises KeyError, TypeError, ValueError for what is none."""
    return Alert(
        What.LATE_CHECKOUT, str(word["db"]), parse_permit(word["permit"]), str(SessionState.OPEN), owner,
        host, int(word["pid"]), now_us - int(word["age_us"]), tenant=str(word["tenant"]),
        limit_seconds=float(word["limit_seconds"]),
        holder=str(word.get("holder", ""))[:HOLDER_CHARACTERS_MAX])
