"""Whether the servers have room for what the active policies promise: asked before a policy is published, and
by the leader ever after. While one has none, nothing more is granted there; what is open serves on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from urllib.parse import unquote

import structlog
import trio

from coordinator.events import Event
from coordinator.fleet_policies import fleet_demands
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.notes import GrowthStop
from coordinator.ledger.proofs import Look
from coordinator.ledger.reading import read_or_none
from coordinator.looks import Eyes, LookFailed
from coordinator.placement import Demand, crowded, foreign
from coordinator.spec import DatabaseSpec
from coordinator.store.api import (
    Compare,
    Entry,
    Put,
    Store,
    StoreUnavailable,
    StoreUnknown,
    Txn,
    absent,
    unchanged,
)
from coordinator.view import View

AGAIN_SECONDS = 3600.0
AGAIN_AFTER_FAILURE_SECONDS = 30.0

_log = structlog.get_logger("coordinator.room")


async def look_at_hosts(eyes: Eyes, hosts: Iterable[str]) -> tuple[dict[str, Look], dict[str, str]]:
    """What can be seen of them, and why the others could not be looked at."""
    looks: dict[str, Look] = {}
    failed: dict[str, str] = {}
    for host in dict.fromkeys(hosts):
        try:
            looks[host] = await eyes.look(host)
        except LookFailed as why:
            failed[host] = str(why)
    return looks, failed


class Room:
    """The leader's watch: `crowded` says, by ledger, where there is no room. Checked at the start, whenever
    an epoch or a policy that grants changes, and each hour. A server out of reach is judged as last seen.

    `foreign` says which hosts of a ledger are of another cluster: they are no places for it."""

    def __init__(
        self, store: Store, keys: FleetKeys, eyes: Eyes, ledgers: Mapping[str, Sequence[DatabaseSpec]],
        views: Callable[[], Mapping[str, View]], *, now_us: Callable[[], int],
    ) -> None:
        self._store = store
        self._keys = keys
        self._eyes = eyes
        self._ledgers = ledgers
        self._views = views
        self._now_us = now_us
        self._news = trio.Event()
        self._judged: tuple[object, ...] = ()
        self._looks: dict[str, Look] = {}
        self.crowded: dict[str, str] = {}
        self.foreign: dict[str, str] = {}
        self.on_change: list[Callable[[], None]] = []

    def heard(self, view: View) -> None:
        """A ledger changed: look again if it is an epoch or a policy that did."""
        if self._grounds() != self._judged:
            self._news.set()

    async def watch(self, fence: Compare) -> None:
        """For ever, while this coordinator leads (`fence` holds); then nothing is said of it any more."""
        try:
            while True:
                self._news = trio.Event()
                try:
                    saw_all = await self.check(fence)
                except (StoreUnavailable, StoreUnknown):
                    saw_all = False
                with trio.move_on_after(AGAIN_SECONDS if saw_all else AGAIN_AFTER_FAILURE_SECONDS):
                    await self._news.wait()
        finally:
            self._judged, self._looks = (), {}
            self._settle({})
            self.foreign = {}

    async def check(self, fence: Compare) -> bool:
        """One look at every host; False if some could not be looked at.

        Raises StoreUnavailable, StoreUnknown.
        """
        self._judged = self._grounds()
        demands = await fleet_demands(self._store, self._keys, self._ledgers)
        hosts = [host for db, demand in demands.items() for host in demand.hosts
                 if any(spec.monitor for spec in self._ledgers.get(db, ()))]
        looks, failed = await look_at_hosts(self._eyes, hosts)
        self._looks |= looks
        self._settle(crowded(demands.values(), self._looks))
        self._name_foreign(foreign(demands.values(), self._looks))
        await self._tell_all(demands, fence)
        return not failed

    def _grounds(self) -> tuple[object, ...]:
        return tuple((db, view.alias, view.policy, view.epoch and (view.epoch.number, view.epoch.backend))
                     for db, view in self._views().items())

    def _settle(self, found: dict[str, str]) -> None:
        before, self.crowded = self.crowded, found
        for db, why in found.items():
            if before.get(db) != why:
                _log.error(Event.POLICY_OVER_SERVER, database=db, why=why)
        if before != found:
            for listener in self.on_change:
                listener()

    def _name_foreign(self, found: dict[str, str]) -> None:
        """This host's config may be an old copy: said once while it is so."""
        before, self.foreign = self.foreign, found
        for db, why in found.items():
            if before.get(db) != why:
                _log.error(Event.HOST_OF_ANOTHER_CLUSTER, database=db, why=f"hosts of this config or of the "
                           f"policy are not of its cluster and are no places for it: {why}")

    async def _tell_all(self, demands: Mapping[str, Demand], fence: Compare) -> None:
        """Every coordinator hears where nothing more is to be granted, and where it may be again."""
        prefix = self._keys.growth_stops()
        told = {unquote(entry.key.removeprefix(prefix)): entry
                for entry in (await self._store.range(prefix)).entries}
        for db in dict.fromkeys((*self.crowded, *told)):
            txn = self._change(db, demands.get(db), told.get(db), fence)
            if txn is not None:
                await self._store.txn(txn)

    def _change(self, db: str, demand: Demand | None, told: Entry | None, fence: Compare) -> Txn | None:
        key, why = self._keys.db(db).growth(), self.crowded.get(db)
        if why is not None:
            if told is not None and (stop := read_or_none(GrowthStop, told)) is not None and stop.why == why:
                return None
            stands = absent(key) if told is None else unchanged(key, told.mod_revision)
            return Txn((fence, stands), (Put(key, GrowthStop(why, self._now_us()).encode()),))
        if told is None or (demand is not None and not self._was_seen(demand)):
            return None
        return Txn((fence, unchanged(key, told.mod_revision)), deletes=(key,))

    def _was_seen(self, demand: Demand) -> bool:
        """What another leader found is believed until somebody has seen a server of this ledger's again."""
        return any(host in self._looks and demand.is_at(self._looks[host], (host,)) for host in demand.hosts)
