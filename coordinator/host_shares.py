"""Execution permits on this host: its workers' shares as they stand in etcd, told to them; what its workers
want, for the leader.

Every coordinator watches `exec/<db>/`. A share that moves is told to its worker with the revision at which it
stood, so that of two words the later holds. A worker that has none, in a class of which shares are given, has
nothing to execute on until the leader gives it some; where none does for a while, it serves one ticket at a
time: better one too many than a class that nobody of it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import structlog
import trio

from coordinator.events import Event
from coordinator.ledger.demand import HostDemand, changes_allotment
from coordinator.ledger.execution import Seat, Share, class_of, lower_txn, registering, seat_of
from coordinator.ledger.keys import DbKeys
from coordinator.ledger.ledger import Ledger
from coordinator.link import LinkLost
from coordinator.registry import Local, Registry
from coordinator.store.api import (
    Change,
    Compacted,
    Entry,
    Put,
    Snapshot,
    Store,
    StoreUnavailable,
    StoreUnknown,
    Txn,
    Won,
)

ROUNDS_MAX = 8
CLASSES_MAX = 100  # of one ledger, in one transaction
FLOOR_SECONDS = 2.0
STEP_SECONDS = 0.05  # between two writes of demand
FALL_SECONDS = 1.0  # what falls is written when it has stayed so
BACKOFF_SECONDS = 1.0
KEPT_BY_ALL = (1 << 31) - 1  # more than anybody has: of a share that its worker has not heard of

Told = list[int]  # permits, how many of them are kept, revision

_log = structlog.get_logger("coordinator.shares")


@dataclass(slots=True)
class _Board:
    """The shares of one ledger, as the watch told; and what was written of this host's demand."""

    held: dict[Seat, tuple[Share, int]] = field(default_factory=dict)
    written: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    lease_id: int = 0  # on which that stands
    news: trio.Event = field(default_factory=trio.Event)


