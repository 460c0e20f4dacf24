"""The leader's work: permits of owners that are gone become SESSION_UNKNOWN, and unknown ones are looked up
until they are proven gone.

By level, not only by event: a pass on election, on every change that may matter, and each lease TTL. Any of
the moves may be lost to the owner, or to another leader: the compare in each write lets exactly one win.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
import trio

from coordinator import inspect
from coordinator.alerts import Watchlist
from coordinator.epoch import back_to_active
from coordinator.events import Event
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.ledger import Applied, Ledger
from coordinator.ledger.proofs import Awaiting, Look, Proven
from coordinator.ledger.record import EpochState, Session, UnknownSchema
from coordinator.ledger.rules import MarkOwnerGone, Release, Terminating, session_of
from coordinator.ledger.snapshot import LedgerSnapshot
from coordinator.ledger.states import Actor, SessionState
from coordinator.looks import Eyes, LookFailed
from coordinator.reaping import Case, FirstLooks, orphans, removable_exits, unknown_cases
from coordinator.spec import CoordinatorSpec
from coordinator.store.api import (
    Change,
    Compacted,
    Compare,
    Entry,
    Store,
    StoreUnavailable,
    StoreUnknown,
    Txn,
    absent,
    unchanged,
)
from coordinator.view import Views

PACE_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.0)  # after an event; then each lease TTL
CLOSE_TIMEOUT_SECONDS = 3.0
ALERT_LEASE_CYCLES = 1  # seen by the pass of the next cycle: so within two
SETTLE_SECONDS = 0.05  # events come in flocks: one pass for all of them

_log = structlog.get_logger("coordinator.reconcile")


class Reconciler:
    """Reconciles every ledger while it leads. `awaiting` says what each unknown permit waits for."""

    def __init__(
        self, store: Store, keys: FleetKeys, ledgers: dict[str, Ledger], views: Views, eyes: Eyes, *,
        spec: CoordinatorSpec, now_us: Callable[[], int], monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._keys = keys
        self._ledgers = ledgers
        self._views = views
        self._eyes = eyes
        self._spec = spec
        self._now_us = now_us
        self._monotonic = monotonic
        self._event = trio.Event()
        self._first = {db: FirstLooks() for db in ledgers}
        self._void_said: set[str] = set()
        self._watchlists = {db: Watchlist() for db in ledgers}
        self.awaiting: dict[str, dict[str, str]] = {db: {} for db in ledgers}
        self.unknown_since_us: dict[str, int] = {}  # the oldest unknown permit, by database
        self.released: Counter[str] = Counter()  # by proof
        self.on_unknown: list[Callable[[str, Session], None]] = []
        self.on_released: list[Callable[[str, Session], None]] = []

    def stir(self) -> None:
        """Something happened that may need a pass."""
        self._event.set()

    async def lead(self, fence: Compare) -> None:
        """Passes for as long as this coordinator leads; its sessions at the servers end with that."""
        try:
            await self._lead(fence)
        finally:
            with trio.move_on_after(CLOSE_TIMEOUT_SECONDS, shield=True):
                await self._eyes.close()

    async def _lead(self, fence: Compare) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            step = 0
            while True:
                self._event = trio.Event()
                unproven = await self.reconcile_all(fence)
                pace = self._spec.lease_ttl_seconds
                if unproven and step < len(PACE_SECONDS):
                    pace = min(pace, PACE_SECONDS[step])
                step += 1
                with trio.move_on_after(pace):
                    await self._event.wait()
                if self._event.is_set():
                    step = 0
                    await trio.sleep(SETTLE_SECONDS)  # noqa: TID251 - let the flock land

    async def reconcile_all(self, fence: Compare) -> int:
        """One pass over every ledger; how many permits stay unproven."""
        unproven = 0
        for db in self._ledgers:
            try:
                unproven += await self.reconcile(db, fence)
            except (StoreUnavailable, StoreUnknown):
                continue  # the views say so; the next pass tries again
            except (UnknownSchema, ValueError) as fault:
                _log.error(Event.SOMETHING_FAILED, database=db, why=str(fault))
        return unproven

    async def reconcile(self, db: str, fence: Compare) -> int:
        """One pass over one ledger. Raises StoreUnavailable, StoreUnknown."""
        ledger = self._ledgers[db]
        snapshot = await ledger.snapshot()
        if ledger.lost or self._views.views[db].lost or snapshot.head is None:
            return 0  # nothing that is missing there proves anything
        if snapshot.epoch is not None and snapshot.epoch.state is EpochState.DRAINING:
            await self._revive_epoch(db, fence)
        if await self._mark_orphans(db, snapshot):
            snapshot = await ledger.snapshot()
        self._alert(db, snapshot)
        cases = unknown_cases(snapshot)
        self._first[db].keep_only(cases, self._clock_us())
        unproven = await self._look_up(db, snapshot, cases) if cases else 0
        self.unknown_since_us[db] = min((c.session.state_since_us for c in cases), default=0)
        if not unproven:
            self.awaiting[db] = {}
        if snapshot.exits:
            await self._remove_exits(snapshot, fence)
        return unproven

    # ---- owners that are gone

    async def _mark_orphans(self, db: str, snapshot: LedgerSnapshot) -> bool:
        """Whether there were any."""
        found = orphans(snapshot)
        if not found:
            return False
        activities = inspect.read_activities(Path(self._spec.run_dir))
        for session in found:
            doing = activities.get((db, session.permit))
            ticket = str(doing.ticket_id) if doing is not None and doing.ticket_id else ""
            outcome = await self._ledgers[db].apply(MarkOwnerGone(session.permit, ticket))
            if isinstance(outcome, Applied) and outcome.changed and outcome.session is not None:
                _log.warning(Event.PERMIT_UNKNOWN, database=db, permit=str(session.permit),
                             owner=session.owner, was=str(session.state), pid=session.pid, ticket=ticket)
                self._tell(self.on_unknown, db, outcome.session)
        return True

    async def _revive_epoch(self, db: str, fence: Compare) -> None:
        """A drain whose command died: its lease took its key away, so the old epoch grants again."""
        if await back_to_active(self._store, self._keys.db(db), self._now_us(), fence=fence):
            _log.warning(Event.EPOCH_BACK_TO_ACTIVE, database=db, why="the draining command is gone")
            self._views.hint()

    async def _remove_exits(self, snapshot: LedgerSnapshot, fence: Compare) -> None:
        entries = (await self._store.range(self._keys.every_session())).entries
        owners = Counter(session_of(entry).owner for entry in entries)
        for boot_id in removable_exits(snapshot, owners):
            key = self._keys.worker_exit(boot_id)
            compares = (fence, unchanged(key, snapshot.exits[boot_id].mod_revision),
                        absent(self._keys.worker(boot_id)))
            await self._store.txn(Txn(compares, deletes=(key,)))
            inspect.remove_table(Path(self._spec.run_dir), boot_id)
            _log.info(Event.WORKER_FORGOTTEN, worker=boot_id)

    # ---- sessions that may be gone

    async def _look_up(self, db: str, snapshot: LedgerSnapshot, cases: Sequence[Case]) -> int:
        by_node: dict[str, list[Case]] = defaultdict(list)
        for case in cases:
            by_node[case.backend.address if case.backend else ""].append(case)
        unproven = 0
        self.awaiting[db] = {}
        for address, group in by_node.items():
            unproven += await self._look_up_at(db, snapshot, address, group)
        return unproven

    async def _look_up_at(
        self, db: str, snapshot: LedgerSnapshot, address: str, group: Sequence[Case]
    ) -> int:
        if not address:
            for case in group:
                self._await(db, case, "nothing says which server it was for: only an attestation helps")
            return len(group)
        first, grace = self._first[db], self._spec.orphan_connect_grace_seconds
        now = self._clock_us()
        try:
            look = await self._eyes.look(
                address, fresh=any(first.wants_fresh(case, now, grace) for case in group))
        except LookFailed as failed:
            for case in group:
                self._await(db, case, f"a look: {failed}")
            _log.warning(Event.LOOK_FAILED, database=db, why=str(failed), permits=len(group))
            return len(group)
        self._alert_if_void(address, look)
        assert snapshot.head is not None  # reconcile saw to it
        freed = [await self._judge(db, case, look, snapshot.head.tag) for case in group]
        return freed.count(False)

    async def _judge(self, db: str, case: Case, look: Look, tag: str) -> bool:
        """Whether the permit was freed (by whomever)."""
        grace = self._spec.orphan_connect_grace_seconds
        verdict = self._first[db].judge(case, look, ledger_tag=tag, grace_seconds=grace)
        if isinstance(verdict, Proven):
            return await self._release(db, case, verdict)
        self._await(db, case, verdict.reason)
        await self._terminate_if_due(db, case, look, verdict)
        return False

    async def _release(self, db: str, case: Case, proven: Proven) -> bool:
        session = case.session
        outcome = await self._ledgers[db].apply(Release(
            session.permit, proven.proof, Actor.BACKEND_REAPER, observer=self._spec.host,
            seen_revision=case.held.mod_revision, exit_revision=case.exit_revision))
        if not isinstance(outcome, Applied):
            return False  # it moved meanwhile: the next pass decides anew
        self.released[str(proven.proof)] += 1
        _log.warning(
            Event.PERMIT_RELEASED, database=db, permit=str(session.permit), proof=str(proven.proof),
            evidence=proven.evidence, owner=session.owner, observer=self._spec.host, pid=session.pid,
            unknown_seconds=max(0, self._now_us() - session.state_since_us) / 1_000_000)
        self._tell(self.on_released, db, session)
        return True

    async def _terminate_if_due(self, db: str, case: Case, look: Look, verdict: Awaiting) -> None:
        """With `reconcile: terminate`: notes it in the permit first, so that the owner cannot come back."""
        session = case.session
        age_us = self._clock_us() - self._first[db].since_us.get(case.key, self._clock_us())
        due = self._spec.reconcile == "terminate" and (
            age_us >= self._spec.unknown_terminate_after_seconds * 1_000_000)
        seen = any((row.pid, row.backend_start_us) == (session.pid, session.backend_start_us)
                   for row in look.rows)
        if not due or not session.pid or not seen or look.void is not None:
            return
        if session.backend is None or not session.backend.same_server(look.backend):
            return
        outcome = await self._ledgers[db].apply(Terminating(session.permit, case.held.mod_revision))
        if not isinstance(outcome, Applied):
            return
        if outcome.changed:
            _log.warning(Event.PERMIT_TERMINATING, database=db, permit=str(session.permit), pid=session.pid)
        try:
            await self._eyes.terminate(look.backend.address, session.pid, session.backend_start_us)
        except LookFailed as failed:
            self._await(db, case, f"its termination: {failed}")

    def _clock_us(self) -> int:
        return int(self._monotonic() * 1_000_000)

    def _await(self, db: str, case: Case, reason: str) -> None:
        self.awaiting[db][str(case.session.permit)] = reason

    def _alert(self, db: str, snapshot: LedgerSnapshot) -> None:
        limit_us = int(ALERT_LEASE_CYCLES * self._spec.lease_ttl_seconds * 1_000_000)
        for session, age_us in self._watchlists[db].look(snapshot, self._clock_us(), limit_us):
            _log.error(Event.PERMIT_STUCK, database=db, permit=str(session.permit), state=str(session.state),
                       owner=session.owner, host=session.host, pid=session.pid, ticket=session.ticket,
                       age_seconds=age_us / 1_000_000,
                       waits_for=self.awaiting[db].get(str(session.permit), ""))

    def _alert_if_void(self, address: str, look: Look) -> None:
        if look.void is None:
            self._void_said.discard(address)
        elif address not in self._void_said:
            self._void_said.add(address)
            _log.error(Event.LOOK_VOID, node=address, why=look.void)

    def _tell(self, listeners: Sequence[Callable[[str, Session], None]], db: str, session: Session) -> None:
        for listener in listeners:
            listener(db, session)

    # ---- events

    async def _watch(self) -> None:
        while True:
            after = min((view.revision for view in self._views.views.values()), default=0)
            try:
                async with self._store.watch(self._keys.root, after=after) as changes:
                    async for batch in changes:
                        if any(self._matters(change) for change in batch):
                            self.stir()
            except (StoreUnavailable, StoreUnknown, Compacted):
                pass
            self.stir()
            await trio.sleep(self._spec.lease_ttl_seconds / 3)  # noqa: TID251 - a watch that broke

    def _matters(self, change: Change) -> bool:
        """Workers that go or are known dead, permits that become unknown, drains whose command goes."""
        what = change.key.removeprefix(self._keys.root).partition("/")[0]
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
