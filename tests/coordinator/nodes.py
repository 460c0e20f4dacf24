"""Servers that answer glances as a test says, and a ledger's backend followed over them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import trio

from coordinator.epoch import read_epoch
from coordinator.following import Following
from coordinator.glancing import Glances
from coordinator.ledger.record import Backend, Epoch
from coordinator.looks import LookFailed
from coordinator.patroni import PatroniFailed
from coordinator.spec import DatabaseSpec, Monitor
from coordinator.topology import Cluster
from tests.coordinator.stage import DB, NO_FENCE, Stage, stage
from tests.ledger.ground import BACKEND, FLEET, KEYS, NOW_US

A = BACKEND
B = Backend("127.0.0.2:5432", A.system_identifier, 1, 1_001, in_recovery=True)
C = Backend("127.0.0.3:5432", A.system_identifier, 1, 1_002, in_recovery=True)
B2 = replace(B, timeline=2, in_recovery=False)  # promoted


@dataclass
class Node:
    """One server: who it is, or (None) nobody answers; `is_silent`: connects and says nothing."""

    backend: Backend | None
    read_only: bool = False
    lag_seconds: float | None = 0.0
    is_silent: bool = False


@dataclass
class Nodes:
    """What is at each address. `asked` counts the glances there."""

    at: dict[str, Node] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)
    patroni: str | None = ""  # the leader it names; "": it does not answer

    async def ask(self, address: str, sql: str) -> tuple[Any, ...]:
        await trio.lowlevel.checkpoint()
        self.asked[address] = self.asked.get(address, 0) + 1
        node = self.at.get(address, Node(None))
        if node.is_silent:
            await trio.sleep_forever()
        if node.backend is None:
            raise LookFailed(f"{address}: refused")
        found = node.backend
        return (found.system_identifier, found.timeline, found.postmaster_start_us, found.in_recovery,
                node.read_only, node.lag_seconds)

    async def close(self, *addresses: str) -> None:
        await trio.lowlevel.checkpoint()
        self.closed += addresses

    async def cluster(self) -> Cluster:
        await trio.lowlevel.checkpoint()
        if self.patroni == "":
            raise PatroniFailed("no answer")
        return Cluster(self.patroni, trio.current_time())


@dataclass
class Followed:
    """A stage whose ledger's backend is followed; a pass is made when a test calls for one."""

    stage: Stage
    nodes: Nodes
    glances: Glances
    following: Following

    async def follow(self) -> bool:
        """One pass; whether the epoch moved."""
        await self.stage.views.refresh()
        moved = await self.following.follow(DB, NO_FENCE) is not None
        await self.stage.views.refresh()
        return moved

    async def epoch(self) -> Epoch:
        return (await read_epoch(self.stage.store, KEYS)).epoch

    async def put_epoch(self, **changes: Any) -> None:
        await self.stage.put(KEYS.epoch(), replace(await self.epoch(), **changes).encode())


@asynccontextmanager
async def followed(
    run_dir: Path, *, role: str = "write", lag_max: float | None = None, asks_patroni: bool = False,
    monitor: Monitor | None = Monitor("m", "secret"),  # noqa: B008 - it cannot be changed
) -> AsyncIterator[Followed]:
    """Primary A with standbys B and C, all configured; the epoch is at A for role write, else at B."""
    nodes = Nodes({each.address: Node(each) for each in (A, B, C)})
    async with stage(run_dir) as on:
        glances = Glances(nodes, trio.current_time)
        spec = DatabaseSpec(DB, "shop", "app", tuple(nodes.at), role, monitor=monitor,
                            max_replica_lag_seconds=lag_max)
        following = Following(
            on.store, FLEET, {DB: on.ledger}, on.views, {DB: (spec,)}, glances,
            now_us=lambda: NOW_US, drain_timeout_seconds=7.0, clock=trio.current_time,
            ask_patroni=nodes.cluster if asks_patroni else None)
        made = Followed(on, nodes, glances, following)
        if role != "write":
            await made.put_epoch(backend=B)
        yield made