class HostShares:
    """`run` must be running. `leading`: the leader needs nothing of its own host from etcd."""

    def __init__(
        self, store: Store, ledgers: Mapping[str, Ledger], registry: Registry, *, host: str
    ) -> None:
        self._store = store
        self._ledgers = ledgers
        self._registry = registry
        self._host = host
        self._boards = {db: _Board() for db in ledgers}
        self._nursery: trio.Nursery | None = None
        self.leading: Callable[[], bool] = lambda: True
        self.lease_id: Callable[[], int] = int
        self.on_demand: list[Callable[[str], None]] = []

    async def run(self) -> None:
        """For ever."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for db in self._boards:
                nursery.start_soon(self._watch, db)
                nursery.start_soon(self._publish, db)

    # ---- what is wanted

    def wants(self, local: Local, db: str, demand: dict[str, dict[str, int]]) -> None:
        """What a worker wants now, by class and tenant."""
        local.demand[db] = demand
        self.stir(db)

    def needs(self, db: str) -> dict[str, dict[str, dict[str, int]]]:
        """By class, worker and tenant, of this host."""
        found: dict[str, dict[str, dict[str, int]]] = {}
        for boot_id, local in self._registry.workers.items():
            for name, tenants in local.demand.get(db, {}).items():
                found.setdefault(name, {})[boot_id] = tenants
        return found

    def stir(self, *databases: str) -> None:
        """What is wanted, or who leads, may have changed (of all ledgers, where none is named)."""
        for db in databases or tuple(self._boards):
            self._boards[db].news.set()
            for listener in self.on_demand:
                listener(db)

    async def _publish(self, db: str) -> None:
        board = self._boards[db]
        while True:
            await board.news.wait()
            board.news = trio.Event()
            if not self.leading():
                try:
                    await self._write(db, board)
                except (StoreUnavailable, StoreUnknown):
                    await trio.sleep(BACKOFF_SECONDS)  # noqa: TID251 - back-off towards the store
                    board.news.set()
            await trio.sleep(STEP_SECONDS)  # noqa: TID251 - the pace of what is written

    async def _write(self, db: str, board: _Board) -> None:
        """Raises StoreUnavailable, StoreUnknown."""
        if board.lease_id != self.lease_id():
            board.written, board.lease_id = {}, self.lease_id()
        now = self.needs(db)
        if not self._is_news(board, now):
            return
        if not _rises(board.written, now):
            with trio.move_on_after(FALL_SECONDS):
                await board.news.wait()
            now = self.needs(db)
            if not self._is_news(board, now):
                return
        if not board.lease_id:
            raise StoreUnavailable("there is no lease yet")
        value = HostDemand(self._host, now).encode()
        await self._store.txn(Txn(puts=(Put(self._keys(db).demand(self._host), value, board.lease_id),)))
        board.written = now

    @staticmethod
    def _is_news(board: _Board, now: dict[str, dict[str, dict[str, int]]]) -> bool:
        allotted = {(seat.execution_class, seat.boot_id): share.permits
                    for seat, (share, _) in board.held.items()}
        return changes_allotment(board.written, now, allotted)

    # ---- a worker says hello

    async def greet(
        self, local: Local, believed: Mapping[str, Mapping[str, int]]
    ) -> dict[str, dict[str, Told]]:
        """Writes each share of it again, and says by ledger and class how it stands then. `believed`: what
        it counts by, which it will not exceed. Where a class is not named nobody gives shares of it.

        Raises StoreUnavailable, StoreUnknown.
        """
        return {db: await self._renew(db, local, believed.get(db, {})) for db in self._ledgers}

    async def _renew(self, db: str, local: Local, believed: Mapping[str, int]) -> dict[str, Told]:
        keys = self._keys(db)
        for _ in range(ROUNDS_MAX):
            listed = await self._store.range(keys.shares())
            mine = [entry for seat, entry in _seats(listed, keys) if seat and seat.boot_id == local.boot_id]
            told = {class_of(entry.key, keys): [0, 0, listed.revision - 1]
                    for seat, entry in _seats(listed, keys) if seat is None}
            names = [class_of(entry.key, keys) for entry in mine[:CLASSES_MAX]]
            self._await_floor(db, local, told.keys() - set(names), listed.revision)
            if not mine:
                return told
            compares, puts = registering(
                mine[:CLASSES_MAX], {(db, name): believed.get(name, KEPT_BY_ALL) for name in names}, keys)
            done = await self._store.txn(Txn(tuple(compares), tuple(puts)))
            if isinstance(done, Won):
                shares = zip(names, puts, strict=True)
                return told | {name: _told(Share.decode(put.value), done.revision) for name, put in shares}
        raise StoreUnavailable("others were faster")

    def repeat(self, local: Local) -> None:
        """A share that moved while hello was being answered may have been overtaken by the answer."""
        for db, board in self._boards.items():
            for seat, (share, revision) in board.held.items():
                if seat.boot_id == local.boot_id:
                    self._tell(db, seat, _told(share, revision))

    def _await_floor(self, db: str, local: Local, names: set[str], revision: int) -> None:
        for name in names if self._nursery is not None else ():
            assert self._nursery is not None
            self._nursery.start_soon(self._floor, db, local, Seat(name, local.boot_id), revision)

    async def _floor(self, db: str, local: Local, seat: Seat, revision: int) -> None:
        """No leader has given it anything, not even nothing: it serves one at a time."""
        await trio.sleep(FLOOR_SECONDS)  # noqa: TID251 - a leader that is away tells nobody
        if seat not in self._boards[db].held and self._registry.workers.get(seat.boot_id) is local:
            self._tell(db, seat, [1, 1, revision])

    # ---- a worker gives back

    async def lower(self, db: str, seat: Seat, to: int) -> Told:
        """Gives back what it has above that: answered when the ledger has no more of it, whatever became of
        a write before. Raises StoreUnavailable, StoreUnknown, ValueError for a share that cannot be read."""
        keys = self._keys(db)
        key = keys.share(seat.execution_class, seat.boot_id)
        for _ in range(ROUNDS_MAX):
            found = await self._store.read(key)
            if not found.entries:
                return [0, 0, found.revision]
            entry = found.entries[0]
            txn = lower_txn(seat, entry, to, keys)
            if txn is None:
                return _told(Share.decode(entry.value), entry.mod_revision)
            with suppress(StoreUnknown):  # what is read next says it, or the same is written again
                done = await self._store.txn(txn)
                if isinstance(done, Won):
                    return _told(Share.decode(txn.puts[0].value), done.revision)
        raise StoreUnavailable("others were faster")

    # ---- what stands

    def _keys(self, db: str) -> DbKeys:
        return self._ledgers[db].keys

    async def _watch(self, db: str) -> None:
        prefix = self._keys(db).shares()
        while True:
            try:
                listed = await self._store.range(prefix)
                self._list(db, listed)
                async with self._store.watch(prefix, after=listed.revision) as changes:
                    async for batch in changes:
                        for change in batch:
                            self._hear(db, change)
            except (StoreUnavailable, StoreUnknown, Compacted):
                pass
            await trio.sleep(BACKOFF_SECONDS)  # noqa: TID251 - a broken watch

    def _list(self, db: str, listed: Snapshot) -> None:
        keys, there = self._keys(db), {entry.key for entry in listed.entries}
        for seat in tuple(self._boards[db].held):
            key = keys.share(seat.execution_class, seat.boot_id)
            if key not in there:
                self._hear(db, Change(key, None, listed.revision))
        for entry in listed.entries:
            self._hear(db, Change(entry.key, entry, entry.mod_revision))

    def _hear(self, db: str, change: Change) -> None:
        board = self._boards[db]
        try:
            seat = seat_of(change.key, self._keys(db))
            if seat is None:
                return
            board.held.pop(seat, None)
            if change.entry is None:
                return  # its worker is gone, or the store is lost: who is there hears of it at its hello
            share = Share.decode(change.entry.value)
        except ValueError as fault:  # UnknownSchema is one: the worker keeps what it has
            _log.error(Event.SOMETHING_FAILED, database=db, why=f"{change.key}: {fault}")
            return
        board.held[seat] = share, change.revision
        if seat.boot_id in self._registry.workers:
            self._tell(db, seat, _told(share, change.revision))
            board.news.set()  # what it has decides what of its demand is news

    def _tell(self, db: str, seat: Seat, told: Told) -> None:
        local = self._registry.workers.get(seat.boot_id)
        if local is not None and local.link is not None and local.shares:
            with suppress(LinkLost):  # it does not read: its link ends by itself
                local.link.notify("share", db=db, share=told, **{"class": seat.execution_class})


def _told(share: Share, revision: int) -> Told:
    return [share.permits, share.kept, revision]


def _seats(listed: Snapshot, keys: DbKeys) -> Iterator[tuple[Seat | None, Entry]]:
    for entry in listed.entries:
        with suppress(ValueError):  # the leader's passes name it
            yield seat_of(entry.key, keys), entry


def _rises(
    written: Mapping[str, Mapping[str, Mapping[str, int]]], now: Mapping[str, Mapping[str, Mapping[str, int]]]
) -> bool:
    return any(tickets > written.get(name, {}).get(worker, {}).get(tenant, 0)
               for name, workers in now.items() for worker, tenants in workers.items()
               for tenant, tickets in tenants.items())
