"""A simulated coordinator: the production Ledger and both production reapers, on a store that breaks.

While one of its requests is on its way, somebody else may do something; it may die meanwhile, and what it had
in memory with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

from coordinator.ledger.access import Memory, Seen
from coordinator.ledger.answers import Applied
from coordinator.ledger.homes import Home
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.limits import limits_of_policy
from coordinator.ledger.record import Permit
from coordinator.ledger.rules import (
    Command,
    MarkOwnerGone,
    Refused,
    Release,
    Terminating,
    Write,
    session_of,
)
from coordinator.ledger.states import Actor, SessionState
from coordinator.reconcile import Reconciler
from coordinator.spec import CoordinatorSpec, EtcdSpec
from coordinator.store.api import Compare, Entry, Lost, Snapshot, StoreUnknown, Txn, Won, prefix_end
from coordinator.store.faulty import FaultyStore
from coordinator.store.memory import MemoryStore
from coordinator.view import View, Views
from tests.ledger.ground import FLEET, KEYS, NOW_US
from tests.model.judge import JudgedKeyspace
from tests.model.server_world import Eyes

DB = KEYS.database
Row = tuple[SessionState, SessionState, Actor]


class CoordinatorDied(Exception):
    """Whoever waited for an answer of this coordinator gets none."""


class DirectStore(MemoryStore):
    """The memory store without a pause of its own; `tamper` is what a mutant does to a transaction."""

    def __init__(self, keyspace: JudgedKeyspace, tamper: Callable[[Txn], Txn] | None) -> None:
        super().__init__(keyspace)
        self._tamper = tamper

    async def read(self, *keys: str) -> Snapshot:
        entries = (self.keyspace.entries.get(key) for key in keys)
        return Snapshot(tuple(entry for entry in entries if entry), self.keyspace.revision)

    async def range(self, prefix: str) -> Snapshot:
        return Snapshot(self.keyspace.read(prefix, prefix_end(prefix)), self.keyspace.revision)

    async def txn(self, txn: Txn) -> Won | Lost:
        return self.keyspace.txn(self._tamper(txn) if self._tamper else txn)


class HostStore(FaultyStore):
    """The store as one coordinator reaches it, with faults counted by kind."""

    def __init__(
        self, store: DirectStore, random: Random, meanwhile: Callable[[float], Awaitable[None]],
        figures: Counter[str],
    ) -> None:
        super().__init__(store, random)
        self.died = False
        self._chance = random
        self._meanwhile = meanwhile
        self._figures = figures

    async def txn(self, txn: Txn) -> Won | Lost:
        answer = await super().txn(txn)
        if self.died:
            raise CoordinatorDied
        return answer

    async def _before(self) -> None:
        if not self.died:
            await self._meanwhile(0.1)
        if self.died and self._chance.random() < 0.5:  # else it was sent before that
            raise CoordinatorDied
        injected = self.injected
        try:
            await super()._before()
        finally:
            self._figures["fault: store unavailable"] += self.injected - injected

    def _unknown(self, how: str) -> StoreUnknown:
        self._figures[f"fault: outcome unknown, {how}"] += 1
        return super()._unknown(how)


class CountingLedger(Ledger):
    """Counts which row of the table of states each write took, by whom."""

    def count_rows(self, rows: Counter[Row]) -> None:
        self._rows = rows
        self._source = SessionState.RELEASED

    async def apply(self, command: Command) -> Applied | Refused:
        answer = await super().apply(command)
        if isinstance(answer, Applied) and answer.changed:
            target = answer.session.state if answer.session else SessionState.RELEASED
            self._rows[self._source, target, _actor(command)] += 1
        return answer

    def _applied(self, permit: Permit, entry: Entry, write: Write, revision: int) -> Applied:
        self._source = session_of(entry).state  # read again by apply before anything else can happen
        return super()._applied(permit, entry, write, revision)


def _actor(command: Command) -> Actor:
    if isinstance(command, Release):
        return command.actor
    if isinstance(command, MarkOwnerGone):
        return Actor.OWNER_REAPER
    return Actor.BACKEND_REAPER if isinstance(command, Terminating) else Actor.OWNER


class Coordinator:
    """One life of one host's coordinator."""

    def __init__(
        self, host: int, store: HostStore, eyes: Eyes, run_dir: Path, rows: Counter[Row], *,
        now_us: Callable[[], int], terminates: bool, seen: Seen | None = None,
    ) -> None:
        self.host = host
        self.store = store
        self.fence: Compare | None = None  # it was elected, and may be still
        self.ledger = CountingLedger(store, KEYS, FLEET, lambda: NOW_US, home=Home(host, 2),
                                     memory=Memory(seen), limits_of=cache(limits_of_policy))
        self.ledger.count_rows(rows)
        spec = CoordinatorSpec(
            fleet=FLEET.fleet, prefix=FLEET.prefix, host=f"host{host}", machine_id="m", run_dir=str(run_dir),
            socket="s", lease_ttl_seconds=5.0, etcd=EtcdSpec(), databases=(),
            reconcile="terminate" if terminates else "observe",
            unknown_terminate_after_seconds=0.0)
        views = cast(Views, SimpleNamespace(views={DB: View(DB)}))
        self.reconciler = Reconciler(
            store, FLEET, {DB: self.ledger}, views, eyes, spec=spec, now_us=lambda: NOW_US,
            monotonic=lambda: now_us() / 1_000_000)

    def die(self) -> None:
        self.store.died = True

    async def lead(self, fence: Compare) -> None:
        """One pass of both reapers, as the leader makes it."""
        await self.reconciler.reconcile(DB, fence)
