"""The reference store: a linearizable map in memory, deterministic, with etcd's rules and refusals.

`Keyspace` is the synchronous map that tests and the model explore (it can be cloned); `MemoryStore` is the
Store around it. Leases end only when told to (`expire`): no clock decides anything here.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import trio

from coordinator.store.api import (
    TXN_OPERATIONS_MAX,
    Change,
    Compacted,
    Compare,
    Entry,
    Field,
    LeaseGone,
    Lost,
    Snapshot,
    StoreFull,
    StoreStatus,
    Txn,
    Won,
    prefix_end,
)


class Keyspace:
    """Keys, revisions, leases and history, all in plain values. Not for use from several threads."""

    def __init__(self) -> None:
        self.revision = 1  # as a new etcd
        self.entries: dict[str, Entry] = {}
        self.leases: set[int] = set()
        self.history: list[tuple[Change, ...]] = []  # one item per revision written
        self.compacted = 0
        self.full = False
        self._next_lease = 1

    def clone(self) -> Keyspace:
        """An independent copy; entries are shared, as they never change."""
        twin = Keyspace()
        twin.revision, twin.compacted, twin.full = self.revision, self.compacted, self.full
        twin.entries, twin.leases, twin.history = dict(self.entries), set(self.leases), list(self.history)
        twin._next_lease = self._next_lease
        return twin

    def read(self, start: str, end: str) -> tuple[Entry, ...]:
        """The entries with start <= key < end, in order of keys."""
        if end == start + "\0":
            entry = self.entries.get(start)
            return (entry,) if entry else ()
        return tuple(self.entries[key] for key in sorted(key for key in self.entries if start <= key < end))

    def txn(self, txn: Txn) -> Won | Lost:
        """Raises ValueError, LeaseGone, StoreFull; then nothing was written."""
        _check(txn)
        if self.full and txn.puts:
            raise StoreFull("NOSPACE")
        if not all(self._holds(compare) for compare in txn.compares):
            return Lost(self.revision, tuple(self.read(*span) for span in txn.reads))
        gone = next((put for put in txn.puts if put.lease and put.lease not in self.leases), None)
        if gone is not None:
            raise LeaseGone(f"lease {gone.lease} of {gone.key}")
        self._write(txn)
        return Won(self.revision)

    def grant(self) -> int:
        """A new lease. Raises StoreFull."""
        if self.full:
            raise StoreFull("NOSPACE")
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        self.leases.add(lease)
        return lease

    def expire(self, lease: int) -> None:
        """End a lease: its keys are deleted in one revision. One that is gone is no error."""
        if lease not in self.leases:
            return
        self.leases.discard(lease)
        keys = tuple(key for key, entry in self.entries.items() if entry.lease == lease)
        self._write(Txn(deletes=tuple(sorted(keys))))

    def _write(self, txn: Txn) -> None:
        deletes = [key for key in txn.deletes if key in self.entries]
        if not deletes and not txn.puts:
            return
        self.revision += 1
        changes = [Change(key, None, self.revision) for key in deletes]
        for key in deletes:
            del self.entries[key]
        for put in txn.puts:
            old = self.entries.get(put.key)
            created = old.create_revision if old else self.revision
            entry = Entry(put.key, put.value, created, self.revision, put.lease)
            self.entries[put.key] = entry
            changes.append(Change(put.key, entry, self.revision))
        self.history.append(tuple(changes))

    def _holds(self, compare: Compare) -> bool:
        if compare.range_end is None:
            entry = self.entries.get(compare.key)
            found: Sequence[Entry] = (entry,) if entry else ()
        else:
            found = self.read(compare.key, compare.range_end)
        if not found:
            return compare.revision == 0
        return all(_revision(entry, compare.field) == compare.revision for entry in found)


def _revision(entry: Entry, field: Field) -> int:
    return entry.create_revision if field is Field.CREATE else entry.mod_revision


def _check(txn: Txn) -> None:
    named = [*(put.key for put in txn.puts), *txn.deletes]
    if len(set(named)) != len(named):
        raise ValueError("a key is named twice in one transaction")
    if txn.operations > TXN_OPERATIONS_MAX:
        raise ValueError(f"{txn.operations} operations in one transaction, {TXN_OPERATIONS_MAX} are allowed")


@dataclass(eq=False, slots=True)
class _Watcher:
    prefix: str
    after: int
    send: trio.MemorySendChannel[Sequence[Change]]


class MemoryLease:
    """A lease that lives until it is revoked or expired by the test."""

    def __init__(self, store: MemoryStore, lease_id: int) -> None:
        self._store = store
        self.id = lease_id

    async def keep_alive(self) -> bool:
        await trio.lowlevel.checkpoint()
        return self.id in self._store.keyspace.leases

    async def revoke(self) -> None:
        await trio.lowlevel.checkpoint()
        self._store.expire(self.id)


class MemoryStore:
    """The Store over a Keyspace. `expire`, `compact` and `break_watches` are what time does to a real one."""

    def __init__(self, keyspace: Keyspace | None = None) -> None:
        self.keyspace = keyspace or Keyspace()
        self._watchers: set[_Watcher] = set()

    async def read(self, *keys: str) -> Snapshot:
        await trio.lowlevel.checkpoint()
        if len(keys) > TXN_OPERATIONS_MAX:
            raise ValueError(f"{len(keys)} keys in one read")
        found = (self.keyspace.entries.get(key) for key in keys)
        return Snapshot(tuple(entry for entry in found if entry), self.keyspace.revision)

    async def range(self, prefix: str) -> Snapshot:
        await trio.lowlevel.checkpoint()
        return Snapshot(self.keyspace.read(prefix, prefix_end(prefix)), self.keyspace.revision)

    async def txn(self, txn: Txn) -> Won | Lost:
        await trio.lowlevel.checkpoint()
        outcome = self.keyspace.txn(txn)
        self._tell()
        return outcome

    def watch(
        self, prefix: str, *, after: int
    ) -> AbstractAsyncContextManager[trio.MemoryReceiveChannel[Sequence[Change]]]:
        return self._watch(prefix, after)

    @asynccontextmanager
    async def _watch(
        self, prefix: str, after: int
    ) -> AsyncIterator[trio.MemoryReceiveChannel[Sequence[Change]]]:
        await trio.lowlevel.checkpoint()
        if after + 1 < self.keyspace.compacted:
            raise Compacted(self.keyspace.compacted)
        send, receive = trio.open_memory_channel[Sequence[Change]](math.inf)
        watcher = _Watcher(prefix, after, send)
        self._watchers.add(watcher)
        self._tell()
        async with receive:
            try:
                yield receive
            finally:
                self._watchers.discard(watcher)
                send.close()

    async def lease(self, ttl_seconds: float, *, lease_id: int = 0) -> MemoryLease:
        await trio.lowlevel.checkpoint()
        return MemoryLease(self, lease_id or self.keyspace.grant())

    async def status(self) -> StoreStatus:
        await trio.lowlevel.checkpoint()
        size = sum(len(key) + len(entry.value) for key, entry in self.keyspace.entries.items())
        alarms = ("NOSPACE",) if self.keyspace.full else ()
        return StoreStatus("memory", 1, self.keyspace.revision, size, alarms, has_leader=True)

    # ---- what time does

    def expire(self, lease_id: int) -> None:
        """The lease's time is over."""
        self.keyspace.expire(lease_id)
        self._tell()

    def compact(self, revision: int) -> None:
        """History before `revision` is gone: a watch that starts earlier is refused."""
        self.keyspace.compacted = max(self.keyspace.compacted, revision)

    def break_watches(self) -> None:
        """Every watch ends, as when a connection breaks."""
        for watcher in self._watchers:
            watcher.send.close()
        self._watchers.clear()

    def _tell(self) -> None:
        for watcher in self._watchers:
            for changes in self._since(watcher.after):
                wanted = tuple(change for change in changes if change.key.startswith(watcher.prefix))
                watcher.after = changes[0].revision
                if wanted:
                    watcher.send.send_nowait(wanted)

    def _since(self, revision: int) -> list[tuple[Change, ...]]:
        history = self.keyspace.history
        start = len(history)
        while start and history[start - 1][0].revision > revision:
            start -= 1
        return history[start:]
