"""A seeded simulation: workers on two hosts with tickets of four tenants, two coordinators, two servers.

Where the explorer shows every interleaving of few requests, this runs the production Ledger, both reapers
and the pool core with several slots, seats and long histories on a store that breaks. While one request
waits for the store, others run; everything is drawn from one seed. A *round* is TICKETS tickets, ACTIONS
actions and, in three rounds of four, a fault; after ROUNDS_PER_LIFE rounds all failures stop, every ticket
must end and every permit come back. `python -m tests.model.simulation --rounds N --seed S` runs shards of
SHARD_ROUNDS over processes, each with a seed of its own that repeats it: `--rounds 1000 --seed THAT`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import structlog
import trio

from coordinator.ledger.record import Record
from coordinator.ledger.states import MOVES
from coordinator.store.api import Txn
from coordinator.store.faulty import Faults
from tests.model.coordinator_world import CoordinatorDied
from tests.model.faults import FAULTS, fencing_is_confirmed, name
from tests.model.judge import Fault
from tests.model.tenants import TENANTS, balance
from tests.model.worker_world import Worker
from tests.model.world import World

TICKETS = 8
ACTIONS = 8
ROUNDS_PER_LIFE = 25
SHARD_ROUNDS = 1_000
FAULTS_OF_A_LIFE = 5
HEAL_PASSES_MAX = 200
HEAL_TICK_US = 200_000_000


class Simulation:
    """One seed's run. `tamper` and `make` break the product on purpose, to show that it is noticed."""

    def __init__(
        self, seed: int, run_dir: Path, tamper: Callable[[Txn], Txn] | None = None,
        make: Callable[..., Worker] = Worker,
    ) -> None:
        self.world = World(seed, run_dir, tamper, make)
        self.world.between = self._between
        self.figures = self.world.figures
        self._draw_life()

    def _draw_life(self) -> None:
        """Not everything happens in every life: what would end a story early leaves others room."""
        random = self.world.random
        self._faults = random.sample(FAULTS, FAULTS_OF_A_LIFE)
        self._lands = random.choice((0.002, 0.03, 0.3))  # how soon a late write arrives
        self._late = random.choice((0.0, 0.0, 0.15))  # how many there are, at least

    async def run(self, rounds: int) -> None:
        """Raises Fault with the seed."""
        for number in range(rounds):
            await self._round()
            self.world.look()
            if number % ROUNDS_PER_LIFE == ROUNDS_PER_LIFE - 1:
                await self._heal()
                self._draw_life()
        await self._heal()
        self.figures["rounds"] += rounds
        if balance(self.figures, 0):
            raise self.world.judge.broken(f"I6: {balance(self.figures, 0)} granted tickets have no end")

    async def _round(self) -> None:
        world, random = self.world, self.world.random
        share = random.choice((0.0, 0.02, 0.05, 0.15))
        faults = Faults(*(share * random.random() for _ in range(4)))
        late = max(faults.unknown_late, self._late)
        world.set_faults(replace(faults, unknown_late=late, lands=self._lands), 0.1 if share > 0.1 else 0.0)
        for number in range(TICKETS):
            random.choice(world.workers).tenants.ask(TENANTS[number % len(TENANTS)])
        fault_at = random.randrange(ACTIONS) if random.random() < 0.75 else -1
        for number in range(ACTIONS):
            if number == fault_at:
                await self._fault()
            await self._action()

    # ---- what happens

    async def _may_die(self, doing: object) -> None:
        """Something that a coordinator's death ends."""
        try:
            await doing  # type: ignore[misc]
        except* CoordinatorDied:
            self.figures["answers lost with a coordinator"] += 1

    async def _fault(self) -> None:
        fault = self.world.random.choice(self._faults)
        self.figures[name(fault)] += 1
        await self._may_die(fault(self.world))

    async def _between(self) -> None:
        """What somebody else does while a request is on its way."""
        if self.world.random.random() < 0.1:
            await self._fault()
        else:
            await self._action()

    async def _action(self) -> None:
        world, random = self.world, self.world.random
        world.tick()
        draw = random.random()
        if draw < 0.70:
            await self._worker_acts(random.choice(world.workers))
        elif draw < 0.88:
            world.servers.act()
        elif draw < 0.91:
            self._time_heals()
        elif draw < 0.94:
            await self._may_die(fencing_is_confirmed(world))
        else:
            await self._may_die(world.lead(random.choice(world.coordinators)))

    async def _worker_acts(self, worker: Worker) -> None:
        if worker.acting:
            return
        worker.acting = True
        worker.tenants.expire()
        try:
            if not worker.linked:
                if self.world.random.random() < 0.4:  # else it is still away
                    await self._may_die(self.world.hello(worker))
                    if self.world.random.random() < 0.5:
                        worker.close_all()
            else:
                self.world.tell(worker)
                if self.world.is_smaller() and self.world.random.random() < 0.2:
                    await self._may_die(self.world.relocate(self.world.coordinators[worker.host]))
                await self._may_die(worker.act(self.world.random))
        finally:
            worker.acting = False

    def _time_heals(self) -> None:
        """What was broken is seen to, one thing at a time."""
        for node in self.world.servers.nodes.values():
            node.hidden = node.hidden and self.world.random.random() < 0.5
            node.cut_off = node.cut_off and self.world.random.random() < 0.5
        for dead in self.world.gone:
            self.world.bury(dead)

    # ---- an end

    async def _heal(self) -> None:
        """No more failures: every ticket ends, every permit comes back, whatever happened."""
        world = self.world
        await world.heal()
        for _ in range(HEAL_PASSES_MAX):
            snapshot = world.look()
            busy = any(worker.busy or not worker.linked for worker in world.workers)
            unburied = any(dead.lease in world.keyspace.leases for dead in world.gone)
            if not (snapshot.sessions or world.servers.count() or busy or unburied or world.unacknowledged()):
                self.figures["lives healed"] += 1
                world.forget()
                return
            await self._heal_pass()
        standing = ", ".join(str(held.session) for held in world.judge.snapshot(world.keyspace).sessions)
        raise world.judge.broken(f"never came back: {standing or 'a ticket or a session'}")

    async def _heal_pass(self) -> None:
        world = self.world
        world.tick(HEAL_TICK_US)
        world.servers.settle()
        for dead in world.gone:
            world.bury(dead)
        for worker in world.workers:
            if not worker.linked:
                await world.hello(worker)
            else:
                world.tell(worker)
                await worker.finish()
        leader = world.coordinators[0]
        world.elect(leader)
        await world.lead(leader)


