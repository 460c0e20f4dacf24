"""A coordinator's parts over the memory store, with eyes that see what a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from coordinator.granting import Granting
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.proofs import Look, Row
from coordinator.ledger.record import Backend
from coordinator.looks import LookFailed
from coordinator.policy import encode_policy, load_policy
from coordinator.reconcile import Reconciler
from coordinator.registry import Registry
from coordinator.remembered import Remembered
from coordinator.serve_workers import WorkerServer
from coordinator.spec import CoordinatorSpec, EtcdSpec
from coordinator.store.api import (
    Compare,
    Field,
    Lost,
    Put,
    Snapshot,
    Store,
    StoreUnavailable,
    StoreUnknown,
    Txn,
    Won,
)
from coordinator.store.memory import Keyspace, MemoryStore
from coordinator.view import Views
from tests.coordinator.parts import Worker, policy_text
from tests.ledger.ground import BACKEND, FLEET, KEYS, NOW_US, found, write

DB = KEYS.database
TTL_SECONDS = 5.0
NO_FENCE = Compare("/never/there", Field.CREATE, 0)


@dataclass
class Server:
    """One node as the fake eyes see it."""

    backend: Backend = BACKEND
    rows: list[Row] = field(default_factory=list)
    anonymous: set[int] = field(default_factory=set)
    may_see_all: bool = True
    unreachable: bool = False
    silent: bool = False  # connects and never answers
    authentication_timeout_seconds: float = 1.0
    max_connections: int = 0
    reserved_connections: int = 0


@dataclass
class FakeEyes:
    """Looks at `servers` by address; `terminated` are the pids that were told to end."""

    servers: dict[str, Server] = field(default_factory=lambda: {BACKEND.address: Server()})
    looks: int = 0
    connection: int = 1
    terminated: list[int] = field(default_factory=list)

    @property
    def server(self) -> Server:
        return self.servers[BACKEND.address]

    async def look(self, address: str, *, fresh: bool = False) -> Look:
        await trio.lowlevel.checkpoint()
        server = self.servers.get(address)
        if server is None or server.unreachable:
            raise LookFailed(f"{address}: unreachable")
        if server.silent:
            await trio.sleep_forever()
        self.looks += 1
        self.connection += fresh
        return Look(
            backend=replace(server.backend, address=address), may_see_all=server.may_see_all, is_node=True,
            rows=tuple(server.rows), anonymous=frozenset(server.anonymous),
            at_us=int(trio.current_time() * 1_000_000), connection=self.connection,
            authentication_timeout_seconds=server.authentication_timeout_seconds, is_local=True,
            max_connections=server.max_connections, reserved_connections=server.reserved_connections)

    async def terminate(self, address: str, pid: int, backend_start_us: int) -> bool:
        await trio.lowlevel.checkpoint()
        self.terminated.append(pid)
        return True

    async def close(self, *addresses: str) -> None:
        await trio.lowlevel.checkpoint()


def row(pid: int, start_us: int, name: str = "") -> Row:
    return Row(pid, start_us, "app", "app", name, "idle", "client backend")


def make_spec(run_dir: Path, **changes: Any) -> CoordinatorSpec:
    base = CoordinatorSpec(
        fleet=FLEET.fleet, prefix=FLEET.prefix, host="host", machine_id="m", run_dir=str(run_dir),
        socket=str(run_dir / "s"), lease_ttl_seconds=TTL_SECONDS, etcd=EtcdSpec(), databases=())
    return replace(base, **changes)


class StallingStore(MemoryStore):
    """While `stalled` is set, a txn that writes is applied only when it is lifted, and the caller waits."""

    def __init__(self, keyspace: Keyspace) -> None:
        super().__init__(keyspace)
        self.lifted = trio.Event()
        self.lifted.set()
        self.late: list[Txn] = []
        self.refuses_deletes = False
        self.loses_touch = False  # with the next reservation: it lands, and nothing more is answered
        self.silent = False
        self.asked = 0

    async def read(self, *keys: str) -> Snapshot:
        self.asked += 1
        return await super().read(*keys)

    async def range(self, prefix: str) -> Snapshot:
        self.asked += 1
        return await super().range(prefix)

    async def txn(self, txn: Txn) -> Won | Lost:
        self.asked += 1
        if self.refuses_deletes and txn.deletes:
            raise StoreUnavailable("no deletes now")
        if self.silent:
            raise StoreUnavailable("silent")
        if self.loses_touch and any("/receipt/" in put.key for put in txn.puts):
            await super().txn(txn)
            self.silent = True
            raise StoreUnknown("no answer")
        if txn.puts or txn.deletes:
            try:
                await self.lifted.wait()
            except trio.Cancelled:
                self.late.append(txn)  # whoever is cancelled here does not know what becomes of it
                raise
        return await super().txn(txn)

    async def lift(self) -> None:
        """What was sent lands now, first that of those who went away."""
        late, self.late = self.late, []
        for txn in late:
            await super().txn(txn)
        self.lifted.set()


@dataclass
class Stage:
    """The parts, running."""

    store: StallingStore
    keyspace: Keyspace
    eyes: FakeEyes
    ledger: Ledger
    views: Views
    registry: Registry
    granting: Granting
    workers: WorkerServer
    reconciler: Reconciler
    nursery: trio.Nursery
    life: trio.CancelScope = field(default_factory=trio.CancelScope)  # of what this coordinator has under way

    async def gather(self) -> None:
        """What the coordinator's ledger has under way, until it dies."""
        with self.life:
            await self.ledger.run()

    @asynccontextmanager
    async def worker(self, boot_id: str, **state: Any) -> AsyncIterator[Worker]:
        """A stand-in worker with a link, greeted."""
        ours, theirs = memory_stream_pair()
        self.nursery.start_soon(self.workers.serve, theirs)
        worker = Worker(boot_id=boot_id, **state)
        async with worker.linked(ours):
            await worker.hello()
            yield worker

    async def restart(self) -> None:
        """Another coordinator of this host takes over: what the first one had in memory is gone."""
        used, ledgers = self.store, {DB: Ledger(self.store, KEYS, FLEET, lambda: NOW_US)}
        self.ledger = ledgers[DB]
        self.registry = Registry(used, FLEET, ledgers, host="host", machine_id="m", kernel_boot_id="k",
                                 ttl_seconds=TTL_SECONDS, now_us=lambda: NOW_US)
        self.granting = Granting(used, self.views, ledgers, self.registry, host="host")
        self.workers = WorkerServer(
            used, self.views, ledgers, self.registry, self.granting, host="host", ttl_seconds=TTL_SECONDS,
            rows=no_rows)
        self.life.cancel()
        self.life = trio.CancelScope()
        self.nursery.start_soon(self.gather)
        self.nursery.start_soon(self.granting.run)
        await wait_all_tasks_blocked()

    async def reconcile(self) -> int:
        return await self.reconciler.reconcile(DB, NO_FENCE)

    async def put(self, key: str, value: bytes) -> None:
        """As some other process of the fleet would write it."""
        await self.store.txn(Txn(puts=(Put(key, value),)))

    def expire(self, boot_id: str) -> None:
        """The worker's lease runs out."""
        lease = self.registry.workers[boot_id].lease
        assert lease is not None
        self.store.expire(lease.id)

    async def states(self) -> dict[int, str]:
        """State by slot."""
        snapshot = await self.ledger.snapshot()
        return {held.session.slot: str(held.session.state) for held in snapshot.sessions}


