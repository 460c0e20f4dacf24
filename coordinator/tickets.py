"""The names that clients gave their transactions, of every ledger: moved by compare-and-set.

Retention is a lease of etcd that is never kept alive: one an hour for each coordinator, for all that ends or
waits in that hour, not one for each name. What runs stands on no lease: it is not forgotten while it may run.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from coordinator.ledger.keys import DbKeys, FleetKeys
from coordinator.ledger.reading import read_or_none
from coordinator.ledger.snapshot import LedgerSnapshot
from coordinator.ledger.tickets import (
    STARTED,
    Command,
    Decision,
    NamedTicket,
    OwnerGone,
    Write,
    decide,
    due,
)
from coordinator.store.api import (
    Change,
    Entry,
    LeaseGone,
    Put,
    Store,
    StoreUnavailable,
    Txn,
    Won,
    absent,
    unchanged,
)

ROUNDS_MAX = 12  # of read, decide, lose
RETENTION_SECONDS = 24 * 3600
HOUR_SECONDS = 3600


class Tickets:
    """Reads and moves the names of a fleet's ledgers."""

    def __init__(
        self, store: Store, keys: FleetKeys, now_us: Callable[[], int], *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._keys = keys
        self._now_us = now_us
        self._monotonic = monotonic
        self._lease_id, self._lease_until = 0, 0.0

    async def find(self, db: str, ticket_id: str) -> NamedTicket | None:
        """What stands under this name. Raises StoreUnavailable; ValueError (UnknownSchema) where it cannot be
        read."""
        return _decoded(await self._read(self._keys.db(db).ticket(ticket_id)))

    async def apply(self, db: str, ticket_id: str, command: Command) -> Decision:
        """Carry out `command`. A Write was written when it is returned.

        Raises StoreUnavailable (nothing was written), StoreUnknown (give the same command again), ValueError
        (UnknownSchema) where the standing value cannot be read: then nobody knows that it does not run.
        """
        keys = self._keys.db(db)
        key = keys.ticket(ticket_id)
        for _ in range(ROUNDS_MAX):
            entry = await self._read(key)
            decision = decide(_decoded(entry), command, self._now_us())
            if not isinstance(decision, Write) or await self._write(keys, key, entry, decision, command):
                return decision
        raise StoreUnavailable("others were faster")

    async def _write(
        self, keys: DbKeys, key: str, entry: Entry | None, write: Write, command: Command
    ) -> bool:
        compares = [unchanged(key, entry.mod_revision) if entry is not None else absent(key)]
        if isinstance(command, OwnerGone):
            compares.append(absent(keys.worker(command.owner)))
        lease = 0 if write.ticket.state in STARTED else await self._lease()
        try:
            done = await self._store.txn(Txn(tuple(compares), (Put(key, write.ticket.encode(), lease),)))
        except LeaseGone:
            self._lease_until = 0.0  # etcd was restored, or somebody revoked it
            return False
        return isinstance(done, Won)

    async def _lease(self) -> int:
        """The one of this hour: what is put on it now is kept for the retention at the least."""
        now = self._monotonic()
        if now >= self._lease_until:
            granted = await self._store.lease(RETENTION_SECONDS + HOUR_SECONDS)
            self._lease_id, self._lease_until = granted.id, now + HOUR_SECONDS
        return self._lease_id

    async def _read(self, key: str) -> Entry | None:
        entries = (await self._store.read(key)).entries
        return entries[0] if entries else None


class TicketReaper:
    """What the leader settles: names whose transactions ran on a worker that is gone.

    It knows from the leader's own watch which names run; it reads them once for each watch, and where none
    of them is a dead worker's, a pass asks etcd nothing.
    """

    def __init__(self, store: Store, keys: FleetKeys, tickets: Tickets) -> None:
        self._store = store
        self._keys = keys
        self._tickets = tickets
        self._running: dict[str, tuple[NamedTicket, int]] = {}  # by key, with its mod revision
        self._unread = True

    def watched_anew(self) -> None:
        """A watch begins: what changed before it was not heard."""
        self._unread = True

    def heard(self, change: Change) -> None:
        """A change of the fleet's keys."""
        if change.key.startswith(self._keys.every_ticket()):
            self._take(change.key, change.entry, change.revision)

    def _take(self, key: str, entry: Entry | None, revision: int) -> None:
        if key in self._running and self._running[key][1] > revision:
            return
        ticket = read_or_none(NamedTicket, entry)
        if ticket is not None and ticket.state in STARTED:
            self._running[key] = ticket, revision
        else:
            self._running.pop(key, None)

    async def tend(self, db: str, snapshot: LedgerSnapshot) -> None:
        """What the deaths of workers come to, of this ledger's names. Names that changed after `snapshot` are
        left alone: it need not have their worker, or their permit.

        A permit that a name has and the ledger has no more was freed, and permits are freed on proof only.
        Raises StoreUnavailable, StoreUnknown.
        """
        if self._unread:
            await self._read_all()
        if not self._running:
            return
        held = permits_held(snapshot)
        prefix = self._keys.db(db).tickets()
        for key, (ticket, revision) in tuple(self._running.items()):
            if key.startswith(prefix) and revision <= snapshot.revision:
                command = due(ticket, snapshot.workers, held)
                if command is not None:
                    await self._tickets.apply(db, ticket.id, command)

    async def _read_all(self) -> None:
        self._unread = False
        try:
            entries = (await self._store.range(self._keys.every_ticket())).entries
        except BaseException:
            self._unread = True
            raise
        for entry in entries:
            self._take(entry.key, entry, entry.mod_revision)


def permits_held(snapshot: LedgerSnapshot) -> frozenset[str] | None:
    """Every permit that is held, under each name it had; None where one cannot be read."""
    if snapshot.strange or any(held.unreadable for held in snapshot.sessions):
        return None
    return frozenset(str(permit) for held in snapshot.sessions
                     for permit in (held.session.permit, *held.session.former_permits))


def _decoded(entry: Entry | None) -> NamedTicket | None:
    return NamedTicket.decode(entry.value) if entry is not None else None
