"""Whatever stands in etcd that cannot be read: no coordinator ends, and other databases are served on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
from trio.testing import MockClock, memory_stream_pair

from coordinator.ledger.keys import DbKeys, FleetKeys
from coordinator.ledger.record import SCHEMA, Alias, Epoch, EpochState, Kind, LedgerHead, LedgerState
from coordinator.parts import Coordinator
from coordinator.policy import encode_policy, load_policy
from coordinator.remembered import Remembered
from coordinator.spec import DatabaseSpec, Monitor
from coordinator.store.api import Put
from coordinator.store.memory import Keyspace, MemoryStore
from tests.coordinator.parts import Worker, policy_text
from tests.coordinator.stage import FakeEyes, Server, make_spec
from tests.ledger.ground import BACKEND, FLEET, write

HIT, OTHER = "hit/write", "other/write"
KEYS = FLEET.db(HIT)
LONG_SECONDS = 12.0  # several lease cycles
UNREADABLE = {
    "newer": msgpack.packb({"schema": SCHEMA + 1, "what": "nobody knows"}),
    "empty": msgpack.packb({"schema": SCHEMA}),
    "wrong types": msgpack.packb({"schema": SCHEMA, **{name: [None] for name in (
        "kind", "slot", "owner", "state", "active", "number", "boot_id", "host", "why", "permits", "who",
        "only_active", "incarnation", "backend", "serverSessionPermits")}}),
    "no map": b"\xc1damaged",
}
FLEET_WIDE: dict[str, str] = {
    "worker": FLEET.worker("x"), "worker_exit": FLEET.worker_exit("x"), "leader": FLEET.leader(),
    "reach": FLEET.reach("x"), "ordinal": FLEET.ordinal(0), "claim": FLEET.claim("x"),
    "operator": FLEET.operator("1-x"),
}
OF_ONE: dict[str, str] = {
    "ledger": KEYS.ledger(), "epoch": KEYS.epoch(), "drain": KEYS.drain(), "awaiting": KEYS.awaiting(),
    "freed": KEYS.freed(), "alias": KEYS.alias(), "growth": KEYS.growth(), "shadow": KEYS.shadow(2, "x"),
    "policy": KEYS.policy(1), "session": KEYS.session(Kind.MAIN, 0), "seat": KEYS.seat("app", "app", 0),
    "receipt": KEYS.receipt("r"), "want": KEYS.want("r"), "ticket": KEYS.ticket("t"),
    "share": KEYS.share("interactive", "x"), "raised": KEYS.raised("interactive"), "demand": KEYS.demand("x"),
    "bucket": KEYS.bucket("tenant=a", "x"), "bucket_pool": KEYS.bucket_pool("tenant=a"),
}
NO_KEYS = {"db", "under", "root", "database"} | {  # of no single key: ranges, and what others are made of
    "workers", "worker_exits", "reaches", "ordinals", "claims", "every_session", "operators", "growth_stops",
    "ledgers", "epochs", "database_of", "shadows", "policies", "sessions", "all_seats", "seats", "receipts",
    "wants", "tickets", "every_ticket", "shares", "demands", "buckets"}


def test_every_kind_of_key_is_tried() -> None:
    methods = {name for keys in (FleetKeys, DbKeys) for name in vars(keys)
               if not name.startswith("_") and callable(getattr(keys, name))}
    tried = FLEET_WIDE.keys() | OF_ONE.keys()
    assert methods - NO_KEYS == tried


def founded() -> Keyspace:
    """Two ledgers, of which one has a shadow."""
    keyspace = Keyspace()
    for db in (HIT, OTHER):
        keys = FLEET.db(db)
        document = load_policy(policy_text(db=db))[1]
        write(keyspace, Put(keys.ledger(), LedgerHead(db, LedgerState.ACTIVE, "abcd1234").encode()),
              Put(keys.epoch(), Epoch(1, EpochState.ACTIVE, BACKEND, 0, "test").encode()),
              Put(keys.policy(1), encode_policy(document)),
              Put(keys.policy(2), encode_policy({**document, "generation": 2})),
              Put(keys.alias(), Alias(1, shadow=2).encode()))
    return keyspace


class Looks(FakeEyes):
    """What a coordinator asks of its eyes beside looks."""

    async def rename(self) -> None:
        await trio.lowlevel.checkpoint()

    async def ask(self, address: str, sql: str) -> tuple[Any, ...]:
        await trio.lowlevel.checkpoint()
        return BACKEND.system_identifier, BACKEND.timeline, BACKEND.postmaster_start_us, False, False, 0.0


@asynccontextmanager
async def running(
    run_dir: Path, keyspace: Keyspace, *, max_connections: int = 100
) -> AsyncIterator[Coordinator]:
    """A whole coordinator over that store."""
    databases = tuple(DatabaseSpec(db, db, "app", (BACKEND.address,), policy=policy_text(db=db),
                                   monitor=Monitor("monitor", "secret")) for db in (HIT, OTHER))
    spec = make_spec(run_dir, databases=databases)
    looks = Looks({BACKEND.address: Server(max_connections=max_connections)})
    whole = Coordinator(spec, MemoryStore(keyspace), looks, Remembered(run_dir))  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        await nursery.start(whole.run)
        yield whole
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def linked(whole: Coordinator, boot_id: str) -> AsyncIterator[Worker]:
    """A worker of that coordinator's host, greeted."""
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(whole.workers.serve, theirs)
        worker = Worker(boot_id=boot_id)
        async with worker.linked(ours):
            await worker.hello()
            yield worker
        nursery.cancel_scope.cancel()