@contextmanager
def quiet_and_quick() -> Iterator[None]:
    """Nothing is logged, and what a stored value means is remembered: decoding is pure."""
    before, decode = structlog.get_config(), Record.__dict__["decode"]
    remembered = cache(decode.__func__)

    def decode_once(cls: type[Record], raw: bytes) -> Any:
        return remembered(cls, raw)  # type: ignore[arg-type] # a class can be hashed

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    setattr(Record, "decode", classmethod(decode_once))  # noqa: B010 - a method, as mypy sees it
    try:
        yield
    finally:
        setattr(Record, "decode", decode)  # noqa: B010
        structlog.configure(**before)


@contextmanager
def seeded_scheduler(seed: int) -> Iterator[None]:
    """Tasks that could go on at the same time do so in an order that hangs on the seed alone.

    These switches of trio's are private; the test that one seed repeats one run fails when they change.
    """
    run: Any = sys.modules["trio._core._run"]
    allowed, state = run._ALLOW_DETERMINISTIC_SCHEDULING, run._r.getstate()
    run._ALLOW_DETERMINISTIC_SCHEDULING = True
    run._r.seed(seed)
    try:
        yield
    finally:
        run._ALLOW_DETERMINISTIC_SCHEDULING = allowed
        run._r.setstate(state)


def simulate(
    rounds: int, seed: int, tamper: Callable[[Txn], Txn] | None = None, make: Callable[..., Worker] = Worker
) -> Counter[str]:
    """Run it; the figures. Raises Fault."""
    with quiet_and_quick(), tempfile.TemporaryDirectory() as run_dir:
        simulation = Simulation(seed, Path(run_dir), tamper, make)
        try:
            with seeded_scheduler(seed):
                trio.run(simulation.run, rounds)
        except BaseExceptionGroup as group:  # what is raised in an `except*` comes out as a group again
            raise _fault_in(group) or group from None
    figures = simulation.figures
    for (source, target, actor), count in simulation.world.rows.items():
        figures[row(source, target, actor)] = count
    return figures


def _fault_in(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """The first fault that was found; None where something else went wrong."""
    found: BaseException | None = group.subgroup(Fault)
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


def row(source: str, target: str, actor: str) -> str:
    """How a row of the table of states is called in the figures."""
    return f"row: {source} to {target} by {actor}"


ROWS = tuple(row(move.source, move.target, move.actor) for move in MOVES)
FAULT_NAMES = tuple(sorted({name(fault) for fault in FAULTS} | {
    "fault: store unavailable", "fault: outcome unknown, applied", "fault: outcome unknown, not applied",
    "fault: outcome unknown, late", "fault: request repeated", "fault: command repeated",
    "fault: connect silent", "fault: session reset"}))


def seeds(rounds: int, seed: int) -> list[int]:
    """One for each shard."""
    return [seed + number for number in range(-(-rounds // SHARD_ROUNDS))]


def _shard(seed: int) -> Counter[str]:
    began = time.process_time()
    figures = simulate(SHARD_ROUNDS, seed)
    figures["milliseconds of a processor"] += int((time.process_time() - began) * 1_000)
    return figures


def simulate_shards(rounds: int, seed: int, processes: int) -> Counter[str]:
    """At least `rounds` rounds, over so many processes; the sum of all figures. Raises Fault."""
    if processes == 1 and rounds <= SHARD_ROUNDS:
        return simulate(rounds, seed)
    total: Counter[str] = Counter()
    with get_context("forkserver").Pool(processes) as pool:
        for figures in pool.imap_unordered(_shard, seeds(rounds, seed)):
            total.update(figures)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000_000)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    sys.stdout.write(f"seed {options.seed}\n")
    figures = simulate_shards(options.rounds, options.seed, options.processes)
    for what in sorted({*figures, *ROWS, *FAULT_NAMES}):
        sys.stdout.write(f"{figures[what]:>9}  {what}\n")


if __name__ == "__main__":
    main()
