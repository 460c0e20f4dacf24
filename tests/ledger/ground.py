"""A small ledger in memory for tests: founded, with a policy, an epoch and workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgpack

from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.ledger import Granted, Ledger
from coordinator.ledger.record import (
    Alias,
    Backend,
    Epoch,
    EpochState,
    Kind,
    LedgerHead,
    LedgerState,
    Permit,
    Session,
    Worker,
    WorkerExit,
)
from coordinator.ledger.reservation import Reserve
from coordinator.ledger.rules import session_of
from coordinator.ledger.states import SessionState
from coordinator.store.api import Entry, Put, Store, Txn, Won
from coordinator.store.memory import Keyspace, MemoryStore

FLEET = FleetKeys("pooler", "test")
KEYS = FLEET.db("orders/write")
TAG = "abcd1234"
BACKEND = Backend("127.0.0.1:5432", "7300000000000000001", 1, 1_000)
NOW_US = 1_800_000_000_000_000


def write(keyspace: Keyspace, *puts: Put, deletes: tuple[str, ...] = ()) -> int:
    """Write without compares; the revision."""
    outcome = keyspace.txn(Txn(puts=puts, deletes=deletes))
    assert isinstance(outcome, Won)
    return outcome.revision


def policy(slots: int, reserve: int = 0, admin: int = 2) -> bytes:
    """A stored policy generation."""
    document = {"schema": "dbAdmissionPolicy.v1", "serverSessionPermits": slots,
                "reservePermits": reserve, "adminReserve": admin}
    packed: bytes = msgpack.packb(document)
    return packed


def epoch(number: int = 1, state: EpochState = EpochState.ACTIVE) -> bytes:
    return Epoch(number, state, BACKEND, since_us=0, reason="test").encode()


def found(slots: int = 4, **limits: int) -> Keyspace:
    """A keyspace with an ACTIVE ledger of so many main slots, epoch 1 and policy generation 1."""
    keyspace = Keyspace()
    write(
        keyspace,
        Put(KEYS.ledger(), LedgerHead("first", LedgerState.ACTIVE, TAG).encode()),
        Put(KEYS.epoch(), epoch()),
        Put(KEYS.policy(1), policy(slots, **limits)),
        Put(KEYS.alias(), Alias(1).encode()),
    )
    return keyspace


def register(keyspace: Keyspace, boot_id: str) -> int:
    """A worker's key on a lease of its own; the lease."""
    lease = keyspace.grant()
    worker = Worker(boot_id, 0, 1, "host", "machine", "kernel", 100, 200)
    write(keyspace, Put(KEYS.worker(boot_id), worker.encode(), lease))
    return lease


def record_exit(keyspace: Keyspace, boot_id: str) -> int:
    """Its process is known dead; the mod revision of the record."""
    gone = WorkerExit(boot_id, "signal 9", "supervisor", NOW_US)
    return write(keyspace, Put(KEYS.worker_exit(boot_id), gone.encode()))


def ask(request: str, owner: str = "A", **changes: Any) -> Reserve:
    """A wish for a main session of pool app/app with room for 100."""
    values: dict[str, Any] = {"kind": Kind.MAIN, "dbname": "app", "user": "app", "seats": 100, "host": "host"}
    return Reserve(request_id=request, owner=owner, **(values | changes))


def session(state: SessionState = SessionState.OPEN, **changes: Any) -> Session:
    """A stored session of owner A in main slot 0, generation 7, with a pid once it was opened."""
    born = state in (SessionState.OPEN, SessionState.CLOSING, SessionState.UNKNOWN)
    values: dict[str, Any] = {
        "kind": Kind.MAIN, "slot": 0, "generation": 7, "state": state, "owner": "A",
        "host": "host", "dbname": "app", "user": "app",
        "seat": 0, "request_id": "r1", "epoch": 1, "policy_generation": 1, "backend": BACKEND,
        "pid": 42 if born else 0, "backend_start_us": 5_000 if born else 0}
    return Session(**(values | changes))


def entry_of(stored: Session, mod_revision: int = 9) -> Entry:
    """The slot's key with this session in it."""
    return Entry(KEYS.session(stored.kind, stored.slot), stored.encode(), 7, mod_revision)


def standing(keyspace: Keyspace, permit: Permit) -> Session | None:
    """What stands in the permit's slot now."""
    entry = keyspace.entries.get(KEYS.session(permit.kind, permit.slot))
    return session_of(entry) if entry else None


def session_keys(keyspace: Keyspace) -> list[str]:
    """Every slot and seat that is taken."""
    return [key for key in sorted(keyspace.entries) if key.startswith((KEYS.sessions(), KEYS.all_seats()))]


@dataclass
class World:
    """A founded ledger with workers A and B, and a Ledger on it."""

    keyspace: Keyspace
    store: MemoryStore
    ledger: Ledger
    leases: dict[str, int] = field(default_factory=dict)

    async def granted(self, request: str = "r1", **changes: Any) -> Granted:
        """A reservation that must succeed."""
        answer = await self.ledger.reserve(ask(request, **changes))
        assert isinstance(answer, Granted), answer
        return answer

    def another(self, **options: Any) -> Ledger:
        """Another coordinator's view of the same ledger."""
        return ledger_on(self.store, **options)

    def end_lease(self, boot_id: str) -> None:
        self.store.expire(self.leases[boot_id])


def ledger_on(store: Store, **options: Any) -> Ledger:
    """A Ledger whose clock stands still."""
    return Ledger(store, KEYS, FLEET, lambda: NOW_US, **options)


def world(slots: int = 4, **limits: int) -> World:
    keyspace = found(slots, **limits)
    store = MemoryStore(keyspace)
    leases = {boot_id: register(keyspace, boot_id) for boot_id in ("A", "B")}
    return World(keyspace, store, ledger_on(store), leases)
