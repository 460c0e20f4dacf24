"""What this coordinator knows of each ledger now: head, epoch, active policy, and whether etcd answers.

A watch is a hint: it only brings the next linearizable read forward, and every third of a TTL one is made
anyway. Whoever needs certainty compares in its transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import structlog
import trio

from coordinator.events import Event
from coordinator.ledger.access import Access
from coordinator.ledger.keys import FleetKeys, number_at, only, prefix_end
from coordinator.ledger.notes import GrowthStop
from coordinator.ledger.record import Alias, Epoch, LedgerHead, LedgerState, UnknownSchema
from coordinator.ledger.snapshot import reading
from coordinator.policy import Policy, PolicyRefused, decode_policy
from coordinator.remembered import Remembered
from coordinator.store.api import Compacted, Entry, Store, StoreUnavailable, StoreUnknown

READ_TIMEOUT_SECONDS = 5.0
BACKOFF_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)

_LOST = "etcd was wiped or restored: another incarnation, no ledger key, or an older revision than was seen"

_log = structlog.get_logger("coordinator.view")


@dataclass(frozen=True, slots=True)
class View:
    """One ledger as it was last read. `lost`: why the ledger is not to be believed, or empty."""

    db: str
    reachable: bool = False
    lost: str = ""
    head: LedgerHead | None = None
    epoch: Epoch | None = None
    epoch_revision: int = 0
    alias: Alias | None = None
    policy: Policy | None = None
    growth: str = ""  # why nothing more is granted to clients; "": it is
    revision: int = field(default=0, compare=False)  # of the read: not a change in itself

    @property
    def complete(self) -> bool:
        """Whether it can grant: founded, with a backend and an active policy."""
        return None not in (self.head, self.epoch, self.policy)

    @property
    def state(self) -> str:
        """In one word, for workers and people."""
        if self.lost:
            return "LOST"
        return str(self.head.state) if self.head else "ABSENT"

    def for_workers(self) -> dict[str, Any]:
        """The `ledger` map of the link."""
        epoch = self.epoch
        return {
            "db": self.db,
            "tag": self.head.tag if self.head else "",
            "state": self.state,
            "reachable": self.reachable,
            "frozen": self.head.frozen if self.head else "",
            "epoch": None if epoch is None else {
                "number": epoch.number,
                "state": str(epoch.state),
                "address": epoch.backend.address,
                "backend": backend_map(epoch),
                "drain_timeout_seconds": epoch.drain_timeout_seconds,
            },
            "policy": self.policy.for_workers() if self.policy else None,
            "growth": self.growth,
        }


def backend_map(epoch: Epoch) -> dict[str, Any]:
    """The backend of an epoch as the link carries it."""
    backend = epoch.backend
    return {
        "address": backend.address, "system_identifier": backend.system_identifier,
        "timeline": backend.timeline, "postmaster_start_us": backend.postmaster_start_us,
        "in_recovery": backend.in_recovery,
    }


class Views:
    """Keeps every ledger's view current while `run` runs; `on_change` is called with what changed."""

    def __init__(
        self, store: Store, keys: FleetKeys, databases: Iterable[str], remembered: Remembered, *,
        ttl_seconds: float,
    ) -> None:
        self._store = store
        self._keys = keys
        self._remembered = remembered
        self._ttl = ttl_seconds
        self._answers: bool | None = None  # None: not known yet
        self._read_once = trio.Event()
        self._hint = trio.Event()
        self._policies: dict[bytes, Policy | None] = {}
        self._granting: dict[str, tuple[int, bytes] | None] = {}  # what is kept for a rebuild
        self.views = {db: View(db) for db in databases}
        self._access = {db: Access(store, keys.db(db), remembered.memory(db)) for db in self.views}
        self.on_change: list[Callable[[View], None]] = []
        self.good_read_at: float | None = None  # when the last read that succeeded was sent

    @property
    def reachable(self) -> bool:
        """Whether the last read succeeded, and lately enough to keep leases alive."""
        return self.good_read_at is not None and trio.current_time() - self.good_read_at < self._ttl

    def hint(self) -> None:
        """Something may have changed: read soon."""
        self._hint.set()

    async def run(self) -> None:
        """Reads for ever: on hints, every third of a TTL, and with back-off while etcd is away."""
        async with trio.open_nursery() as nursery:
            for prefix in ("epoch/", "growth/", "ledger/", "policy/"):
                nursery.start_soon(self._watch, self._keys.root + prefix)
            failures = 0
            while True:
                self._hint = trio.Event()
                failures = 0 if await self.refresh() else failures + 1
                wait = self._ttl / 3
                if failures:
                    wait = min(wait, BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS)) - 1])
                with trio.move_on_after(wait):
                    await self._hint.wait()

    async def refresh(self) -> bool:
        """One linearizable read of every ledger; False (and every view unreachable) when etcd is away."""
        sent = trio.current_time()
        try:
            with trio.fail_after(READ_TIMEOUT_SECONDS):
                for db in self.views:
                    await self._refresh_one(db)
        except (StoreUnavailable, StoreUnknown, trio.TooSlowError) as why:
            self._all_unreachable(str(why) or "no answer in time")
            return False
        if not self._answers:
            _log.info(Event.LEDGER_REACHABLE)
        self._answers = True
        self.good_read_at = sent
        self._read_once.set()
        self._remember()
        return True

    async def _refresh_one(self, db: str) -> None:
        """What cannot be read in one ledger makes that one unreachable, and no other."""
        try:
            self._settle(await self._read(db))
        except (UnknownSchema, ValueError) as why:
            view = self.views[db]
            if view.reachable:
                _log.error(Event.LEDGER_UNREACHABLE, database=db, why=str(why))
                self.views[db] = replace(view, reachable=False)
                self._tell(self.views[db])

    def _remember(self) -> None:
        try:
            self._remembered.save({db: access.memory.seen for db, access in self._access.items()})
            for db, known in self._granting.items():
                if known is not None:
                    self._remembered.keep_policy(db, *known)
        except OSError as fault:  # the next read tries again; what is in memory still guards
            _log.error(Event.SOMETHING_FAILED, what="cannot keep what was seen in run_dir", why=str(fault))

    async def _read(self, db: str) -> View:
        keys, access = self._keys.db(db), self._access[db]
        policies = keys.policies()
        outcome = await access.ask(
            reading(only(keys.ledger()), only(keys.epoch()), only(keys.alias()),
                    (policies, prefix_end(policies)), only(keys.growth())))
        head_entry, epoch_entry, alias_entry, generations, stops = outcome.reads
        head = LedgerHead.decode(head_entry[0].value) if head_entry else None
        alias = Alias.decode(alias_entry[0].value) if alias_entry else None
        if alias is not None and head is not None and head.state is LedgerState.ACTIVE and not access.lost:
            self._granting[db] = next(((alias.granting, entry.value) for entry in generations
                                       if number_at(entry.key) == alias.granting), None)
        return View(
            db, reachable=True, lost=_LOST if access.lost else "", head=head,
            epoch=Epoch.decode(epoch_entry[0].value) if epoch_entry else None,
            epoch_revision=epoch_entry[0].mod_revision if epoch_entry else 0,
            alias=alias, policy=self._active(generations, alias),
            growth=GrowthStop.decode(stops[0].value).why if stops else "", revision=outcome.revision,
        )

    def _active(self, generations: Sequence[Entry], alias: Alias | None) -> Policy | None:
        if alias is None:
            return None
        for entry in generations:
            if number_at(entry.key) == alias.granting:
                return self._policy(entry.value)
        return None

    def _policy(self, raw: bytes) -> Policy | None:
        if raw not in self._policies:
            try:
                self._policies[raw] = decode_policy(raw)
            except PolicyRefused as refused:
                _log.error(Event.POLICY_REFUSED, faults=refused.faults)
                self._policies[raw] = None
        return self._policies[raw]

    def _settle(self, view: View) -> None:
        before = self.views[view.db]
        if not view.lost and view.head == before.head and view.revision < before.revision:
            return  # of two reads at the same time the older one came in last
        self.views[view.db] = view
        if view.lost and not before.lost:
            _log.critical(Event.LEDGER_LOST, database=view.db, why=view.lost)
        if view == before:
            return
        if before.epoch is not None and view.epoch is not None and view.epoch != before.epoch:
            _log.info(Event.EPOCH_CHANGED, database=view.db, epoch=view.epoch.number,
                      state=str(view.epoch.state), backend=view.epoch.backend.address)
        if before.alias is not None and view.alias is not None and view.alias != before.alias:
            _log.info(Event.POLICY_CHANGED, database=view.db, generation=view.alias.granting,
                      shadow=view.alias.shadow, takeover_fraction=view.alias.takeover_fraction,
                      withdrawn=view.alias.withdrawn)
        self._tell(view)

    def _all_unreachable(self, why: str) -> None:
        if self._answers is not False:
            _log.error(Event.LEDGER_UNREACHABLE, why=why)
        self._answers = False
        for db, view in self.views.items():
            if view.reachable:
                self.views[db] = replace(view, reachable=False)
                self._tell(self.views[db])

    def _tell(self, view: View) -> None:
        for listener in self.on_change:
            listener(view)

    async def _watch(self, prefix: str) -> None:
        await self._read_once.wait()
        while True:
            after = min((view.revision for view in self.views.values()), default=0)
            try:
                async with self._store.watch(prefix, after=after) as changes:
                    async for _ in changes:
                        self.hint()
            except (StoreUnavailable, StoreUnknown, Compacted):
                pass
            self.hint()
            await trio.sleep(self._ttl / 3)  # noqa: TID251 - a broken watch: the reads go on meanwhile
