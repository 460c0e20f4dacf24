"""Which coordinators can reach which servers, and when a leader that cannot look resigns for one that could.

A leader that has no look at a server and cannot even connect to it names it, with those it does see, in its
own key. The others try those addresses by TCP alone, open no session, and put the answer under a key on a
lease of their own. Once the leader was without a look for BLIND_SECONDS while another reaches that server and
everything the leader sees, it resigns, and does not stand again at once.

The key is also what tells which hosts have a coordinator now.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import structlog
import trio

from coordinator.election import Election
from coordinator.events import Event
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.proofs import Look
from coordinator.ledger.record import Record, UnknownSchema
from coordinator.looks import Eyes, LookFailed, split_address
from coordinator.store.api import Entry, Lease, Put, Store, StoreUnavailable, StoreUnknown, Txn

BLIND_SECONDS = 10.0
LOOKED_AT_SECONDS = 60.0  # a server that nobody has looked at for so long is nobody's any more
TRY_SECONDS = 2.0  # of one connect
PACE_SECONDS = 1.0  # of the leader's own tries while it is blind

_log = structlog.get_logger("coordinator.reach")

Connect = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Present(Record):
    """`reach/<id>`: a coordinator is there, and which of the servers the leader asks for it reaches."""

    name: ClassVar[str] = "reach"

    host: str
    reaches: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)


def present(entries: Iterable[Entry]) -> dict[str, Present]:
    """Every coordinator that is there, by its key; what cannot be read is left out."""
    found = {}
    for entry in entries:
        try:
            found[entry.key] = Present.decode(entry.value)
        except (UnknownSchema, ValueError, TypeError):
            continue
    return found


async def hosts_present(store: Store, keys: FleetKeys) -> frozenset[str]:
    """The hosts that have a coordinator now. Raises StoreUnavailable."""
    return frozenset(each.host for each in present((await store.range(keys.reaches())).entries).values())


def better(blind: Collection[str], seen: Collection[str], others: Iterable[Present]) -> Present | None:
    """One that reaches what the leader does not, and all that the leader does. Pure."""
    return next((each for each in others
                 if set(blind) & set(each.reaches) and set(seen) <= set(each.reaches)), None)


class Sight:
    """Eyes that remember when each server was last seen, and whether the last look at it failed."""

    def __init__(self, eyes: Eyes) -> None:
        self._eyes = eyes
        self.seen_at: dict[str, float] = {}
        self.failed: set[str] = set()
        self._looked_at: dict[str, float] = {}

    async def look(self, address: str, *, fresh: bool = False) -> Look:
        """See Eyes.look."""
        self._looked_at[address] = trio.current_time()
        try:
            look = await self._eyes.look(address, fresh=fresh)
        except LookFailed:
            self.failed.add(address)
            raise
        self.failed.discard(address)
        self.seen_at[address] = trio.current_time()
        return look

    async def terminate(self, address: str, pid: int, backend_start_us: int) -> bool:
        """See Eyes.terminate."""
        return await self._eyes.terminate(address, pid, backend_start_us)

    async def close(self, *addresses: str) -> None:
        """See Eyes.close."""
        await self._eyes.close(*addresses)

    def begin(self) -> None:
        """A term begins: what was seen before counts no more."""
        self.seen_at.clear()
        self.failed.clear()
        self._looked_at.clear()

    def forget(self, before: float) -> None:
        """What was last looked at before then: a server that no ledger and no session is at any more."""
        for address in [each for each, at in self._looked_at.items() if at < before]:
            del self._looked_at[address]
            self.failed.discard(address)
            self.seen_at.pop(address, None)


async def can_connect(address: str) -> bool:
    """Whether a connection is accepted there; nothing is said on it."""
    host, port = split_address(address)
    with trio.move_on_after(TRY_SECONDS):
        try:
            if host.startswith("/"):
                stream = await trio.open_unix_socket(f"{host}/.s.PGSQL.{port}")
            else:
                stream = await trio.open_tcp_stream(host, port)
        except OSError:
            return False
        await trio.aclose_forcefully(stream)
        return True
    return False


class Reach:
    """This coordinator's own key, and both sides of the question."""

    def __init__(
        self, store: Store, keys: FleetKeys, election: Election, sight: Sight, *, host: str,
        ttl_seconds: float, connect: Connect = can_connect,
    ) -> None:
        self._store = store
        self._keys = keys
        self.key = keys.reach(f"{host}.{secrets.token_hex(4)}")
        self._election = election
        self._sight = sight
        self._host = host
        self._ttl = ttl_seconds
        self._connect = connect
        self._lease: Lease | None = None
        self._put: bytes = b""
        self._asked = trio.Event()
        election.on_holder.append(self._hear)

    async def run(self) -> None:
        """For ever: is present, and answers what the leader asks."""
        try:
            while True:
                try:
                    await self._be_present()
                except (StoreUnavailable, StoreUnknown):
                    self._put = b""
                with trio.move_on_after(self._ttl / 3):
                    await self._asked.wait()
                self._asked = trio.Event()
        finally:
            with trio.move_on_after(1, shield=True):
                await self._leave()

    @property
    def lease_id(self) -> int:
        """Of what stands for as long as this coordinator is there; 0: there is none yet."""
        return self._lease.id if self._lease is not None else 0

    async def lead(self) -> None:
        """The leader's side, for as long as it leads."""
        self._sight.begin()
        began = trio.current_time()
        while True:
            await trio.sleep(PACE_SECONDS)  # noqa: TID251 - what cannot be seen tells nobody
            try:
                await self._ask(began)
            except (StoreUnavailable, StoreUnknown):
                continue

    # ---- asked

    def _hear(self) -> None:
        self._asked.set()

    async def _be_present(self) -> None:
        if self._lease is None or not await self._lease.keep_alive():
            self._lease, self._put = await self._store.lease(self._ttl), b""
        value = Present(self._host, await self._reached()).encode()
        if value != self._put:
            await self._store.txn(Txn(puts=(Put(self.key, value, self._lease.id),)))
            self._put = value

    async def _reached(self) -> tuple[str, ...]:
        holder = self._election.holder
        if holder is None or self._election.leading or not holder.blind:
            return ()
        asked = sorted({*holder.blind, *holder.seen})
        return tuple(await _those_that_connect(asked, self._connect))

    async def _leave(self) -> None:
        if self._lease is not None:
            try:
                await self._lease.revoke()
            except (StoreUnavailable, StoreUnknown):
                return  # it ends by itself

    # ---- asking

    async def _ask(self, began: float) -> None:
        sight, now = self._sight, trio.current_time()
        sight.forget(now - max(LOOKED_AT_SECONDS, 3 * self._ttl))
        failed = sorted(sight.failed)
        reached = await _those_that_connect(failed, self._connect) if failed else []
        blind = [address for address in failed if address not in reached and address in sight.failed]
        seen = sorted((sight.seen_at.keys() - sight.failed) | set(reached))
        await self._election.ask(blind, seen if blind else ())
        late = [address for address in blind if now - sight.seen_at.get(address, began) >= BLIND_SECONDS]
        if not late:
            return
        others = present((await self._store.range(self._keys.reaches())).entries)
        others.pop(self.key, None)
        other = better(late, seen, others.values())
        if other is not None:
            _log.warning(Event.LEADER_BLIND, nodes=late, reached_by=other.host,
                         seconds=max(now - sight.seen_at.get(address, began) for address in late))
            self._election.resign()


async def _those_that_connect(addresses: Collection[str], connect: Connect) -> list[str]:
    found: list[str] = []

    async def attempt(address: str) -> None:
        if await connect(address):
            found.append(address)

    async with trio.open_nursery() as nursery:
        for address in addresses:
            nursery.start_soon(attempt, address)
    return sorted(found)
