"""Keeps this coordinator's place among all of the fleet's: it looks for what is free from there, and has that
share of what all hosts may together.

Each lease TTL the keys of the coordinators that are there are read; in between a place may be an old one,
which costs a lost transaction at most.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import trio

from coordinator.ledger.homes import Home, home_among
from coordinator.ledger.keys import FleetKeys
from coordinator.store.api import Store, StoreUnavailable, StoreUnknown


class Settled(Protocol):
    """Who is told of the place."""

    def settle_at(self, home: Home) -> None:
        """It is this one from now on."""


class Homes:
    """`own_key` is the one by which this coordinator is there (`FleetKeys.reach`)."""

    def __init__(
        self, store: Store, keys: FleetKeys, own_key: str, told: Iterable[Settled], *,
        ttl_seconds: float,
    ) -> None:
        self._store = store
        self._keys = keys
        self._own_key = own_key
        self._told = tuple(told)
        self._ttl = ttl_seconds

    async def run(self) -> None:
        """For ever; sooner again while its own key is not there yet."""
        while True:
            pause = self._ttl / 3
            try:
                if await self._settle():
                    pause = self._ttl
            except (StoreUnavailable, StoreUnknown):
                pass  # where it was is as good as any
            await trio.sleep(pause)  # noqa: TID251 - a coordinator that comes tells nobody

    async def _settle(self) -> bool:
        """Whether this coordinator's own key was among them."""
        found = await self._store.range(self._keys.reaches())
        home: Home = home_among(found.entries, self._own_key)
        for each in self._told:
            each.settle_at(home)
        return any(entry.key == self._own_key for entry in found.entries)
