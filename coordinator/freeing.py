"""Tells everybody's waiters that something was freed: the leader touches one key for each ledger.

Only the leader watches what becomes of every session. If each coordinator with a waiter did, a storm of a few
thousand sessions would be a million events. Who waits watches the touched key; without a leader, or on an
etcd that takes no writes, it tries again when it next sees that the store has moved.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import unquote

import trio

from coordinator.ledger.keys import FleetKeys
from coordinator.store.api import Change, Compare, Put, Store, StoreUnavailable, StoreUnknown, Txn

PAUSE_SECONDS = 0.1  # between two touches: frees come in flocks


class Freeing:
    """`heard` takes what the leader's watch says; `lead` touches while this coordinator leads."""

    def __init__(self, store: Store, keys: FleetKeys, databases: Collection[str]) -> None:
        self._store = store
        self._keys = keys
        self._databases = frozenset(databases)
        self._freed: set[str] = set()
        self._some = trio.Event()

    def heard(self, change: Change) -> None:
        """One event of a watch: whether a slot was freed by it."""
        prefix = self._keys.every_session()
        if change.entry is None and change.key.startswith(prefix):
            database = unquote(change.key.removeprefix(prefix).partition("/")[0])
            if database in self._databases:
                self._freed.add(database)
                self._some.set()

    async def lead(self, fence: Compare) -> None:
        """For ever."""
        while True:
            await self._some.wait()
            freed, self._freed, self._some = self._freed, set(), trio.Event()
            for database in sorted(freed):
                try:
                    await self._store.txn(Txn((fence,), (Put(self._keys.db(database).freed(), b""),)))
                except (StoreUnavailable, StoreUnknown):
                    continue
            await trio.sleep(PAUSE_SECONDS)  # noqa: TID251 - let the flock land
