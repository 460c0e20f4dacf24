"""The stores under contract: the reference, the faulty one without faults, and a real etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import trio_asyncio

from coordinator.store.api import Store
from coordinator.store.etcd import EtcdStore, open_etcd
from coordinator.store.etcd_messages import rpc
from coordinator.store.faulty import FaultyStore
from coordinator.store.memory import MemoryStore


@dataclass(frozen=True, slots=True)
class Ground:
    """A store, a prefix nobody else uses, and what a test may do to the store behind its back."""

    store: Store
    prefix: str
    compact: Callable[[int], Awaitable[None]]
    break_watches: Callable[[], Awaitable[None]]


OpenGround = Callable[[], AbstractAsyncContextManager[Ground]]


@asynccontextmanager
async def _memory_ground(prefix: str, faulty: bool) -> AsyncIterator[Ground]:
    memory = MemoryStore()

    async def compact(revision: int) -> None:
        memory.compact(revision)

    async def break_watches() -> None:
        memory.break_watches()

    store: Store = FaultyStore(memory, Random(1)) if faulty else memory
    yield Ground(store, prefix, compact, break_watches)


@asynccontextmanager
async def _etcd_ground(prefix: str, endpoints: list[str]) -> AsyncIterator[Ground]:
    async with open_etcd(endpoints) as store:

        async def compact(revision: int) -> None:
            await etcd_call(store, "kv", "Compact", rpc.CompactionRequest(revision=revision, physical=True))

        async def break_watches() -> None:
            await store.close()

        yield Ground(store, prefix, compact, break_watches)


async def etcd_call(store: EtcdStore, stub: str, method: str, request: Any) -> Any:
    """Anything of etcd's own API, for what the Store does not offer."""
    member = store._members[0]

    async def ask() -> Any:
        return await getattr(getattr(member, stub), method)(request, timeout=5)

    return await trio_asyncio.aio_as_trio(ask, loop=store._loop)()


@pytest.fixture(params=["memory", "faulty", pytest.param("etcd", marks=pytest.mark.etcd)])
def open_ground(request: pytest.FixtureRequest, etcd_prefix: str) -> OpenGround:
    """async with open_ground() as ground: one of the stores."""
    prefix = f"/{etcd_prefix}/"
    if request.param == "etcd":
        etcd = request.getfixturevalue("etcd")
        return lambda: _etcd_ground(prefix, etcd.endpoints)
    return lambda: _memory_ground(prefix, request.param == "faulty")
