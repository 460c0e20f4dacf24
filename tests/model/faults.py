"""Everything that goes wrong in a simulated round: each fault is one move on the world.

Faults of the store (it refuses, gives no answer, carries out too late) are drawn by request, in
coordinator_world.py; the rest is here, one of them in three rounds of four.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from coordinator.epoch import NoEpoch, advanced, draining, read_epoch, swap_epoch
from coordinator.ledger import fence
from coordinator.ledger.proofs import Proven
from coordinator.ledger.record import EpochState
from coordinator.ledger.rules import Release
from coordinator.ledger.snapshot import Held
from coordinator.ledger.states import Actor, Proof, SessionState
from coordinator.store.api import StoreUnavailable, StoreUnknown, Txn, unchanged
from tests.ledger.ground import KEYS, NOW_US
from tests.model.server_world import BACKENDS
from tests.model.world import GENERATIONS, World, published

Fault = Callable[[World], Awaitable[None]]


async def pause(world: World) -> None:
    """A worker is paused past its lease, mostly one that has sessions; it comes back later."""
    worker = world.random.choice(world.workers)
    if world.random.random() < 0.7:
        worker = max(world.workers, key=lambda each: len(each.core.active) + len(each.core.idle))
    world.store.expire(worker.lease)
    worker.linked = False
    if world.random.random() < 0.7:  # on the event; else by level
        await world.lead(world.random.choice(world.coordinators))


async def crash(world: World) -> None:
    """A worker dies; what is known of it follows in any order."""
    idle = [worker for worker in world.workers if not worker.acting]
    if idle:
        world.bury_alive(world.random.choice(idle))


async def coordinator_dies(world: World) -> None:
    """With what it had in memory; its workers say hello to the next one."""
    world.replace_coordinator(world.random.randrange(len(world.coordinators)))


async def leader_is_paused(world: World) -> None:
    """Another is elected; the first goes on believing that it leads."""
    world.elect(world.random.choice(world.coordinators))


async def server_restarts(world: World) -> None:
    world.servers.restart(world.random.choice(BACKENDS).address)


async def grant_is_revoked(world: World) -> None:
    """The looking role may not see other sessions: every look is void."""
    world.servers.nodes[world.random.choice(BACKENDS).address].hidden = True


async def node_cut_off(world: World) -> None:
    world.servers.nodes[world.random.choice(BACKENDS).address].cut_off = True


async def epoch_advances(world: World) -> None:
    """The other node leads from now on."""
    store = world.coordinators[0].store
    try:
        before = await read_epoch(store, KEYS)
        other = next(each for each in BACKENDS if each.address != before.epoch.backend.address)
        backend = world.servers.nodes[other.address].backend
        after = advanced(before.epoch, backend, now_us=NOW_US, reason="the other is gone")
        await swap_epoch(store, KEYS, before, after)
    except (StoreUnavailable, StoreUnknown, NoEpoch):
        return  # whoever asked will see what became of it


async def drain_is_abandoned(world: World) -> None:
    """A drain begins and its command dies: the leader lets the old epoch grant again."""
    store = world.coordinators[0].store
    try:
        before = await read_epoch(store, KEYS)
        if before.epoch.state is EpochState.ACTIVE:
            after = draining(before.epoch, timeout_seconds=5.0, now_us=NOW_US, reason="by hand")
            await swap_epoch(store, KEYS, before, after)
    except (StoreUnavailable, StoreUnknown, NoEpoch):
        return


async def policy_changes(world: World) -> None:
    """Another generation is active: fewer slots, or more again."""
    entry = world.keyspace.entries[KEYS.alias()]
    after = world.generation() + world.random.choice((1, 2))
    if after > max(GENERATIONS) - 3:
        return
    try:
        await world.coordinators[0].store.txn(Txn(
            (unchanged(entry.key, entry.mod_revision),), puts=published(after)))
    except (StoreUnavailable, StoreUnknown):
        return
    for each in world.coordinators:
        if world.is_smaller() and world.random.random() < 0.7:  # it hears of it at once
            await world.relocate(each)


async def tickets_cancelled(world: World) -> None:
    for worker in world.workers:
        worker.tenants.cancel(world.random)


async def node_is_fenced(world: World) -> None:
    """It goes off, and no client hears of it by more than a reset; then it starts again."""
    address = world.random.choice(BACKENDS).address
    ledger = world.judge.snapshot(world.keyspace)
    epoch = ledger.epoch.number if ledger.epoch and ledger.epoch.backend.address == address else 0
    world.fenced.append(fence.what_goes_off(
        world.servers.nodes[address].backend, [held.session for held in ledger.sessions], ledger.exits,
        epoch))
    world.servers.restart(address, orderly=False)


async def fencing_is_confirmed(world: World) -> None:
    """It frees what ended with the nodes that were fenced; they are back, and who was paused may connect."""
    fenced, world.fenced = world.fenced, []
    for held in _unknown(world):
        if any(isinstance(fence.proof_of_fence(held.session, each), Proven) for each in fenced):
            await _release(world, [held], Proof.FENCED, Actor.FENCER)


async def operator_attests(world: World) -> None:
    """What is true: its process is gone and none can come."""
    held = [each for each in _unknown(world) if each.session.pid
            and not world.servers.lives(each.permit)]
    await _release(world, held[:1], Proof.ATTESTED, Actor.OPERATOR)


def _unknown(world: World) -> list[Held]:
    sessions = world.judge.snapshot(world.keyspace).sessions
    return [each for each in sessions if each.session.state is SessionState.UNKNOWN]


async def _release(world: World, found: list[Held], proof: Proof, actor: Actor) -> None:
    ledger, exits = world.coordinators[0].ledger, world.judge.snapshot(world.keyspace).exits
    for held in found:
        died = exits.get(held.session.owner)
        await ledger.apply(Release(held.permit, proof, actor, "test", seen_revision=held.mod_revision,
                                   exit_revision=died.mod_revision if died else 0))


FAULTS: tuple[Fault, ...] = (
    pause, pause, crash, coordinator_dies, leader_is_paused, server_restarts, grant_is_revoked, node_cut_off,
    epoch_advances, drain_is_abandoned, policy_changes, tickets_cancelled, node_is_fenced, operator_attests,
)


def name(fault: Fault) -> str:
    """As it is counted."""
    return "fault: " + fault.__name__.replace("_", " ")
