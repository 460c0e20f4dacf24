"""A store whose answers come at once: production coroutines run on an image of it, without a scheduler."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from coordinator.store.api import Lost, Snapshot, Txn, Won, prefix_end
from coordinator.store.memory import Keyspace

T = TypeVar("T")


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """What it returns. It must wait for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise AssertionError(f"{coroutine} waits")


class AtOnce:
    """The Store over a Keyspace, as far as one decision of the product needs it.

    `withholds`: a transaction is noted and answered as lost, so that it can be carried out later.
    """

    def __init__(self, keyspace: Keyspace, *, withholds: bool = False) -> None:
        self.keyspace = keyspace
        self.withheld: list[Txn] = []
        self._withholds = withholds

    async def read(self, *keys: str) -> Snapshot:
        found = (self.keyspace.entries.get(key) for key in keys)
        return Snapshot(tuple(entry for entry in found if entry), self.keyspace.revision)

    async def range(self, prefix: str) -> Snapshot:
        return Snapshot(self.keyspace.read(prefix, prefix_end(prefix)), self.keyspace.revision)

    async def txn(self, txn: Txn) -> Won | Lost:
        if not self._withholds:
            return self.keyspace.txn(txn)
        self.withheld.append(txn)
        return Lost(self.keyspace.revision)

    async def lease(self, ttl_seconds: float, *, lease_id: int = 0) -> LeaseAtOnce:
        return LeaseAtOnce(self.keyspace, lease_id or self.keyspace.grant())

    def watch(self, prefix: str, *, after: int) -> Any:
        raise AssertionError("a model hears of nothing")

    async def status(self) -> Any:
        raise AssertionError("a model asks for no figures")


class LeaseAtOnce:
    """A lease of the keyspace."""

    def __init__(self, keyspace: Keyspace, lease_id: int) -> None:
        self._keyspace = keyspace
        self.id = lease_id

    async def keep_alive(self) -> bool:
        return self.id in self._keyspace.leases

    async def revoke(self) -> None:
        self._keyspace.expire(self.id)