async def serves_the_other(whole: Coordinator, boot_id: str) -> None:
    """A new worker is let in there, gets a permit and gives it back; and heartbeats keep it alive."""
    async with linked(whole, boot_id) as worker:
        granted = await worker.reserve(db=OTHER)
        assert granted["permit"], granted
        await worker.call("release", db=OTHER, permit=granted["permit"], proof="unused")
        assert await worker.call("heartbeat", late=[]) == {"alive": True}


@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE.keys())
@pytest.mark.parametrize("key", [*FLEET_WIDE.values(), *OF_ONE.values()], ids=[*FLEET_WIDE, *OF_ONE])
async def test_no_coordinator_ends_of_what_it_cannot_read_and_other_databases_are_served_on(
    tmp_path: Path, clock: MockClock, key: str, value: bytes
) -> None:
    keyspace = founded()
    async with running(tmp_path, keyspace) as whole:
        await trio.sleep(1.0)  # noqa: TID251 - the clock jumps
        await serves_the_other(whole, "before")
        async with linked(whole, "holder") as holder:
            await holder.reserve(db=HIT)
            write(keyspace, Put(key, value))
            await trio.sleep(LONG_SECONDS)  # noqa: TID251 - the clock jumps: many passes of every loop
            await serves_the_other(whole, "during")


@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE.keys())
async def test_a_coordinator_that_starts_over_a_store_of_which_it_can_read_little_serves_the_rest(
    tmp_path: Path, clock: MockClock, value: bytes
) -> None:
    keyspace = founded()
    write(keyspace, *(Put(key, value) for key in (*FLEET_WIDE.values(), *OF_ONE.values())))
    async with running(tmp_path, keyspace) as whole:
        await trio.sleep(LONG_SECONDS)  # noqa: TID251 - the clock jumps
        await serves_the_other(whole, "during")


@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE.keys())
async def test_a_stop_of_growth_that_cannot_be_read_is_written_anew_while_there_is_no_room(
    tmp_path: Path, clock: MockClock, value: bytes
) -> None:
    keyspace = founded()
    async with running(tmp_path, keyspace, max_connections=3) as whole:
        await trio.sleep(LONG_SECONDS)  # noqa: TID251 - the clock jumps
        assert whole.room.crowded[HIT]
        write(keyspace, Put(KEYS.growth(), value))
        write(keyspace, Put(KEYS.alias(), Alias(1).encode()))
        await trio.sleep(LONG_SECONDS)  # noqa: TID251 - the clock jumps
        assert whole.views.views[HIT].growth == whole.room.crowded[HIT]
