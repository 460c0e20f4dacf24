"""The workers of this host: their registration in etcd, their leases, and what their links last said.

A worker is registered by one transaction that also reads the backend epochs, so that a worker that has heard
of none yet acknowledges them by registering; one that returns acknowledges what it serves under. Putting its
key again makes every older reservation of it that is still on its way lose.
Its lease is renewed only when it sends a heartbeat. A lost link is not a death.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import structlog
import trio

from coordinator.epoch import acknowledged_by_registering
from coordinator.events import Event
from coordinator.ledger.claims import Told
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.reading import read_or_none
from coordinator.ledger.record import Epoch, Permit, Record, Session, Worker, WorkerExit
from coordinator.ledger.schemas import why_unread
from coordinator.link import Link
from coordinator.store.api import (
    TXN_OPERATIONS_MAX,
    Entry,
    Lease,
    LeaseGone,
    Put,
    Store,
    StoreUnavailable,
    StoreUnknown,
    Txn,
    Won,
    absent,
    unchanged,
)
from coordinator.waiting import Holding, Pool

ROUNDS_MAX = 8
COMPARED_MAX = TXN_OPERATIONS_MAX - 8  # epochs in one registration, beside the worker's own keys
EXIT_BACKOFF_SECONDS = 0.5

_log = structlog.get_logger("coordinator.registry")


@dataclass(frozen=True, slots=True)
class Ordinal(Record):
    """The value under `ordinal/<n>`: whose cancel keys carry this number."""

    name: ClassVar[str] = "ordinal"

    boot_id: str
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a worker says of itself in `hello`."""

    boot_id: str
    index: int
    pid: int
    pid_start: int
    cancel_address: str
    schemas: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Local:
    """One worker of this host, as this coordinator knows it."""

    who: Introduction
    link: Link | None = None
    lease: Lease | None = None
    ordinal: int = -1
    permits: dict[tuple[str, Permit], Pool] = field(default_factory=dict)
    recovered: dict[str, str] = field(default_factory=dict)  # incarnation that has its sessions
    serves: dict[str, int] = field(default_factory=dict)  # the epoch of its pools when it last said hello
    acknowledged: dict[str, int] = field(default_factory=dict)  # by itself, to this coordinator
    requests: dict[str, tuple[str, Permit]] = field(default_factory=dict)  # granted, not yet heard of again
    answered: dict[str, set[str]] = field(default_factory=dict)  # by database: receipts that may go
    attempts: dict[trio.CancelScope, str] = field(default_factory=dict)  # its reservations in progress here
    quiet: trio.Event = field(default_factory=trio.Event)  # none of them is left
    told: Told | None = None  # what it said that it holds, when a ledger was rebuilt
    exited: bool = False
    shares: bool = False  # it keeps to its shares of execution permits
    demand: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)  # by ledger, class and tenant
    settled: bool = False  # its permits and the ledger's were compared since both could be heard
    renewing: trio.Lock = field(default_factory=trio.Lock)

    @property
    def boot_id(self) -> str:
        return self.who.boot_id

    def name_of(self, db: str, session: Session) -> Permit:
        """The permit by which it knows this session: a former one, until it has heard that it was moved."""
        return next((each for each in session.former_permits if (db, each) in self.permits), session.permit)

    def call(self, db: str, session: Session, name: Permit) -> None:
        """It knows this session by that permit."""
        pool = self.permits.pop((db, self.name_of(db, session)), None)
        if pool is not None:
            self.permits[db, name] = pool


class Unregistered(Exception):
    """The worker could not be registered now: says why."""


