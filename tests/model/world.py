"""The simulated fleet: two hosts with a coordinator each, workers, two nodes, and one ledger between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from random import Random

from coordinator.election import Leader
from coordinator.epoch import not_acknowledged
from coordinator.ledger.fence import Fenced
from coordinator.ledger.ledger import Seen
from coordinator.ledger.limits import Limits
from coordinator.ledger.record import Alias, Epoch, EpochState, Worker
from coordinator.ledger.relocation import find_excess
from coordinator.ledger.snapshot import LedgerSnapshot
from coordinator.store.api import Compare, Field, Put, StoreUnavailable, StoreUnknown, Txn
from coordinator.store.faulty import Faults
from coordinator.store.memory import Keyspace
from tests.ledger.ground import FLEET, KEYS, found, policy, record_exit, write
from tests.model.coordinator_world import DB, Coordinator, DirectStore, HostStore, Row
from tests.model.judge import Judge, JudgedKeyspace
from tests.model.server_world import Eyes, Process, Servers
from tests.model.worker_world import Worker as SimulatedWorker

SLOTS = 4
GENERATIONS = {number: (3, SLOTS, 2)[number % 3] for number in range(1, 100)}  # slots of each policy
LIMITS = {generation: Limits(slots, admin=2) for generation, slots in GENERATIONS.items()}
HOSTS = 2
WORKERS = 4
TICK_US = 10_000_000


def founded() -> Keyspace:
    """A ledger whose policy has all slots."""
    return found(SLOTS)


def published(generation: int) -> tuple[Put, Put]:
    """It is there, and active: always a later one than those before it, as sessions of theirs may be left."""
    return (Put(KEYS.policy(generation), policy(GENERATIONS[generation])),
            Put(KEYS.alias(), Alias(generation).encode()))


class World:
    """Everything that is simulated, from one seed. `make` makes a worker (a mutant's may be another)."""

    def __init__(
        self, seed: int, run_dir: Path, tamper: Callable[[Txn], Txn] | None = None,
        make: Callable[..., SimulatedWorker] = SimulatedWorker,
    ) -> None:
        self.random = Random(seed)
        self.servers = Servers(self.random)
        self.judge = Judge(seed, self.servers, LIMITS)
        self.figures = self.judge.figures
        self.rows: Counter[Row] = Counter()
        self.keyspace = JudgedKeyspace(founded(), self.judge)
        self.store = DirectStore(self.keyspace, tamper)
        self.now_us = TICK_US
        self.healing = False
        self.workers: list[SimulatedWorker] = []
        self.gone: list[SimulatedWorker] = []
        self.fenced: list[Fenced] = []  # nodes that are off for certain, and not said to be yet
        self._run_dir = run_dir
        self._make = make
        self._boots = 0
        self._depth = 0
        self._faults = Faults()
        self.between: Callable[[], Awaitable[None]] | None = None  # what may happen while a request is away
        self.coordinators = [self._coordinator(host) for host in range(HOSTS)]
        for number in range(WORKERS):
            self._boot(number % HOSTS)
        self.elect(self.coordinators[0])

    # ---- time

    def tick(self, microseconds: int = TICK_US) -> None:
        self.now_us += microseconds
        self.servers.age(self.now_us)
        for worker in self.workers:
            worker.tenants.now = self.now_us / 1_000_000

    # ---- coordinators

    def _coordinator(self, host: int, seen: Seen | None = None) -> Coordinator:
        store = HostStore(self.store, Random(self.random.random()), self._meanwhile, self.figures)
        store.faults = self._faults
        eyes = Eyes(self.servers, lambda: self.now_us, self._meets, self._meanwhile)
        return Coordinator(host, store, eyes, self._run_dir, self.rows, now_us=lambda: self.now_us,
                           terminates=self.random.random() < 0.5, seen=seen)

    def _meets(self, process: Process) -> None:
        self.judge.meets(self.keyspace, process)

    async def _meanwhile(self, chance: float) -> None:
        """Somebody else acts while a request is on its way."""
        acts = self._depth < 2 and not self.healing and self.random.random() < chance
        if acts and self.between is not None:
            self._depth += 1
            try:
                await self.between()
            finally:
                self._depth -= 1

    def replace_coordinator(self, host: int) -> None:
        """It dies and another starts, with what the run directory had."""
        old = self.coordinators[host]
        old.die()
        late, now = old.store.late, self._coordinator(host, old.ledger.seen)
        now.store.late.extend(late)  # what it had sent is still on its way
        self.coordinators[host] = now
        for worker in self.workers:
            if worker.host == host:
                worker.ledger = now.ledger
                worker.linked = False

    def elect(self, coordinator: Coordinator) -> None:
        """It leads now, whatever the one before believes."""
        leader = Leader(f"host{coordinator.host}", 1, 0)
        revision = write(self.keyspace, Put(FLEET.leader(), leader.encode()))
        coordinator.fence = Compare(FLEET.leader(), Field.MOD, revision)

    async def lead(self, coordinator: Coordinator) -> None:
        """A pass of both reapers by whoever believes to lead."""
        if coordinator.fence is None:
            self.elect(coordinator)
        assert coordinator.fence is not None
        try:
            await coordinator.lead(coordinator.fence)
        except* (StoreUnavailable, StoreUnknown):
            self.figures["passes cut short"] += 1

    def set_faults(self, faults: Faults, down: float) -> None:
        self._faults = faults
        for each in self.coordinators:
            each.store.faults, each.store.down = faults, self.random.random() < down

    # ---- workers

    def _boot(self, host: int) -> None:
        self._boots += 1
        worker = self._make(f"boot{self._boots}", host, self.servers, self.judge)
        worker.ledger = self.coordinators[host].ledger
        worker.tenants.now = self.now_us / 1_000_000
        self.workers.append(worker)
        self.register(worker)

    def bury_alive(self, worker: SimulatedWorker) -> None:
        """It dies; its successor starts at once."""
        self.workers.remove(worker)
        worker.crash()
        self.gone.append(worker)
        self._boot(worker.host)

    def bury(self, dead: SimulatedWorker) -> None:
        """What follows a death, one thing at a time and in this order or the other."""
        if dead.lease in self.keyspace.leases and self.random.random() < 0.6:
            self.store.expire(dead.lease)
        elif not dead.on_record:
            dead.on_record = True
            record_exit(self.keyspace, dead.boot_id)
        elif dead.lease in self.keyspace.leases:
            self.store.expire(dead.lease)

    def epoch(self) -> Epoch:
        return Epoch.decode(self.keyspace.entries[KEYS.epoch()].value)

    def register(self, worker: SimulatedWorker) -> None:
        """Its key is put, on a new lease where the last is over; what it knows of the epoch is in it."""
        if worker.lease not in self.keyspace.leases:
            worker.lease = self.keyspace.grant()
        self.acknowledge(worker)

    def acknowledge(self, worker: SimulatedWorker) -> None:
        epoch = self.epoch()
        worker.learn(epoch.number, serving=epoch.state is EpochState.ACTIVE)
        record = Worker(
            worker.boot_id, 0, 1, "host", "machine", "kernel", 100, 200, epochs={DB: epoch.number})
        write(self.keyspace, Put(KEYS.worker(worker.boot_id), record.encode(), worker.lease))

    def unacknowledged(self) -> list[str]:
        """Whom an advance waits for."""
        prefix = FLEET.workers()
        found = {key.rpartition("/")[2]: Worker.decode(entry.value)
                 for key, entry in self.keyspace.entries.items() if key.startswith(prefix)}
        return not_acknowledged(self.epoch().number, DB, found)

    async def hello(self, worker: SimulatedWorker) -> None:
        """It registers anew, which all that it had on its way loses to, and says which permits it has."""
        self.register(worker)
        worker.linked = False
        try:
            await worker.ledger.free_unlisted(worker.boot_id, worker.listed())
            self._tell_moves(await worker.ledger.snapshot(), worker, 1.0)
        except (StoreUnavailable, StoreUnknown):
            return
        worker.linked = KEYS.worker(worker.boot_id) in self.keyspace.entries

    def tell(self, worker: SimulatedWorker) -> None:
        """What the link brings: the epoch and the policy as they are now."""
        epoch = self.epoch()
        if (epoch.number, epoch.state is EpochState.ACTIVE) != (worker.core.epoch, worker.core.serving):
            self.acknowledge(worker)

    async def relocate(self, coordinator: Coordinator) -> None:
        """Sessions of its workers leave the slots that the policy does not have; not all hear of it."""
        try:
            snapshot = await coordinator.ledger.snapshot()
            excess = find_excess(snapshot)
            for session, move in excess.moves:
                if session.owner in self._linked(coordinator):
                    await coordinator.ledger.apply(move)
            after = await coordinator.ledger.snapshot()
        except (StoreUnavailable, StoreUnknown):
            return
        for boot_id, worker in self._linked(coordinator).items():
            self._tell_moves(after, worker, 0.7)
            worker.give_up({each.permit for each in excess.given_up if each.owner == boot_id})

    def _linked(self, coordinator: Coordinator) -> dict[str, SimulatedWorker]:
        return {each.boot_id: each for each in self.workers
                if each.host == coordinator.host and each.linked}

    def _tell_moves(self, snapshot: LedgerSnapshot, worker: SimulatedWorker, chance: float) -> None:
        for held in snapshot.of_owner(worker.boot_id):
            for former in held.session.former_permits:
                if former in worker.listed() and self.random.random() < chance:
                    worker.take(former, held.permit)

    def is_smaller(self) -> bool:
        """The policy has fewer slots than it had at first."""
        return GENERATIONS[self.generation()] < SLOTS

    def generation(self) -> int:
        """Of the policy that is active."""
        return Alias.decode(self.keyspace.entries[KEYS.alias()].value).active

    def look(self) -> LedgerSnapshot:
        """The whole, judged."""
        return self.judge.look(self.keyspace, [each.ledger.lost for each in self.coordinators])

    # ---- an end

    async def heal(self) -> None:
        """No more failures from now on; what is on its way arrives, then all slots may be used again."""
        self.healing = True
        self.set_faults(Faults(), 0.0)
        for node in self.servers.nodes.values():
            node.hidden = node.cut_off = False
        for each in self.coordinators:
            await each.store.land_late()
        now = self.generation()
        write(self.keyspace, *published(next(n for n in count(now) if GENERATIONS[n] == SLOTS)))

    def forget(self) -> None:
        """What is over; the next life starts small."""
        write(self.keyspace, Put(KEYS.alias(), Alias(1).encode()))
        gone = [KEYS.worker_exit(dead.boot_id) for dead in self.gone]
        gone += [KEYS.policy(number) for number in range(2, max(GENERATIONS)) if
                 KEYS.policy(number) in self.keyspace.entries]
        for key in (*gone, *[key for key in self.keyspace.entries if key.startswith(KEYS.receipts())]):
            write(self.keyspace, deletes=(key,))
        for worker in self.workers:
            worker.answered.clear()
        self.gone.clear()
        self.fenced.clear()
        self.keyspace.history.clear()
        self.healing = False

