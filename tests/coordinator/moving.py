"""A stage whose policy gets fewer slots, with sessions of a stand-in worker in the high ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.ledger.invariants import check_ledger
from coordinator.ledger.record import Alias, Permit
from coordinator.link import Args
from coordinator.link_values import parse_permit, permit_list
from coordinator.policy import encode_policy, load_policy
from coordinator.relocating import Relocating
from tests.coordinator.parts import Worker, policy_text
from tests.coordinator.stage import DB, Stage, stage
from tests.coordinator.test_workers import opened
from tests.ledger.ground import KEYS

Names = dict[tuple[str, Permit], str]


@dataclass
class Moving:
    """A stage whose policy changes at a word; the passes are made when a test says so."""

    on: Stage
    relocating: Relocating

    async def publish(self, generation: int, slots: int, **limits: int) -> None:
        policy = load_policy(policy_text(slots, db=DB))[1] | {"generation": generation} | limits
        await self.on.put(KEYS.policy(generation), encode_policy(policy))
        await self.on.put(KEYS.alias(), Alias(generation).encode())
        await self.on.views.refresh()

    async def go(self) -> bool:
        return await self.relocating.relocate(self.on.views.views[DB])

    async def held(self) -> dict[int, int]:
        """pid by slot."""
        snapshot = await self.on.ledger.snapshot()
        assert check_ledger(snapshot, KEYS) == []
        return {held.session.slot: held.session.pid for held in snapshot.sessions}

    def restart(self) -> None:
        on = self.on
        self.relocating = Relocating(
            on.views, {DB: on.ledger}, on.registry, on.granting, ttl_seconds=5.0)


@asynccontextmanager
async def moving(run_dir: Path, slots: int = 6) -> AsyncIterator[Moving]:
    async with stage(run_dir, slots=slots) as on:
        made = Moving(on, Relocating(on.views, {DB: on.ledger}, on.registry, on.granting, ttl_seconds=5.0))
        yield made


def follows(worker: Worker) -> None:
    """It takes what it is told by `moved`."""
    def moved(args: Args) -> Args:
        return {"lost": [new for old, new in args["moves"] if not take(worker, old, new)]}

    worker.answers["moved"] = moved


def take(worker: Worker, old: list[Any], new: list[Any]) -> bool:
    state = worker.permits.pop((DB, parse_permit(old)), None)
    if state is not None:
        worker.permits[DB, parse_permit(new)] = state
    return (DB, parse_permit(new)) in worker.permits


async def has_slots(m: Moving, worker: Worker, *slots: int) -> list[Permit]:
    """Sessions in these slots, with a hundred more than the slot for a pid."""
    permits = [parse_permit(await opened(worker, 100 + slot)) for slot in range(max(slots) + 1)]
    for permit in permits:
        if permit.slot in slots:
            worker.permits[DB, permit] = "OPEN"
        else:
            await worker.release(permit_list(permit), "eof", db=DB)
    follows(worker)
    return [permit for permit in permits if permit.slot in slots]


def slots_of(names: Names) -> list[int]:
    return sorted(permit.slot for _, permit in names)