class Registry:
    """Registers this host's workers and keeps what is known of them."""

    def __init__(
        self, store: Store, keys: FleetKeys, databases: Iterable[str], *, host: str, machine_id: str,
        kernel_boot_id: str, ttl_seconds: float, now_us: Callable[[], int],
    ) -> None:
        self._store = store
        self.keys = keys
        self._databases = tuple(databases)
        self._host = host
        self._machine_id = machine_id
        self._kernel_boot_id = kernel_boot_id
        self._ttl = ttl_seconds
        self.now_us = now_us
        self.workers: dict[str, Local] = {}

    # ---- registration

    async def register(self, local: Local) -> None:
        """Puts the worker's keys on a lease, taking over the lease of a key that is there.

        Raises Unregistered, StoreUnavailable, StoreUnknown.
        """
        unread = why_unread(local.who.schemas)
        if unread:
            raise Unregistered(unread)
        async with local.renewing:
            for _ in range(ROUNDS_MAX):
                if local.exited:
                    raise Unregistered("its process was seen to end")
                try:
                    if await self._register_once(local):
                        return
                except LeaseGone:
                    local.lease = None
            raise Unregistered("others were faster")

    async def _register_once(self, local: Local) -> bool:
        key = self.keys.worker(local.boot_id)
        epoch_keys = [self.keys.db(db).epoch() for db in self._databases]
        found = await self._found(key, self.keys.worker_exit(local.boot_id), *epoch_keys)
        if self.keys.worker_exit(local.boot_id) in found:
            raise Unregistered("its process was seen to end")
        old = found.get(key)
        lease = await self._lease_for(local, old)
        ordinals = await self._store.range(self.keys.ordinals())
        ordinal = choose_ordinal(local.boot_id, ordinals.entries, before=local.ordinal)
        record = self._record(local, ordinal, old, [found.get(each) for each in epoch_keys])
        compares = [unchanged(key, old.mod_revision) if old else absent(key)]
        compares += [unchanged(each, found[each].mod_revision) if each in found else absent(each)
                     for each in epoch_keys[:COMPARED_MAX]]
        compares.append(absent(self.keys.worker_exit(local.boot_id)))
        puts = [Put(key, record.encode(), lease.id)]
        if local.told is not None:
            puts.append(Put(self.keys.claim(local.boot_id), local.told.encode(), lease.id))
        mine = self.keys.ordinal(ordinal)
        taken = next((each for each in ordinals.entries if each.key == mine), None)
        compares.append(unchanged(mine, taken.mod_revision) if taken else absent(mine))
        puts.append(Put(mine, Ordinal(local.boot_id).encode(), lease.id))
        outcome = await self._store.txn(Txn(tuple(compares), tuple(puts)))
        if not isinstance(outcome, Won):
            return False
        local.ordinal = ordinal
        # epochs that did not fit are looked at again now that the key is there: who changes one from here on
        # finds this worker with the older, and waits for it
        rest = epoch_keys[COMPARED_MAX:]
        after = await self._found(*rest)
        return all(after.get(each) == found.get(each) for each in rest)

    async def _found(self, *keys: str) -> dict[str, Entry]:
        """What there is of these keys, however many."""
        entries: dict[str, Entry] = {}
        for first in range(0, len(keys), TXN_OPERATIONS_MAX):
            snapshot = await self._store.read(*keys[first:first + TXN_OPERATIONS_MAX])
            entries |= {entry.key: entry for entry in snapshot.entries}
        return entries

    async def _lease_for(self, local: Local, old: Entry | None) -> Lease:
        """The lease its key is on, if that can be kept alive; else a new one."""
        if old is not None and old.lease:
            lease = await self._store.lease(self._ttl, lease_id=old.lease)
            if await lease.keep_alive():
                local.lease = lease
                return lease
        if local.lease is None or not await local.lease.keep_alive():
            local.lease = await self._store.lease(self._ttl)
        return local.lease

    def _record(
        self, local: Local, ordinal: int, old: Entry | None, epochs: Sequence[Entry | None]
    ) -> Worker:
        who, before = local.who, read_or_none(Worker, old)
        known = {
            db: acknowledged_by_registering(
                epoch.number, serves=local.serves.get(db, 0),
                before=max(local.acknowledged.get(db, 0), before.epochs.get(db, 0) if before else 0))
            for db, entry in zip(self._databases, epochs, strict=True)
            if (epoch := read_or_none(Epoch, entry)) is not None}
        return Worker(
            boot_id=who.boot_id, index=who.index, ordinal=ordinal, host=self._host,
            machine_id=self._machine_id, kernel_boot_id=self._kernel_boot_id, pid=who.pid,
            pid_start=who.pid_start, cancel_address=who.cancel_address, schemas=who.schemas, epochs=known,
            recovered=before.recovered if before else {}, shares=local.shares,
            registered=before.registered + 1 if before else 1,
        )

    async def keep_alive(self, local: Local) -> bool:
        """Renews the worker's lease: only ever called for a heartbeat. False: its lease is gone.

        Raises StoreUnavailable, StoreUnknown.
        """
        return local.lease is not None and await local.lease.keep_alive()

    async def acknowledge(self, local: Local, db: str, epoch: int) -> None:
        """Writes into the worker's key that it grants no session of an older epoch any more.

        Raises Unregistered, StoreUnavailable, StoreUnknown.
        """
        def acknowledged(record: Worker) -> Worker:
            return replace(record, epochs={**record.epochs, db: max(epoch, record.epochs.get(db, 0))})

        local.acknowledged[db] = max(epoch, local.acknowledged.get(db, 0))
        await self._change(local, acknowledged)

    async def note_recovered(self, local: Local, db: str, incarnation: str) -> None:
        """Writes into the worker's key that its sessions have their slots in this incarnation of the ledger.

        Raises Unregistered, StoreUnavailable, StoreUnknown.
        """
        await self._change(local, lambda record: replace(
            record, recovered={**record.recovered, db: incarnation}))

    async def _change(self, local: Local, change: Callable[[Worker], Worker]) -> None:
        key = self.keys.worker(local.boot_id)
        for _ in range(ROUNDS_MAX):
            snapshot = await self._store.read(key)
            if not snapshot.entries:
                raise Unregistered("it has no worker key")
            entry = snapshot.entries[0]
            record = read_or_none(Worker, entry)
            if record is None:
                raise Unregistered("its worker key cannot be read: it is to say hello again")
            changed = change(record)
            if changed == record:
                return
            put = Put(key, changed.encode(), entry.lease)
            if isinstance(await self._store.txn(Txn((unchanged(key, entry.mod_revision),), (put,))), Won):
                return
        raise Unregistered("others were faster")

    # ---- death

    async def bury(self, boot_id: str, how: str, at_us: int) -> None:
        """Its process was seen to end: notes it and takes its worker key away; returns once etcd has both."""
        local = self.workers.pop(boot_id, None)
        if local is not None:
            local.exited = True
        _log.warning(Event.WORKER_EXITED, worker=boot_id, how=how)
        while True:
            try:
                await self._bury_once(boot_id, WorkerExit(boot_id, how, self._host, at_us))
                return
            except (StoreUnavailable, StoreUnknown):
                await trio.sleep(EXIT_BACKOFF_SECONDS)  # noqa: TID251 - back-off towards the store

    async def _bury_once(self, boot_id: str, exit_record: WorkerExit) -> None:
        exit_key, key = self.keys.worker_exit(boot_id), self.keys.worker(boot_id)
        await self._store.txn(Txn((absent(exit_key),), (Put(exit_key, exit_record.encode()),)))
        snapshot = await self._store.read(key)
        for entry in snapshot.entries:
            if entry.lease:
                await (await self._store.lease(self._ttl, lease_id=entry.lease)).revoke()
            await self._store.txn(Txn(deletes=(key,)))

    # ---- what they hold

    def holdings(self) -> Counter[Holding]:
        """How many permits each worker of this host has in each pool."""
        return Counter(
            Holding(each.boot_id, pool) for each in self.workers.values() for pool in each.permits.values())

    def linked(self) -> frozenset[str]:
        """The workers whose link is up."""
        return frozenset(each.boot_id for each in self.workers.values() if each.link is not None)

    def by_ordinal(self, ordinal: int) -> Local | None:
        """This host's worker with that ordinal in its cancel keys."""
        return next((each for each in self.workers.values() if each.ordinal == ordinal), None)


def choose_ordinal(boot_id: str, taken: Iterable[Entry], *, before: int = -1) -> int:
    """The ordinal this worker has, else the one it had `before` if that is free, else the lowest free one."""
    owners = owners_of(taken)
    for number, owner in owners.items():
        if owner == boot_id:
            return number
    if before >= 0 and before not in owners:
        return before
    return next(number for number in range(len(owners) + 1) if number not in owners)


def owners_of(entries: Iterable[Entry]) -> dict[int, str]:
    """Boot id by ordinal; of one that is taken by who knows whom it is empty."""
    found: dict[int, str] = {}
    for entry in entries:
        number = entry.key.rpartition("/")[2]
        if number.isdecimal():
            record = read_or_none(Ordinal, entry)
            found[int(number)] = record.boot_id if record else ""
    return found


def read_kernel_boot_id() -> str:
    """This boot of the kernel."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
