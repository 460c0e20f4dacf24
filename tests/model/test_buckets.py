"""A bucket that workers share admits what one would, whatever becomes of its parts and their messages."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ledger.buckets import (
    UNIT,
    BucketPool,
    BucketShare,
    Part,
    create_txn,
    resize_txn,
    to_give,
    to_take,
)
from coordinator.store.api import Lost
from pooler.admission.bucket_share import BucketPart
from pooler.admission.token_bucket import TokenBucket
from tests.ledger.ground import KEYS
from tests.model.bucket_world import BUCKET, F, Rules, World, hunt, step


def test_four_workers_that_share_one_bucket_of_three_admit_three_at_once() -> None:
    world = World()
    for _ in range(3):
        for node in world.nodes:
            for other in world.nodes:
                world.give(other, is_idle=other is not node)
            world.take(node)
            world.ask(node)
            world.check()
    assert len(world.admitted) == 3
    assert not any(world.ask(node) for node in world.nodes)


def test_an_idle_bucket_gathers_at_the_worker_that_asks() -> None:
    world = World()
    world.take(world.nodes[0])
    assert all(world.ask(world.nodes[0]) for _ in range(3))
    world.wait(F(3, 2))
    world.give(world.nodes[0], is_idle=True)
    world.take(world.nodes[1])
    assert [world.ask(world.nodes[1]) for _ in range(4)] == [True, True, True, False]
    assert not world.ask(world.nodes[0])
    world.check()


def test_a_worker_that_is_started_again_has_nothing_and_the_part_of_the_dead_one_comes_back_empty() -> None:
    world = World()
    world.take(world.nodes[0])
    world.crash(world.nodes[0])
    fresh = world.nodes[0]
    world.take(fresh)
    assert not world.ask(fresh)
    world.bury()
    world.check()
    world.take(fresh)
    assert not world.ask(fresh)
    world.wait(F(1, 2))
    assert world.ask(fresh)


@pytest.mark.parametrize("what", ["take", "give"])
def test_a_move_without_an_answer_stays_taken_until_it_is_read(what: str) -> None:
    world = World()
    node = world.nodes[0]
    if what == "take":
        world.take(node, "later")
        assert not world.ask(node)
        world.arrive()
        assert not world.ask(node)
        world.settle(node)
        assert world.ask(node)
    else:
        world.take(node)
        world.give(node, "never", is_idle=True)
        assert not world.ask(node)
        world.take(world.nodes[1])
        assert not world.ask(world.nodes[1])
        world.settle(node, "answered")
        world.take(world.nodes[1])
        assert world.ask(world.nodes[1])
    world.check()


def test_a_move_that_can_never_come_to_be_is_undone() -> None:
    world = World()
    giver = world.nodes[0]
    world.take(giver)
    world.give(giver, "never", is_idle=True)
    world.give(giver, "never", is_idle=True)
    other = world.nodes[1]
    world.keyspace.txn(resize_txn(KEYS, BUCKET, world.pool(), 5 * UNIT, 2 * UNIT) or pytest.fail("nothing"))
    world.settle(giver)
    assert world.ask(giver)
    world.take(other)
    assert not world.ask(other)


@given(st.integers(0, 2**32))
def test_whatever_happens_no_interval_admits_more_than_the_whole(seed: int) -> None:
    world, random = World(), Random(seed)
    for _ in range(100):
        step(world, random)
        world.check()
    assert world.broken() == ""


def test_once_all_is_settled_everything_can_gather_at_one_worker() -> None:
    for seed in range(50):
        world, random = World(), Random(seed)
        for _ in range(80):
            step(world, random)
        while world.late or world.dead:
            world.arrive()
            world.bury()
        for node in world.nodes:
            while node.tried is not None:
                world.settle(node)
            world.give(node, is_idle=True)
        world.take(world.nodes[0])
        world.check()
        assert (world.held(world.nodes[0]).share.burst, world.pool().pool.burst) == (3 * UNIT, 0)
        world.wait(F(10))
        assert [world.ask(world.nodes[0]) for _ in range(4)] == [True, True, True, False]


class StartsFull(Rules):
    first_level = F(3)


class GivesAndGoesOn(Rules):
    """Uses what it gives back until it has the answer."""

    def begin_give(
        self, part: BucketPart[Fraction], burst: Fraction, rate: Fraction, now: Fraction
    ) -> Fraction:
        bucket = part.bucket
        kept = (bucket.rate, bucket.burst, bucket.settle(now))
        tokens: Fraction = part.begin_give(burst, rate, now)
        part.bucket = TokenBucket(*kept, now)
        return tokens


class TakesBeforeTheAnswer(Rules):
    def begin_take(self, part: BucketPart[Fraction], moved: Part, now: Fraction) -> None:
        super().begin_take(part, moved, now)
        bucket = part.bucket
        bucket.resize(bucket.rate + F(moved.rate, UNIT), bucket.burst + F(moved.burst, UNIT), now)
        part.bucket.add(F(moved.tokens, UNIT), now)


class TakesUnansweredForLost(Rules):
    def unanswered(self, part: BucketPart[Fraction], now: Fraction) -> None:
        part.lost(now)


class KeepsTokensThatDoNotFit(Rules):
    """Tells of all tokens of the old cap and keeps them, too."""

    def begin_give(
        self, part: BucketPart[Fraction], burst: Fraction, rate: Fraction, now: Fraction
    ) -> Fraction:
        level: Fraction = part.bucket.settle(now)
        part.begin_give(burst, rate, now)
        return min(level, burst)


@pytest.mark.parametrize("rules", [
    StartsFull, GivesAndGoesOn, TakesBeforeTheAnswer, TakesUnansweredForLost, KeepsTokensThatDoNotFit])
def test_without_one_of_the_rules_the_bound_is_broken(rules: type[Rules]) -> None:
    assert hunt(rules(), range(400)) != ""


def test_with_all_of_them_it_is_not() -> None:
    assert hunt(Rules(), range(400)) == ""


# ---- how much moves


def test_a_bucket_is_created_once() -> None:
    world = World()
    assert isinstance(world.keyspace.txn(create_txn(KEYS, BUCKET, 9, 9, is_full=True)), Lost)
    assert world.pool().pool == BucketPool(3 * UNIT, 2 * UNIT, 3 * UNIT, 3 * UNIT, 2 * UNIT)


def test_a_bucket_that_changes_does_not_fill_and_one_that_shrinks_is_owed_first() -> None:
    pool = BucketPool(1 * UNIT, UNIT, UNIT, 3 * UNIT, 2 * UNIT)
    larger = pool.resized(5 * UNIT, 2 * UNIT)
    assert (larger.burst, larger.tokens) == (3 * UNIT, UNIT)
    smaller = pool.resized(1 * UNIT, 2 * UNIT)
    assert (smaller.burst, smaller.tokens) == (-UNIT, 0)
    smaller.check()
    assert to_take(BucketShare(), smaller, UNIT) is None
    back = smaller.less(Part(-2 * UNIT, 0, -2 * UNIT))
    assert (back.burst, back.tokens) == (UNIT, UNIT)


@pytest.mark.parametrize(("burst", "askers", "is_idle", "given"), [
    (8, 1, False, 4), (8, 3, False, 6), (8, 9, False, 7), (1, 5, False, None), (1, 5, True, 1),
    (0, 1, True, None)])
def test_a_share_is_nothing_or_pays_the_dearest_cost(
    burst: int, askers: int, is_idle: bool, given: int | None
) -> None:
    found = to_give(BucketShare(burst * UNIT, 2 * UNIT), UNIT, askers, is_idle=is_idle)
    assert (found[0] if found else None) == (given * UNIT if given else None)
