"""The small interface to a linearizable map with leases and watches.

An outcome of a write is one of three, never two: Won (returned), Lost (returned: somebody moved first and
nothing was written), StoreUnknown (raised: sent, no answer; it may have been applied, or may be later).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import trio

TXN_OPERATIONS_MAX = 128  # etcd's default --max-txn-ops


def prefix_end(prefix: str) -> str:
    """The first key after every key with this prefix (prefixes here end in '/')."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


class StoreUnavailable(Exception):
    """The request was certainly not carried out (never sent, or refused whole)."""


class StoreUnknown(Exception):
    """The request was sent and its answer never came: it may have happened, or may happen later."""


class StoreFull(StoreUnavailable):
    """etcd's NOSPACE alarm: puts and new leases are refused; a txn of deletes only is not."""


class LeaseGone(StoreUnavailable):
    """A put names a lease that does not exist (any more); nothing of its txn was carried out."""


class Compacted(Exception):
    """A watch asked for a revision that is gone: list again, then watch from there."""

    def __init__(self, revision: int) -> None:
        super().__init__(f"revisions up to {revision} are compacted")
        self.revision = revision


@dataclass(frozen=True, slots=True)
class Entry:
    """One key as it stands."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0  # 0: none


class Field(StrEnum):
    """What a compare looks at. A key that does not exist has create and mod revision 0."""

    CREATE = "create"
    MOD = "mod"


@dataclass(frozen=True, slots=True)
class Compare:
    """`field` of `key` equals `revision`; with `range_end` it must hold for every key in [key, range_end).

    A key that is not there, and a range without keys, compare as revision 0; so `create == 0` over a range
    holds only if the range is empty.
    """

    key: str
    field: Field
    revision: int
    range_end: str | None = None


def absent(key: str) -> Compare:
    """The key must not exist."""
    return Compare(key, Field.CREATE, 0)


def unchanged(key: str, mod_revision: int) -> Compare:
    """The key must exist exactly as it was read."""
    return Compare(key, Field.MOD, mod_revision)


def nothing_in(start: str, end: str) -> Compare:
    """No key may exist in [start, end)."""
    return Compare(start, Field.CREATE, 0, end)


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Txn:
    """Compares, then puts and deletes if all hold. `reads` are ranges read in the failure branch."""

    compares: tuple[Compare, ...] = ()
    puts: tuple[Put, ...] = ()
    deletes: tuple[str, ...] = ()
    reads: tuple[tuple[str, str], ...] = ()  # (start, end) each

    @property
    def operations(self) -> int:
        return max(len(self.compares), len(self.puts) + len(self.deletes), len(self.reads))


@dataclass(frozen=True, slots=True)
class Won:
    """All compares held; everything was written at `revision`."""

    revision: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A compare failed; nothing was written. `reads` answers Txn.reads, at `revision`."""

    revision: int
    reads: tuple[tuple[Entry, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """One event of a watch. `entry` is None for a delete."""

    key: str
    entry: Entry | None
    revision: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A range read at one revision."""

    entries: tuple[Entry, ...]
    revision: int


class Lease(Protocol):
    """A lease this process keeps alive by asking, never by timer."""

    @property
    def id(self) -> int: ...

    async def keep_alive(self) -> bool:
        """True if it was renewed, False if it is gone. Raises StoreUnavailable / StoreUnknown."""
        ...

    async def revoke(self) -> None:
        """Its keys go at once. Raises StoreUnavailable / StoreUnknown; a lease that is gone is no error."""
        ...


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """What `doctor` and /readyz tell about the store."""

    version: str
    cluster_id: int
    revision: int
    db_size_bytes: int
    alarms: tuple[str, ...]
    has_leader: bool


class Store(Protocol):
    """A linearizable map. Every method may raise StoreUnavailable; those that write, StoreUnknown too."""

    async def read(self, *keys: str) -> Snapshot:
        """Those of the keys that exist, all at one revision (at most TXN_OPERATIONS_MAX keys)."""
        ...

    async def range(self, prefix: str) -> Snapshot:
        """Every key with this prefix, at one revision."""
        ...

    async def txn(self, txn: Txn) -> Won | Lost:
        """Carry out `txn`.

        Raises ValueError if it deletes and puts one key, names a key twice or has too many operations.
        """
        ...

    def watch(
        self, prefix: str, *, after: int
    ) -> AbstractAsyncContextManager[trio.MemoryReceiveChannel[Sequence[Change]]]:
        """Changes with revision > `after`, in order, in batches of one revision or more.

        The channel ends (trio.EndOfChannel) when the watch breaks. Raises Compacted out of `receive` or of
        the context manager.
        """
        ...

    async def lease(self, ttl_seconds: float, *, lease_id: int = 0) -> Lease:
        """A new lease; with `lease_id` a handle on one that exists already (nothing is asked)."""
        ...

    async def status(self) -> StoreStatus:
        """Version, size, alarms."""
        ...
