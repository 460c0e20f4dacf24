"""Token buckets of a whole fleet in etcd: which part of each a worker has, and how a part moves.

Pure. A bucket of `burst` and `rate` is split over its workers and a pool; all parts together are the whole at
every revision. Only parts are written here: how full a worker's part is, it knows alone, and a part in the
pool does not fill. Every move is one transaction that compares the pool and the worker's part, and counts
itself in the part (`moves`), so that who had no answer can read whether it came to be.

What a worker gives back it has stopped using before the transaction is sent; what it takes it uses only once
it knows that the transaction was won. A part of a process that is known dead goes back without its tokens. So
no interval t of the whole fleet admits more than burst + rate · t. Numbers are whole millionths: they add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from coordinator.ledger.keys import DbKeys, only
from coordinator.ledger.record import Record
from coordinator.store.api import Compare, Field, Put, Txn, absent, unchanged

UNIT = 1_000_000  # of a token, and of a token a second


class Part(NamedTuple):
    """What moves: of the capacity, of the rate, and tokens. Below 0: back to the pool."""

    burst: int
    rate: int
    tokens: int


@dataclass(frozen=True, slots=True)
class BucketShare(Record):
    """`bucket/<db>/<bucket>/<boot id>`: what one worker has; `moves`: how often that changed."""

    name: ClassVar[str] = "bucket"

    burst: int = 0
    rate: int = 0
    moves: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def check(self) -> None:
        if min(self.burst, self.rate, self.moves) < 0:
            raise ValueError("a share is below 0")


@dataclass(frozen=True, slots=True)
class BucketPool(Record):
    """`bucket/<db>/<bucket>/pool`: what no worker has. `burst` or `rate` below 0: the bucket was made
    smaller, and so much is to come back before anything is given."""

    name: ClassVar[str] = "bucket_pool"

    burst: int
    rate: int
    tokens: int
    burst_total: int
    rate_total: int
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def check(self) -> None:
        if not 0 <= self.tokens <= max(0, self.burst):
            raise ValueError(f"{self.tokens} tokens where {self.burst} fit")
        if self.burst > self.burst_total or self.rate > self.rate_total:
            raise ValueError("the pool has more than there is")

    def less(self, part: Part) -> BucketPool:
        """Without what is taken, or (below 0) with what comes back; tokens that do not fit are lost."""
        burst = self.burst - part.burst
        return replace(self, burst=burst, rate=self.rate - part.rate,
                       tokens=min(self.tokens - part.tokens, max(0, burst)))

    def resized(self, burst: int, rate: int) -> BucketPool:
        """The bucket has another size by now; it does not fill."""
        left = self.burst + burst - self.burst_total
        return replace(self, burst=left, rate=self.rate + rate - self.rate_total,
                       tokens=min(self.tokens, max(0, left)), burst_total=burst, rate_total=rate)


class Held(NamedTuple):
    """A worker's share as it was read; revision 0: there is none."""

    share: BucketShare
    mod_revision: int = 0


class HeldPool(NamedTuple):
    """The pool as it was read."""

    pool: BucketPool
    mod_revision: int


def create_txn(keys: DbKeys, bucket: str, burst: int, rate: int, *, is_full: bool) -> Txn:
    """Makes a bucket where there is none: full once, or empty."""
    key = keys.bucket_pool(bucket)
    pool = BucketPool(burst, rate, burst if is_full else 0, burst, rate)
    return Txn((absent(key),), (Put(key, pool.encode()),), reads=(only(key),))


def resize_txn(keys: DbKeys, bucket: str, held: HeldPool, burst: int, rate: int) -> Txn | None:
    """What a new policy comes to; None where nothing changes."""
    if (burst, rate) == (held.pool.burst_total, held.pool.rate_total):
        return None
    key = keys.bucket_pool(bucket)
    return Txn((unchanged(key, held.mod_revision),), (Put(key, held.pool.resized(burst, rate).encode()),),
               reads=(only(key),))


def take_txn(
    keys: DbKeys, bucket: str, boot_id: str, registered: int, held: Held, pool: HeldPool, part: Part
) -> Txn:
    """Gives `part` to a worker, whose key was created at `registered`. Raises ValueError for what the pool
    does not have."""
    there = pool.pool
    if (min(part) < 0 or part.burst > there.burst or part.rate > there.rate
            or part.tokens > min(there.tokens, part.burst)):
        raise ValueError(f"{part} of {there}")
    worker = Compare(keys.worker(boot_id), Field.CREATE, registered)
    return _move(keys, bucket, boot_id, held, pool, part, worker)


def give_txn(keys: DbKeys, bucket: str, boot_id: str, held: Held, pool: HeldPool, part: Part) -> Txn:
    """Takes `part` back, which its worker uses no more. Raises ValueError for what it does not have."""
    share = held.share
    if min(part) < 0 or part.burst > share.burst or part.rate > share.rate or part.tokens > part.burst:
        raise ValueError(f"{part} of {share}")
    return _move(keys, bucket, boot_id, held, pool, Part(*(-each for each in part)))


def return_txn(
    keys: DbKeys, bucket: str, boot_id: str, exited: int, held: Held, pool: HeldPool
) -> Txn:
    """What a process had that is known dead (that was written at `exited`) goes back, without tokens."""
    key, share = keys.bucket(bucket, boot_id), held.share
    after = pool.pool.less(Part(-share.burst, -share.rate, 0))
    pool_key = keys.bucket_pool(bucket)
    return Txn((unchanged(key, held.mod_revision), unchanged(pool_key, pool.mod_revision),
                unchanged(keys.worker_exit(boot_id), exited), absent(keys.worker(boot_id))),
               (Put(pool_key, after.encode()),), (key,), reads=(only(key), only(pool_key)))


def _move(
    keys: DbKeys, bucket: str, boot_id: str, held: Held, pool: HeldPool, part: Part, *more: Compare
) -> Txn:
    key, pool_key, share = keys.bucket(bucket, boot_id), keys.bucket_pool(bucket), held.share
    after = replace(share, burst=share.burst + part.burst, rate=share.rate + part.rate, moves=share.moves + 1)
    as_read = unchanged(key, held.mod_revision) if held.mod_revision else absent(key)
    return Txn((as_read, unchanged(pool_key, pool.mod_revision), *more),
               (Put(key, after.encode()), Put(pool_key, pool.pool.less(part).encode())),
               reads=(only(key), only(pool_key)))


# ---- how much moves


def to_take(share: BucketShare, pool: BucketPool, dearest: int) -> Part | None:
    """What a worker takes that lacks tokens: all that the pool has, if it can pay the dearest cost then."""
    if min(pool.burst, pool.rate) < 0 or share.burst + pool.burst < dearest or not pool.burst:
        return None
    return Part(pool.burst, pool.rate, pool.tokens)


def to_give(share: BucketShare, dearest: int, askers: int, *, is_idle: bool) -> tuple[int, int] | None:
    """How much of its capacity and its rate a worker gives back when so many others ask: all if it is idle,
    else what is above an even part; it keeps nothing or what pays the dearest cost. None: nothing."""
    kept = 0 if is_idle else max(dearest, share.burst // (askers + 1))
    given = share.burst - kept
    if given <= 0:
        return None
    return given, share.rate * given // share.burst if kept else share.rate
