"""A seeded simulation: several workers on two hosts, the Ledger's shell on a store that breaks, a server.

Where the explorer shows every interleaving of one slot, this runs the whole shell with several slots, seats
and long histories. While one request waits for the store, others run (`Interleaved`); everything is drawn
from one seed. A *round* is ACTIONS actions under one profile of faults; after ROUNDS_PER_LIFE rounds all
failures stop and every permit must come back. `python -m tests.model.simulation --rounds N --seed S`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random

import trio

from coordinator.ledger.invariants import check_ledger, check_server
from coordinator.ledger.ledger import Applied, Ledger
from coordinator.ledger.proofs import Look, Proven, proof_of_absence
from coordinator.ledger.record import Permit, Session
from coordinator.ledger.reservation import Limits
from coordinator.ledger.rules import MarkOwnerGone, Release, session_of
from coordinator.ledger.snapshot import Held, LedgerSnapshot, snapshot_from, snapshot_txn
from coordinator.ledger.states import Actor, SessionState
from coordinator.store.api import Lost, StoreUnavailable, StoreUnknown, Txn, Won
from coordinator.store.faulty import Faults, FaultyStore
from coordinator.store.memory import Keyspace, MemoryStore
from tests.ledger.ground import FLEET, KEYS, TAG, found, ledger_on, record_exit, write
from tests.model.simulated import Owner, Server

SLOTS = 4
LIMITS = {1: Limits(SLOTS, admin=2)}
HOSTS = 2
OWNERS = 4
ACTIONS = 10
ROUNDS_PER_LIFE = 20
HEAL_PASSES_MAX = 200
TICK_US = 10_000_000


class Fault(AssertionError):
    """A promise was broken; the message has the seed."""


class Judged(Keyspace):
    """The keyspace that the simulation judges: notes each move, and calls on each release."""

    def __init__(self, released: Callable[[Session], None], base: Keyspace) -> None:
        super().__init__()
        self.__dict__.update(base.__dict__)
        self.moves: Counter[tuple[SessionState, SessionState]] = Counter()
        self._released = released

    def txn(self, txn: Txn) -> Won | Lost:
        keys = [key for key in (*txn.deletes, *(put.key for put in txn.puts)) if "/session/" in key]
        before = {key: session_of(self.entries[key]) for key in keys if key in self.entries}
        outcome = super().txn(txn)
        if isinstance(outcome, Won):
            for key, old in before.items():
                entry = self.entries.get(key)
                now = session_of(entry) if entry else None
                if now is None or now.permit != old.permit:
                    self._released(old)
                self.moves[old.state, now.state if now else SessionState.RELEASED] += 1
        return outcome


class Interleaved(FaultyStore):
    """While a request is on its way, somebody else may do something."""

    def __init__(self, store: MemoryStore, random: Random, meanwhile: Callable[[], Awaitable[None]]) -> None:
        super().__init__(store, random)
        self._meanwhile = meanwhile
        self._chance = random

    async def _before(self) -> None:
        if self._chance.random() < 0.15:
            await self._meanwhile()
        await super()._before()


class Simulation:
    """One seed's run. `tamper` breaks the product on purpose, to show that the simulation notices."""

    def __init__(self, seed: int, tamper: Callable[[Txn], Txn] | None = None) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.released: set[Permit] = set()
        self.keyspace = Judged(self._on_release, found(SLOTS))
        self.store = TamperedStore(self.keyspace, tamper)
        self.server = Server(self.random)
        self.now_us = 0
        self.figures: Counter[str] = Counter()
        self._hosts = [Interleaved(self.store, Random(self.random.random()), self._meanwhile)
                       for _ in range(HOSTS)]
        self._ledgers = [ledger_on(store, home=2 * host) for host, store in enumerate(self._hosts)]
        self._boots = 0
        self._depth = 0  # of actions within actions
        self._healing = False
        self.owners: list[Owner] = []
        self._gone: list[Owner] = []
        self._first: dict[tuple[int, Permit], Look] = {}
        for number in range(OWNERS):
            self._boot(number % HOSTS)

    async def run(self, rounds: int) -> None:
        """Raises Fault with the seed."""
        for number in range(rounds):
            self._draw_faults()
            for _ in range(ACTIONS):
                await self._action()
                self._judge()
            if number % ROUNDS_PER_LIFE == ROUNDS_PER_LIFE - 1:
                await self._heal()
        await self._heal()
        self.figures["rounds"] += rounds
        self.figures["faults"] = sum(store.injected for store in self._hosts)

    # ---- what happens

    def _draw_faults(self) -> None:
        """In one of four rounds nothing fails."""
        share = self.random.choice((0.0, 0.02, 0.05, 0.15))
        for store in self._hosts:
            store.faults = Faults(*(share * self.random.random() for _ in range(4)))
            store.down = share > 0.1 and self.random.random() < 0.1

    async def _action(self) -> None:
        self.now_us += TICK_US
        self.server.age(self.now_us)
        draw = self.random.random()
        if draw < 0.70:
            await self._owner_acts()
        elif draw < 0.90:
            self.server.act()
        elif draw < 0.915:
            await self._misfortune()
        elif draw < 0.96:
            await self._sweep(self.random.choice(self._ledgers))
        else:
            host = self.random.randrange(HOSTS)
            await self._look(host, self._ledgers[host])

    async def _meanwhile(self) -> None:
        if self._depth < 2 and not self._healing:
            self._depth += 1
            try:
                await self._action()
            finally:
                self._depth -= 1

    async def _owner_acts(self) -> None:
        owner = self.random.choice(self.owners)
        if owner.acting:
            return
        owner.acting = True
        try:
            if owner.registered:
                await owner.act(self.random)
            elif self.random.random() < 0.4:  # else it is still away
                await self._return(owner)
        finally:
            owner.acting = False
        self.figures["owner actions"] += 1

    async def _misfortune(self) -> None:
        owner = self.random.choice(self.owners)
        if self.random.random() < 0.75:
            self.store.expire(owner.lease)  # paused past its lease
            owner.registered = False
            self.figures["pauses"] += 1
            if self.random.random() < 0.6:  # the sweep on the event; else the next one by level
                await self._sweep(self.random.choice(self._ledgers))
        elif not owner.acting:
            self.figures["crashes"] += 1
            self.owners.remove(owner)
            owner.crash()
            self._gone.append(owner)
            self._boot(owner.host)
        for dead in self._gone:
            if self.random.random() < 0.5:
                self._bury(dead)

    def _bury(self, dead: Owner) -> None:
        """What follows a death, in any order and at any time."""
        if dead.lease in self.keyspace.leases:
            self.store.expire(dead.lease)
        elif KEYS.worker_exit(dead.boot_id) not in self.keyspace.entries:
            record_exit(self.keyspace, dead.boot_id)

    def _boot(self, host: int) -> None:
        self._boots += 1
        owner = Owner(f"boot{self._boots}", host, self._ledgers[host], self.server)
        self.owners.append(owner)
        owner.register(self.keyspace)

    async def _return(self, owner: Owner) -> None:
        """Registers again and says hello before anything else."""
        owner.register(self.keyspace)
        owner.registered = False
        try:
            await owner.ledger.free_unlisted(owner.boot_id, owner.listed())
        except (StoreUnavailable, StoreUnknown):
            return
        owner.registered = KEYS.worker(owner.boot_id) in self.keyspace.entries

    # ---- reapers

    async def _sweep(self, ledger: Ledger) -> None:
        """The owner reaper, by level."""
        try:
            snapshot = await ledger.snapshot()
        except StoreUnavailable:
            return
        for held in snapshot.sessions:
            if held.session.owner not in snapshot.workers:
                await ledger.apply(MarkOwnerGone(held.permit))

    async def _look(self, host: int, ledger: Ledger) -> None:
        """The backend reaper: looks, proves, releases."""
        try:
            snapshot = await ledger.snapshot()
        except StoreUnavailable:
            return
        for held in snapshot.sessions:
            if held.session.state is SessionState.UNKNOWN:
                await self._look_at(host, ledger, snapshot, held)

    async def _look_at(self, host: int, ledger: Ledger, snapshot: LedgerSnapshot, held: Held) -> None:
        died = snapshot.exits.get(held.session.owner)
        look = self.server.look(self.now_us)
        key = (host, held.permit)
        answer = proof_of_absence(held.session, look, ledger_tag=TAG, owner_known_dead=died is not None,
                                  first=self._first.get(key))
        if isinstance(answer, Proven):
            done = await ledger.apply(Release(
                held.permit, answer.proof, Actor.BACKEND_REAPER, "look", held.mod_revision,
                died.mod_revision if died else 0))
            if isinstance(done, Applied) and done.changed:
                self.figures[f"released by {answer.proof}"] += 1
        elif any(row.application_name == held.permit.birth_tag(TAG) for row in look.rows):
            self._first.pop(key, None)
        elif (died is not None or held.session.abandoned) and not held.session.pid:
            self._first.setdefault(key, look)

    # ---- judging

    def _on_release(self, session: Session) -> None:
        if session.permit in self.released:
            raise Fault(f"seed {self.seed}: {session.permit} was released twice")
        if self.server.lives(session.permit):
            raise Fault(f"seed {self.seed}: {session.permit} was released while its session lives")
        self.released.add(session.permit)
        self.figures["releases"] += 1

    def _snapshot(self) -> LedgerSnapshot:
        outcome = self.keyspace.txn(snapshot_txn(KEYS, FLEET))
        assert isinstance(outcome, Lost)
        return snapshot_from(outcome.reads, outcome.revision, LIMITS)

    def _judge(self) -> None:
        snapshot = self._snapshot()
        beside = check_server(snapshot, self.server.rows())
        broken = [*check_ledger(snapshot, KEYS),  # a session that just ended is not one too few
                  *(each for each in beside if each.what != "permit_without_session")]
        if broken:
            raise Fault(f"seed {self.seed}: {'; '.join(map(str, broken))}")
        if self.server.count() > SLOTS:
            raise Fault(f"seed {self.seed}: {self.server.count()} sessions on {SLOTS} slots")
        lost = sum(owner.permits_gone for owner in (*self.owners, *self._gone))
        if lost:
            raise Fault(f"seed {self.seed}: {lost} workers found the permit of a live session gone")

    async def _heal(self) -> None:
        """No more failures: every permit comes back."""
        self._healing = True
        for store in self._hosts:
            store.faults, store.down = Faults(), False
            await store.land_late()
            self._judge()
        for _ in range(HEAL_PASSES_MAX):
            if self._is_healed():
                self.figures["healed"] += 1
                self._forget()
                self._healing = False
                return
            await self._heal_pass()
            self._judge()
        standing = ", ".join(str(held.session) for held in self._snapshot().sessions)
        raise Fault(f"seed {self.seed}: never came back: {standing}")

    async def _heal_pass(self) -> None:
        self.now_us += 200_000_000
        self.server.settle()
        for dead in self._gone:
            self._bury(dead)
        for owner in self.owners:
            if not owner.registered:
                await self._return(owner)
            else:
                await owner.finish()
        await self._sweep(self._ledgers[0])
        await self._look(0, self._ledgers[0])

    def _is_healed(self) -> bool:
        return not (self._snapshot().sessions or self.server.count()
                    or any(owner.busy for owner in self.owners)
                    or any(dead.lease in self.keyspace.leases for dead in self._gone))

    def _forget(self) -> None:
        """Exit records and receipts of what is over; the next life starts small."""
        gone = [KEYS.worker_exit(dead.boot_id) for dead in self._gone]
        receipts = [key for key in self.keyspace.entries if key.startswith(KEYS.receipts())]
        for key in (*gone, *receipts):
            write(self.keyspace, deletes=(key,))
        self._gone.clear()
        self._first.clear()
        self.keyspace.history.clear()


class TamperedStore(MemoryStore):
    """The memory store, for mutants with changed transactions."""

    def __init__(self, keyspace: Keyspace, tamper: Callable[[Txn], Txn] | None) -> None:
        super().__init__(keyspace)
        self._tamper = tamper or (lambda txn: txn)

    async def txn(self, txn: Txn) -> Won | Lost:
        return await super().txn(self._tamper(txn))


def simulate(rounds: int, seed: int, tamper: Callable[[Txn], Txn] | None = None) -> Counter[str]:
    """Run it; the figures. Raises Fault."""
    simulation = Simulation(seed, tamper)
    trio.run(simulation.run, rounds)
    for (source, target), count in simulation.keyspace.moves.items():
        simulation.figures[f"{source} to {target}"] = count
    return simulation.figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    options = parser.parse_args()
    sys.stdout.write(f"seed {options.seed}\n")
    for name, count in sorted(simulate(options.rounds, options.seed).items()):
        sys.stdout.write(f"{count:>9}  {name}\n")


if __name__ == "__main__":
    main()
