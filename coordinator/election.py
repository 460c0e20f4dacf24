"""Which coordinator of the fleet leads: whoever holds the `leader` key, on a lease of its own.

A clock never decides: whatever the leader writes compares its key's create revision (the fence), so that a
leader that was paused writes nothing after its successor was elected.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import structlog
import trio

from coordinator.events import Event
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.record import Record, UnknownSchema
from coordinator.store.api import (
    Compacted,
    Compare,
    Field,
    Lease,
    Lost,
    Put,
    Store,
    StoreUnavailable,
    StoreUnknown,
    Txn,
    absent,
)

_log = structlog.get_logger("coordinator.election")

REVOKE_TIMEOUT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Leader(Record):
    """The value under `leader`."""

    name: ClassVar[str] = "leader"

    host: str
    pid: int
    since_us: int
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)


class Election:
    """Campaigns for as long as `run` runs; `leading` and `fence` say how it stands now."""

    def __init__(self, store: Store, keys: FleetKeys, leader: Leader, *, ttl_seconds: float) -> None:
        self._store = store
        self._key = keys.leader()
        self._value = leader.encode()
        self._ttl = ttl_seconds
        self.fence: Compare | None = None
        self.holder: Leader | None = None

    @property
    def leading(self) -> bool:
        """Whether this coordinator believes it leads; only the fence makes it true of a write."""
        return self.fence is not None

    async def run(self, lead: Callable[[Compare], Awaitable[None]]) -> None:
        """Campaigns for ever; `lead(fence)` runs while elected and is cancelled when that ends."""
        while True:
            try:
                standing = await self._store.read(self._key)
                if standing.entries:
                    self.holder = _decode(standing.entries[0].value)
                    await self._wait_for_vacancy(standing.revision)
                    continue
                sent = trio.current_time()
                lease = await self._store.lease(self._ttl)
                try:
                    await self._campaign(lease, sent, lead)
                finally:
                    await _give_back(lease)
            except (StoreUnavailable, StoreUnknown, Compacted):  # compacted: what is read anew is newer
                await trio.sleep(self._ttl / 3)  # noqa: TID251 - back-off towards an unreachable store

    async def _campaign(self, lease: Lease, sent: float, lead: Callable[[Compare], Awaitable[None]]) -> None:
        outcome = await self._store.txn(
            Txn((absent(self._key),), (Put(self._key, self._value, lease.id),)))
        if isinstance(outcome, Lost):
            return  # another was faster
        fence = Compare(self._key, Field.CREATE, outcome.revision)
        self.fence, self.holder = fence, _decode(self._value)
        _log.info(Event.LEADER_ELECTED, revision=outcome.revision)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lead, fence)
                await self._stay(lease, sent, outcome.revision)
                nursery.cancel_scope.cancel()
        finally:
            self.fence = None
            _log.info(Event.LEADER_RESIGNED, revision=outcome.revision)

    async def _stay(self, lease: Lease, confirmed: float, revision: int) -> None:
        """Returns when the lease is gone, or may be: counted from the sending of what was confirmed last; or
        when the key is not ours any more, whose lease lives on where somebody wiped it."""
        while trio.current_time() - confirmed < self._ttl:
            await trio.sleep(self._ttl / 3)  # noqa: TID251 - the pace of keep-alives
            sent = trio.current_time()
            try:
                with trio.move_on_after(self._ttl / 3):
                    if not await lease.keep_alive() or not await self._stands(revision):
                        return
                    confirmed = sent
            except (StoreUnavailable, StoreUnknown):
                continue

    async def _stands(self, revision: int) -> bool:
        standing = await self._store.read(self._key)
        return [entry.create_revision for entry in standing.entries] == [revision]

    async def _wait_for_vacancy(self, revision: int) -> None:
        """Until the key changes, or a TTL has passed (a watch is a hint)."""
        with trio.move_on_after(self._ttl):
            async with self._store.watch(self._key, after=revision) as changes:
                async for batch in changes:
                    if any(change.key == self._key and change.entry is None for change in batch):
                        return
            await trio.sleep(self._ttl / 3)  # noqa: TID251 - the watch broke: not at once again


def _decode(raw: bytes) -> Leader | None:
    """Who leads; None if a newer version wrote it in a way that this one cannot read."""
    try:
        return Leader.decode(raw)
    except (UnknownSchema, ValueError):
        return None


async def _give_back(lease: Lease) -> None:
    with trio.move_on_after(REVOKE_TIMEOUT_SECONDS, shield=True):
        try:
            await lease.revoke()
        except (StoreUnavailable, StoreUnknown):
            return  # it ends by itself
