"""The owner reaper: permits of owners without a worker key become SESSION_UNKNOWN.

With it, what else a leader settles from one snapshot: a drain whose command died, records of deaths that
nothing needs any more, and permits that stand too long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog
import trio

from coordinator import inspect
from coordinator.alerting import tell
from coordinator.alerts import Alert, Told, Watchlist, unwatched
from coordinator.epoch import abandoned_drain, end_abandoned
from coordinator.events import Event
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.ledger import Applied, Ledger
from coordinator.ledger.reading import read_or_none
from coordinator.ledger.record import Backend, Epoch, EpochState, Session
from coordinator.ledger.rules import MarkOwnerGone
from coordinator.ledger.snapshot import LedgerSnapshot
from coordinator.looks import Eyes, LookFailed
from coordinator.reach import hosts_present
from coordinator.reaping import orphans, removable_exits
from coordinator.store.api import Compare, Store, Txn, Won, absent, unchanged

LOOK_SECONDS_MAX = 3.0

_log = structlog.get_logger("coordinator.reconcile")


class OwnerReaper:
    """Marks and tidies for the leader. `on_unknown` hears of every permit it marked; `watched_here` says of
    which this same coordinator tells already, as of its own workers."""

    def __init__(
        self, store: Store, keys: FleetKeys, ledgers: dict[str, Ledger], eyes: Eyes, *, run_dir: Path,
        alert_after_us: int, now_us: Callable[[], int],
    ) -> None:
        self._store = store
        self._keys = keys
        self._ledgers = ledgers
        self._eyes = eyes
        self._run_dir = run_dir
        self._alert_after_us = alert_after_us
        self._now_us = now_us
        self._watchlists = {db: Watchlist() for db in ledgers}
        self._told = {db: Told() for db in ledgers}
        self.undecided: dict[str, str] = {}  # by database: why its abandoned drain cannot be ended
        self.on_unknown: list[Callable[[str, Session], None]] = []
        self.watched_here: Callable[[str, Session], bool] = lambda db, session: False

    @property
    def standing(self) -> tuple[Alert, ...]:
        """Every alert that stands of permits that no other coordinator watches."""
        return tuple(each for told in self._told.values() for each in told.standing.values())

    async def mark(self, db: str, snapshot: LedgerSnapshot, fence: Compare, clock_us: int) -> None:
        """Everything that `snapshot` calls for; `clock_us` is our monotonic clock.

        Raises StoreUnavailable, StoreUnknown.
        """
        if snapshot.epoch is not None and snapshot.epoch.state is EpochState.DRAINING:
            await self._revive_epoch(db, fence)
        else:
            self.undecided.pop(db, None)
        await self._mark_orphans(db, snapshot)
        await self._alert(db, snapshot, clock_us)
        if snapshot.exits:
            await self._remove_exits(snapshot, fence)

    async def _mark_orphans(self, db: str, snapshot: LedgerSnapshot) -> None:
        found = orphans(snapshot)
        if not found:
            return
        activities = inspect.read_activities(self._run_dir)
        for session in found:
            doing = inspect.doing_of(activities, db, session)
            ticket = str(doing.ticket_id) if doing is not None and doing.ticket_id else ""
            tenant = doing.tenant if doing is not None else ""
            outcome = await self._ledgers[db].apply(MarkOwnerGone(session.permit, ticket, tenant))
            if isinstance(outcome, Applied) and outcome.changed and outcome.session is not None:
                _log.warning(Event.PERMIT_UNKNOWN, database=db, permit=str(session.permit),
                             owner=session.owner, was=str(session.state), pid=session.pid, ticket=ticket)
                self._tell(db, outcome.session)

    async def _revive_epoch(self, db: str, fence: Compare) -> None:
        """A drain whose command died: its lease took its key away, so the old epoch grants again. Not if the
        command had promoted its target: then clients would write at two primaries. Where the promotion was
        ordered and the target cannot be seen, nobody grants until it is."""
        keys = self._keys.db(db)
        before = await abandoned_drain(self._store, keys)
        if before is None:
            self.undecided.pop(db, None)
            return
        seen, why = await self._look_at_target(before.epoch)
        after = await end_abandoned(self._store, keys, before, seen, self._now_us(), fence=fence)
        if after is not None:
            self.undecided.pop(db, None)
            _log.warning(Event.EPOCH_BACK_TO_ACTIVE, database=db, why=after.reason, epoch=after.number,
                         backend=after.backend.address)
        elif before.epoch.promotes:
            self._tell_undecided(db, before.epoch, why)

    async def _look_at_target(self, epoch: Epoch) -> tuple[Backend | None, str]:
        """The target of an abandoned drain as it is now, or None and why it was not seen."""
        if epoch.target is None:
            return None, "the drain names no target"
        try:
            with trio.fail_after(LOOK_SECONDS_MAX):
                seen = (await self._eyes.look(epoch.target.address)).backend
        except LookFailed as failed:
            return None, str(failed)
        except trio.TooSlowError:
            return None, f"{epoch.target.address}: no answer within {LOOK_SECONDS_MAX:g} s"
        return seen, f"{epoch.target.address} is not the server that was to be promoted"

    def _tell_undecided(self, db: str, epoch: Epoch, why: str) -> None:
        """Once for each drain: clients wait until somebody does something."""
        if db not in self.undecided:
            _log.error(Event.DRAIN_UNDECIDED, database=db, epoch=epoch.number, why=why,
                       target=epoch.target.address if epoch.target is not None else "")
        self.undecided[db] = f"its drain ended after it ordered a promotion, its target is not seen: {why}"

    async def _remove_exits(self, snapshot: LedgerSnapshot, fence: Compare) -> None:
        entries = (await self._store.range(self._keys.every_session())).entries
        sessions = [read_or_none(Session, entry) for entry in entries]
        if None in sessions:  # whose it is, is not known: what is known of its death is kept
            return
        owners = Counter(session.owner for session in sessions if session is not None)
        for boot_id in removable_exits(snapshot, owners):
            key = self._keys.worker_exit(boot_id)
            compares = (fence, unchanged(key, snapshot.exits[boot_id].mod_revision),
                        absent(self._keys.worker(boot_id)))
            if isinstance(await self._store.txn(Txn(compares, deletes=(key,))), Won):
                inspect.remove_table(self._run_dir, boot_id)
                _log.info(Event.WORKER_FORGOTTEN, worker=boot_id)

    async def _alert(self, db: str, snapshot: LedgerSnapshot, clock_us: int) -> None:
        rest = [held for held in unwatched(snapshot) if not self.watched_here(db, held.session)]
        alerts = self._watchlists[db].look(db, rest, clock_us, self._alert_after_us)
        if alerts:
            doing = inspect.read_activities(self._run_dir)
            there = await hosts_present(self._store, self._keys)
            alerts = [each.told_by(doing.get((db, each.permit))) for each in alerts]
            alerts = [each if each.ticket or each.host in there or not each.pid
                      else replace(each, ticket=inspect.LOST_WITH_HOST) for each in alerts]
        tell(self._told[db], alerts, clock_us)

    def _tell(self, db: str, session: Session) -> None:
        for listener in self.on_unknown:
            listener(db, session)
