"""What each permit in SESSION_UNKNOWN waits for, as the leader last saw it, where a command can read it.

`awaiting/<db>` is on the leader's own lease: without a leader nobody tells. It is written at most once a
lease cycle, and only when something of it changed. Times are of the leader's wall clock: shown, never
compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import structlog
import trio

from coordinator.election import Leader
from coordinator.events import Event
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.record import Record, Session, UnknownSchema
from coordinator.store.api import Compare, Put, Store, StoreUnavailable, StoreUnknown, Txn, Won

PERMITS_MAX = 256  # told of in one ledger: a key is no place for more

_log = structlog.get_logger("coordinator.awaiting")


@dataclass(frozen=True, slots=True)
class Waits:
    """One permit's: the proof that is open, where it could be seen, what is missing, and since when."""

    proof: str
    node: str
    reason: str
    since_us: int
    unreachable_since_us: int = 0  # the node could not be looked at since; 0: it can

    def text(self) -> str:
        """For a sum line: `absent on 10.0.0.11:5432, unreachable since 02:58`."""
        where = f" on {self.node}" if self.node else ""
        since = self.unreachable_since_us
        return f"{self.proof}{where}" + (f", unreachable since {clock_time(since)}" if since else "")


@dataclass(frozen=True, slots=True)
class Awaited(Record):
    """`awaiting/<db>`: what the leader on `host` says of its unknown permits."""

    name: ClassVar[str] = "awaiting"

    host: str
    permits: Mapping[str, tuple[str, str, str, int, int]] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def waits(self) -> dict[str, Waits]:
        """By permit. Raises TypeError for what a newer version made of it."""
        return {permit: Waits(*values) for permit, values in self.permits.items()}


def proof_open(session: Session) -> str:
    """The proof that a look could give of it."""
    if session.pid:
        return "absent"
    return "never_born" if session.backend else "attested"


def clock_time(at_us: int) -> str:
    """Hour and minute at this place, with the day where that is another one."""
    at, now = time.localtime(at_us / 1_000_000), time.localtime()
    return time.strftime("%H:%M" if at[:3] == now[:3] else "%Y-%m-%d %H:%M", at)


class Publishing:
    """The leader's: `waits` by ledger is what to tell of."""

    def __init__(
        self, store: Store, keys: FleetKeys, waits: Mapping[str, Mapping[str, Waits]], *, host: str,
        lease_id: Callable[[], int], ttl_seconds: float,
    ) -> None:
        self._store = store
        self._keys = keys
        self._waits = waits
        self._host = host
        self._lease_id = lease_id
        self._ttl = ttl_seconds

    async def lead(self, fence: Compare) -> None:
        """For as long as it leads."""
        told: dict[str, bytes] = {}
        while True:
            await trio.sleep(self._ttl)  # noqa: TID251 - at most once a lease cycle
            for db, waits in self._waits.items():
                try:
                    await self._tell(db, waits, fence, told)
                except (StoreUnavailable, StoreUnknown):
                    told.pop(db, None)

    async def _tell(
        self, db: str, waits: Mapping[str, Waits], fence: Compare, told: dict[str, bytes]
    ) -> None:
        some = dict(sorted(waits.items(), key=lambda each: each[1].since_us)[:PERMITS_MAX])
        value = Awaited(self._host, {
            permit: (each.proof, each.node, each.reason, each.since_us, each.unreachable_since_us)
            for permit, each in some.items()}).encode()
        if value == told.get(db) or (not some and db not in told):
            return
        put = Put(self._keys.db(db).awaiting(), value, self._lease_id())
        if isinstance(await self._store.txn(Txn((fence,), (put,))), Won):
            told[db] = value


async def read_awaited(store: Store, keys: FleetKeys, db: str) -> tuple[str, dict[str, Waits]]:
    """(the host of the leader, what its unknown permits wait for); no host where nobody leads.

    Raises StoreUnavailable.
    """
    key = keys.db(db).awaiting()
    entries = {entry.key: entry.value for entry in (await store.read(key, keys.leader())).entries}
    try:
        waits = Awaited.decode(entries[key]).waits() if key in entries else {}
        return Leader.decode(entries[keys.leader()]).host if keys.leader() in entries else "", waits
    except (UnknownSchema, ValueError, TypeError) as fault:
        _log.warning(Event.SOMETHING_FAILED, why=f"what {db} waits for cannot be read: {fault}")
        return "", {}
