"""Workers that share one token bucket through the real transactions, and all that can go wrong between.

`Rules` are the product's; each mutant leaves one of them out. Time is exact (fractions), moved by the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random

from coordinator.ledger.buckets import (
    UNIT,
    BucketPool,
    BucketShare,
    Held,
    HeldPool,
    Part,
    create_txn,
    give_txn,
    return_txn,
    take_txn,
    to_give,
    to_take,
)
from coordinator.ledger.record import WorkerExit
from coordinator.store.api import Put, Txn, Won
from coordinator.store.memory import Keyspace
from pooler.admission.bucket_share import BucketPart
from pooler.admission.token_bucket import TokenBucket
from tests.ledger.ground import KEYS, write

F = Fraction
BUCKET, COST = "tenant=a", UNIT
NOTHING = F(0)


class Rules:
    """How a worker acts on a move."""

    first_level = NOTHING

    def begin_give(
        self, part: BucketPart[Fraction], burst: Fraction, rate: Fraction, now: Fraction
    ) -> Fraction:
        return part.begin_give(burst, rate, now)

    def begin_take(self, part: BucketPart[Fraction], moved: Part, now: Fraction) -> None:
        part.begin_take(F(moved.burst, UNIT), F(moved.rate, UNIT), F(moved.tokens, UNIT))

    def unanswered(self, part: BucketPart[Fraction], now: Fraction) -> None:
        """It stays taken."""


@dataclass(eq=False)
class Node:
    """One worker process; `tried`: the transaction of its move, to be tried again."""

    boot_id: str
    registered: int
    part: BucketPart[Fraction]
    tried: Txn | None = None
    lives: bool = True


@dataclass
class World:
    burst: int = 3
    rate: int = 2
    count: int = 4
    rules: Rules = field(default_factory=Rules)
    now: Fraction = NOTHING
    keyspace: Keyspace = field(default_factory=Keyspace)
    nodes: list[Node] = field(default_factory=list)
    late: list[Txn] = field(default_factory=list)  # sent, and not carried out yet
    admitted: list[Fraction] = field(default_factory=list)
    dead: list[Node] = field(default_factory=list)
    boots: int = 0

    def __post_init__(self) -> None:
        done = self.keyspace.txn(create_txn(KEYS, BUCKET, self.burst * UNIT, self.rate * UNIT, is_full=True))
        assert isinstance(done, Won)
        self.nodes = [self.boot() for _ in range(self.count)]

    def boot(self) -> Node:
        self.boots += 1
        boot_id = f"boot{self.boots}"
        registered = write(self.keyspace, Put(KEYS.worker(boot_id), b"lives"))
        node = Node(boot_id, registered, BucketPart(NOTHING, self.now))
        if self.rules.first_level:
            node.part.bucket = TokenBucket(F(self.rate), F(self.burst), self.rules.first_level, self.now)
        return node

    # ---- what stands

    def pool(self) -> HeldPool:
        entry = self.keyspace.entries[KEYS.bucket_pool(BUCKET)]
        return HeldPool(BucketPool.decode(entry.value), entry.mod_revision)

    def held(self, node: Node) -> Held:
        entry = self.keyspace.entries.get(KEYS.bucket(BUCKET, node.boot_id))
        if entry is None:
            return Held(BucketShare())
        return Held(BucketShare.decode(entry.value), entry.mod_revision)

    # ---- steps

    def wait(self, seconds: Fraction) -> None:
        self.now += seconds

    def ask(self, node: Node) -> bool:
        """One transaction of a client."""
        admitted = node.lives and node.part.admit(F(COST, UNIT), self.now)
        if admitted:
            self.admitted.append(self.now)
        return admitted

    def take(self, node: Node, how: str = "answered") -> None:
        held, pool = self.held(node), self.pool()
        moved = to_take(held.share, pool.pool, COST)
        if node.part.move is None and node.tried is None and node.lives and moved is not None:
            self.rules.begin_take(node.part, moved, self.now)
            node.tried = take_txn(KEYS, BUCKET, node.boot_id, node.registered, held, pool, moved)
            self.send(node, how)

    def give(self, node: Node, how: str = "answered", *, is_idle: bool = False, askers: int = 1) -> None:
        held, pool = self.held(node), self.pool()
        given = to_give(held.share, COST, askers, is_idle=is_idle)
        if node.part.move is None and node.tried is None and node.lives and given is not None:
            burst, rate = given
            tokens = self.rules.begin_give(node.part, F(burst, UNIT), F(rate, UNIT), self.now)
            whole = int(tokens * UNIT)  # what is no whole millionth is lost
            node.tried = give_txn(KEYS, BUCKET, node.boot_id, held, pool, Part(burst, rate, whole))
            self.send(node, how)

    def send(self, node: Node, how: str) -> None:
        """`answered`; or unanswered: carried out `now`, `later` (perhaps), or `never`."""
        assert node.tried is not None
        if how == "answered":
            done = self.keyspace.txn(node.tried)
            if isinstance(done, Won):
                node.tried = None
                node.part.won(self.now)
            else:
                self.read(node, has_changed=True)
            return
        if how == "now":
            self.keyspace.txn(node.tried)
        elif how == "later":
            self.late.append(node.tried)
        self.rules.unanswered(node.part, self.now)

    def read(self, node: Node, *, has_changed: bool) -> None:
        if node.part.read(self.held(node).share.moves, has_changed=has_changed, now=self.now):
            node.tried = None

    def settle(self, node: Node, how: str = "answered") -> None:
        """Look whether an unanswered move came to be; if nothing tells, try it again."""
        if node.lives and node.tried is not None:
            revisions = {each.key: each.revision for each in node.tried.compares}
            held, pool = self.held(node), self.pool()
            changed = (held.mod_revision != revisions[KEYS.bucket(BUCKET, node.boot_id)]
                       or pool.mod_revision != revisions[KEYS.bucket_pool(BUCKET)])
            self.read(node, has_changed=changed)
            if node.tried is not None:
                self.send(node, how)

    def arrive(self) -> None:
        """A late write is carried out, if it still can be."""
        if self.late:
            self.keyspace.txn(self.late.pop(0))

    def crash(self, node: Node) -> None:
        """Its process is gone, and another takes its place."""
        if node.lives:
            node.lives = False
            self.dead.append(node)
            self.nodes[self.nodes.index(node)] = self.boot()

    def bury(self) -> None:
        """A dead process is known dead, its lease is over, and what it had goes back."""
        if self.dead:
            node = self.dead.pop(0)
            exit_record = WorkerExit(node.boot_id, "signal 9", "test", 0)
            exited = write(self.keyspace, Put(KEYS.worker_exit(node.boot_id), exit_record.encode()),
                           deletes=(KEYS.worker(node.boot_id),))
            held = self.held(node)
            if held.mod_revision:
                done = self.keyspace.txn(return_txn(KEYS, BUCKET, node.boot_id, exited, held, self.pool()))
                assert isinstance(done, Won)

    # ---- what must hold

    def check(self) -> None:
        pool = self.pool().pool
        shares = [BucketShare.decode(entry.value) for key, entry in self.keyspace.entries.items()
                  if key.startswith(KEYS.buckets()) and not key.endswith("/pool")]
        assert pool.burst + sum(each.burst for each in shares) == self.burst * UNIT
        assert pool.rate + sum(each.rate for each in shares) == self.rate * UNIT
        assert all(each.burst == 0 or each.burst >= COST for each in shares)
        for node in self.nodes:
            assert 0 <= node.part.bucket.settle(self.now) <= node.part.bucket.burst

    def broken(self) -> str:
        """An interval in which more was admitted than B + r·t, or nothing."""
        for first, since in enumerate(self.admitted):
            for count, until in enumerate(self.admitted[first:], 1):
                if count > self.burst + self.rate * (until - since):
                    return f"{count} in {until - since} s"
        return ""


HOWS = ("answered", "answered", "now", "later", "never")


def step(world: World, random: Random) -> None:
    """One that chance picks."""
    node = random.choice(world.nodes)
    steps: list[Callable[[], object]] = [
        lambda: world.wait(F(random.randint(0, 8), 8)),
        lambda: world.ask(node), lambda: world.ask(node), lambda: world.ask(node),
        lambda: world.take(node, random.choice(HOWS)), lambda: world.take(node, random.choice(HOWS)),
        lambda: world.give(node, random.choice(HOWS), is_idle=random.random() < 0.5),
        lambda: world.give(node, random.choice(HOWS), is_idle=random.random() < 0.5),
        lambda: world.settle(node, random.choice(HOWS)), lambda: world.settle(node, random.choice(HOWS)),
        world.arrive, world.bury,
        lambda: world.crash(node) if random.random() < 0.2 else None,
    ]
    random.choice(steps)()


def hunt(rules: Rules, seeds: range, steps: int = 120) -> str:
    """The first way in which the bound is broken; or nothing."""
    for seed in seeds:
        world, random = World(rules=rules), Random(seed)
        for _ in range(steps):
            step(world, random)
        found = world.broken()
        if found:
            return f"seed {seed}: {found}"
    return ""