async def no_rows() -> list[dict[str, Any]]:
    return []


@asynccontextmanager
async def stage(
    run_dir: Path, *, slots: int = 4, **spec: Any
) -> AsyncIterator[Stage]:
    """A founded ledger with the parts of one coordinator; its reconciler runs only when a test calls it."""
    keyspace = found(slots)
    write(keyspace, Put(KEYS.policy(1), encode_policy(load_policy(policy_text(slots, db=DB))[1])))
    memory = StallingStore(keyspace)
    used: Store = memory
    eyes = FakeEyes()
    ledger = Ledger(used, KEYS, FLEET, lambda: NOW_US)
    ledgers = {DB: ledger}
    views = Views(used, FLEET, ledgers, Remembered(run_dir), ttl_seconds=TTL_SECONDS)
    registry = Registry(used, FLEET, ledgers, host="host", machine_id="m", kernel_boot_id="k",
                        ttl_seconds=TTL_SECONDS, now_us=lambda: NOW_US)
    granting = Granting(used, views, ledgers, registry, host="host")

    workers = WorkerServer(
        used, views, ledgers, registry, granting, host="host", ttl_seconds=TTL_SECONDS, rows=no_rows)
    reconciler = Reconciler(used, FLEET, ledgers, views, eyes, spec=make_spec(run_dir, **spec),
                            now_us=lambda: NOW_US, monotonic=trio.current_time)
    reconciler.owners.on_unknown.append(workers.became_unknown)
    reconciler.backends.on_released.append(workers.was_released)
    async with trio.open_nursery() as nursery:
        await views.refresh()
        nursery.start_soon(views.run)
        nursery.start_soon(granting.run)
        on = Stage(memory, keyspace, eyes, ledger, views, registry, granting, workers, reconciler, nursery)
        on.nursery.start_soon(on.gather)
        await wait_all_tasks_blocked()
        yield on
        nursery.cancel_scope.cancel()
