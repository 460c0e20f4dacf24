"""The leader's work: permits of owners that are gone are marked, unknown ones looked up until proven gone.

By level, not only by event: a pass on election, on every change that may matter, and each lease TTL. Marking
never waits for a look. Any of the moves may be lost to the owner, or to another leader: the compare in each
write lets exactly one win.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog
import trio

from coordinator.events import Event
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.record import UnknownSchema
from coordinator.ledger.rules import session_of
from coordinator.ledger.snapshot import LedgerSnapshot
from coordinator.ledger.states import SessionState
from coordinator.ledger.strange import Strange
from coordinator.looks import Eyes
from coordinator.marking import OwnerReaper
from coordinator.proving import BackendReaper
from coordinator.spec import CoordinatorSpec
from coordinator.store.api import (
    Change,
    Compacted,
    Compare,
    Entry,
    Store,
    StoreUnavailable,
    StoreUnknown,
)
from coordinator.tickets import TicketReaper
from coordinator.view import Views

PACE_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.0)  # of looks after an event; then each lease TTL
CLOSE_TIMEOUT_SECONDS = 3.0
ALERT_LEASE_CYCLES = 1  # seen by the pass of the next cycle: so within two
SETTLE_SECONDS = 0.02  # events come in flocks: one pass for all of them

_log = structlog.get_logger("coordinator.reconcile")


class Reconciler:
    """Both reapers, and when they run: while this coordinator leads."""

    def __init__(
        self, store: Store, keys: FleetKeys, ledgers: dict[str, Ledger], views: Views, eyes: Eyes, *,
        spec: CoordinatorSpec, now_us: Callable[[], int], monotonic: Callable[[], float] = time.monotonic,
        tickets: TicketReaper | None = None,
    ) -> None:
        self._store = store
        self._root = keys.root
        self._ledgers = ledgers
        self._views = views
        self._eyes = eyes
        self._ttl = spec.lease_ttl_seconds
        self.owners = OwnerReaper(
            store, keys, ledgers, eyes, run_dir=Path(spec.run_dir), now_us=now_us,
            alert_after_us=int(ALERT_LEASE_CYCLES * self._ttl * 1_000_000))
        self.backends = BackendReaper(ledgers, eyes, spec=spec, now_us=now_us, monotonic=monotonic)
        self._to_mark, self._to_prove = trio.Event(), trio.Event()
        self._strange: dict[str, frozenset[Strange]] = {}
        self._tickets = tickets
        self.on_event: list[Callable[[Change], None]] = []  # of the fleet, while this coordinator leads
        if tickets is not None:
            self.on_event.append(tickets.heard)
        self.owners.on_unknown.append(lambda *_: self._to_prove.set())
        self.backends.on_released.append(lambda *_: self._to_mark.set())  # a death may be forgotten now

    def stir(self) -> None:
        """Something happened that may need a pass."""
        self._to_mark.set()
        self._to_prove.set()

    async def lead(self, fence: Compare) -> None:
        """Passes for as long as this coordinator leads; its sessions at the servers end with that."""
        try:
            async with trio.open_nursery() as nursery:
                self.backends.nursery = nursery
                nursery.start_soon(self._watch)
                nursery.start_soon(self._mark_for_ever, fence)
                nursery.start_soon(self._prove_for_ever)
        finally:
            self.backends.nursery = None
            with trio.move_on_after(CLOSE_TIMEOUT_SECONDS, shield=True):
                await self._eyes.close()

    async def reconcile(self, db: str, fence: Compare) -> int:
        """One pass of both over one ledger; how many permits stay unproven."""
        await self._mark(db, fence)
        return await self._prove(db)

    async def _mark_for_ever(self, fence: Compare) -> None:
        while True:
            self._to_mark = trio.Event()
            await self._over_all(lambda db: self._mark(db, fence))
            with trio.move_on_after(self._ttl):
                await self._to_mark.wait()
                await trio.sleep(SETTLE_SECONDS)  # noqa: TID251 - let the flock land

    async def _prove_for_ever(self) -> None:
        step = 0
        while True:
            self._to_prove = trio.Event()
            unproven = await self._over_all(self._prove)
            pace = self._ttl
            if unproven and step < len(PACE_SECONDS):
                pace = min(pace, PACE_SECONDS[step])
            step += 1
            with trio.move_on_after(pace):
                await self._to_prove.wait()
                step = 0
                await trio.sleep(SETTLE_SECONDS)  # noqa: TID251 - let the flock land

    async def _over_all(self, work: Callable[[str], Awaitable[int]]) -> int:
        """The work on every ledger, and its sum; what cannot be done now is done by the next pass."""
        total = 0
        for db in self._ledgers:
            try:
                total += await work(db)
            except (StoreUnavailable, StoreUnknown):
                continue  # the views say so
            except (UnknownSchema, ValueError) as fault:
                _log.error(Event.SOMETHING_FAILED, database=db, why=str(fault))
        return total

    async def _mark(self, db: str, fence: Compare) -> int:
        snapshot = await self._believable(db)
        if snapshot is not None:
            await self.owners.mark(db, snapshot, fence, self.backends.clock_us())
            if self._tickets is not None:
                await self._tickets.tend(db, snapshot)
        return 0

    async def _prove(self, db: str) -> int:
        snapshot = await self._believable(db)
        return await self.backends.prove(db, snapshot) if snapshot is not None else 0

    async def _believable(self, db: str) -> LedgerSnapshot | None:
        """The ledger now; None while it is lost: nothing that is missing there proves anything."""
        ledger = self._ledgers[db]
        snapshot = await ledger.snapshot()
        self._name_strange(db, snapshot)
        lost = ledger.lost or self._views.views[db].lost or snapshot.head is None
        return None if lost else snapshot

    def _name_strange(self, db: str, snapshot: LedgerSnapshot) -> None:
        """Each key once for as long as it is so."""
        before, self._strange[db] = self._strange.get(db, frozenset()), frozenset(snapshot.strange)
        for each in snapshot.strange:
            if each not in before:
                _log.error(Event.KEY_STRANGE, database=db, key=each.key, why=each.why)

    # ---- events

    async def _watch(self) -> None:
        while True:
            after = min((view.revision for view in self._views.views.values()), default=0)
            try:
                async with self._store.watch(self._root, after=after) as changes:
                    if self._tickets is not None:
                        self._tickets.watched_anew()
                    async for batch in changes:
                        for change in batch:
                            for listener in self.on_event:
                                listener(change)
                        if any(self._matters(change) for change in batch):
                            self.stir()
            except (StoreUnavailable, StoreUnknown, Compacted):
                pass
            self.stir()
            await trio.sleep(self._ttl / 3)  # noqa: TID251 - a watch that broke

    def _matters(self, change: Change) -> bool:
        """Workers that go or are known dead, permits that become unknown, drains whose command goes."""
        what = change.key.removeprefix(self._root).partition("/")[0]
        if what == "session":
            return change.entry is not None and _is_unknown(change.entry)
        if what in ("worker", "drain"):
            return change.entry is None
        return what == "worker-exit"


def _is_unknown(entry: Entry) -> bool:
    try:
        return session_of(entry).state is SessionState.UNKNOWN
    except (UnknownSchema, ValueError):
        return True  # the pass will say what is wrong with it
