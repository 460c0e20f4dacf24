"""Which coordinator of the fleet leads: whoever holds the `leader` key, on a lease of its own.

A clock never decides: whatever the leader writes compares its key's create revision (the fence), so that a
leader that was paused writes nothing after its successor was elected.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import structlog
import trio

from coordinator.events import Event
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.record import Record, UnknownSchema
from coordinator.store.api import (
    Compacted,
    Compare,
    Entry,
    Field,
    Lease,
    Lost,
    Put,
    Store,
    StoreUnavailable,
    StoreUnknown,
    Txn,
    Won,
    absent,
)

_log = structlog.get_logger("coordinator.election")

REVOKE_TIMEOUT_SECONDS = 1.0
ABSTAIN_TTLS = 2  # for who resigned


@dataclass(frozen=True, slots=True)
class Leader(Record):
    """The value under `leader`. While there are servers to which it cannot connect, `blind` names them and
    `seen` those that it sees: the other coordinators say which of them they reach."""

    name: ClassVar[str] = "leader"

    host: str
    pid: int
    since_us: int
    blind: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)


class Election:
    """Campaigns for as long as `run` runs; `leading` and `fence` say how it stands now."""

    def __init__(self, store: Store, keys: FleetKeys, leader: Leader, *, ttl_seconds: float) -> None:
        self._store = store
        self._key = keys.leader()
        self._leader = leader
        self._ttl = ttl_seconds
        self.lease_id = 0  # that our key is on while we lead
        self._resigns = trio.Event()
        self.fence: Compare | None = None
        self.holder: Leader | None = None
        self.on_holder: list[Callable[[], None]] = []

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
                    self._hear(standing.entries[0])
                    await self._wait_for_vacancy(standing.revision)
                    continue
                sent = trio.current_time()
                lease = await self._store.lease(self._ttl)
                try:
                    await self._campaign(lease, sent, lead)
                finally:
                    await _give_back(lease)
                if self._resigns.is_set():
                    await self._abstain()
            except (StoreUnavailable, StoreUnknown, Compacted):  # compacted: what is read anew is newer
                await trio.sleep(self._ttl / 3)  # noqa: TID251 - back-off towards an unreachable store

    async def _campaign(self, lease: Lease, sent: float, lead: Callable[[Compare], Awaitable[None]]) -> None:
        outcome = await self._store.txn(
            Txn((absent(self._key),), (Put(self._key, self._leader.encode(), lease.id),)))
        if isinstance(outcome, Lost):
            return  # another was faster
        fence = Compare(self._key, Field.CREATE, outcome.revision)
        self.fence, self.holder = fence, self._leader
        self.lease_id = lease.id
        _log.info(Event.LEADER_ELECTED, revision=outcome.revision)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lead, fence)
                nursery.start_soon(self._end_when_resigned, nursery.cancel_scope)
                await self._stay(lease, sent, outcome.revision)
                nursery.cancel_scope.cancel()
        finally:
            self.fence = None
            _log.info(Event.LEADER_RESIGNED, revision=outcome.revision)

    def resign(self) -> None:
        """Lead no more, and do not stand again at once. Who does not lead has nothing to give up."""
        if self.leading:
            self._resigns.set()

    async def _abstain(self) -> None:
        """Another is to stand first; what that one asks is heard meanwhile."""
        with trio.move_on_after(ABSTAIN_TTLS * self._ttl):
            while True:
                try:
                    standing = await self._store.read(self._key)
                    if standing.entries:
                        self._hear(standing.entries[0])
                    await self._wait_for_vacancy(standing.revision)
                except (StoreUnavailable, StoreUnknown, Compacted):
                    await trio.sleep(self._ttl / 3)  # noqa: TID251 - back-off towards an unreachable store
        self._resigns = trio.Event()

    async def ask(self, blind: Sequence[str], seen: Sequence[str]) -> None:
        """While leading: says in the key what it cannot see. Raises StoreUnavailable, StoreUnknown."""
        if self.fence is None or self.holder is None:
            return
        asks = replace(self.holder, blind=tuple(blind), seen=tuple(seen))
        if (asks.blind, asks.seen) != (self.holder.blind, self.holder.seen):
            put = Put(self._key, asks.encode(), self.lease_id)
            if isinstance(await self._store.txn(Txn((self.fence,), (put,))), Won):
                self.holder = asks

    async def _end_when_resigned(self, term: trio.CancelScope) -> None:
        await self._resigns.wait()
        term.cancel()

    def _hear(self, entry: Entry) -> None:
        """Who leads, and what it asks."""
        self.holder = _decode(entry.value)
        for listener in self.on_holder:
            listener()

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
                    for change in (each for each in batch if each.key == self._key):
                        if change.entry is None:
                            return
                        self._hear(change.entry)
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
