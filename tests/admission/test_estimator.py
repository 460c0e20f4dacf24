"""What a ticket has to expect, by what its class has seen of late."""

from __future__ import annotations

from random import Random

import pytest

from pooler.admission.classes import ExecutionClass
from pooler.admission.estimator import SAMPLES_MAX, SAMPLES_MIN, WINDOW_SECONDS, Estimator
from pooler.admission.foresight import expected_seconds, turns_ahead
from tests.admission.yard import Yard, policy


def seen(executions: int, seconds: float = 0.5, now: float = 0.0) -> Estimator:
    made = Estimator()
    for _ in range(executions):
        made.executions.add(seconds, now)
    return made


def test_it_is_the_median_execution_for_each_turn() -> None:
    made = seen(SAMPLES_MIN)
    made.executions.add(90.0, 0.0)
    assert made.expected_seconds(8 / 4, 0.0) == 0.5 * 8 / 4


def test_with_few_samples_nothing_is_expected() -> None:
    assert seen(SAMPLES_MIN - 1).expected_seconds(1_000, 0.0) is None
    assert seen(SAMPLES_MIN).expected_seconds(0.0, 0.0) == 0.0


def test_only_the_last_minute_counts_and_no_more_than_so_many() -> None:
    made = seen(SAMPLES_MIN, seconds=9.0)
    later = WINDOW_SECONDS + 1.0
    for _ in range(SAMPLES_MIN):
        made.executions.add(1.0, later)
    assert made.executions.median(later) == 1.0
    for _ in range(2 * SAMPLES_MAX):
        made.executions.add(3.0, later)
    assert made.executions.median(later + 1.0) == 3.0
    assert made.expected_seconds(1, later + 2 * WINDOW_SECONDS) is None


def test_of_a_queue_played_out_nine_of_ten_are_judged_right() -> None:
    """Two at a time: who was to be refused would have missed it, who was admitted made it."""
    random = Random(7)
    made = Estimator()
    for _ in range(200):
        made.executions.add(random.uniform(0.05, 0.15), 0.0)
    right = 0
    for _ in range(1_000):
        position = random.randint(5, 60)
        left = random.uniform(0.0, 4.0)
        took = sum(random.uniform(0.05, 0.15) for _ in range(position)) / 2
        expected = made.expected_seconds(position / 2, 0.0)
        assert expected is not None
        right += (left < expected) is (took > left)
    assert right > 900


def busy(permits: int = 2, sessions: int = 4, **tenants: dict[str, int]) -> Yard:
    """Two transactions execute, of tenant a."""
    yard = Yard(policy({"x": {"permits": permits}}, tenants), sessions)
    for _ in range(2):
        yard.asks("a")
    return yard


def klass_of(yard: Yard) -> ExecutionClass:
    return yard.book.classes["x"]


def test_only_where_all_who_wait_may_take_longer_than_is_left_is_it_looked_at_closely() -> None:
    assert not seen(SAMPLES_MIN - 1).may_exceed(0.0, 1_000, 1.0)
    assert not seen(SAMPLES_MIN).may_exceed(5.0, 10, 1.0)
    assert seen(SAMPLES_MIN).may_exceed(5.0, 11, 1.0)


def turns(yard: Yard, tenant: str, sessions: int = 4) -> float:
    core, account = yard.pools[0], yard.book.account(tenant, "x")
    found = turns_ahead(core.waiting, account, sessions, len(core.active))
    assert found <= account.klass.waiting, "what is looked at first lets nobody pass who would be refused"
    return found


def test_the_place_in_the_class_counts_by_its_permits() -> None:
    yard = busy()
    for _ in range(10):
        yard.asks("a")
    assert turns(yard, "a") == 10 / 2
    for _ in range(SAMPLES_MIN):
        klass_of(yard).executed(0.5, 0.0)
    account = yard.book.account("a", "x")
    assert expected_seconds(yard.pools[0].waiting, account, 4, 2, 0.0) == pytest.approx(2.5)


def test_a_flood_of_one_tenant_says_nothing_of_the_wait_of_another() -> None:
    yard = busy()
    for _ in range(1_000):
        yard.asks("a")
    yard.asks("light")
    assert turns(yard, "light") == 2 / 2
    assert turns(yard, "a") == 1_001 / 2


def test_a_tenant_at_its_limit_waits_for_its_own() -> None:
    yard = busy(permits=4, a={"inflight": 2})
    for _ in range(6):
        yard.asks("a")
    assert turns(yard, "a") == 6 / 2


def test_few_sessions_bind_more_than_many_permits() -> None:
    yard = busy(permits=40, sessions=2)
    for _ in range(6):
        yard.asks("a")
    assert turns(yard, "a", sessions=2) == 6 / 2


def test_who_finds_room_and_waits_for_an_opening_waits_for_no_execution() -> None:
    yard = busy(permits=4, sessions=2)
    yard.asks("a")
    assert turns(yard, "a", sessions=3) == 0.0


def test_pools_that_share_a_class_take_turns() -> None:
    yard = Yard(policy({"x": {"permits": 1}}), 2, 2)
    yard.asks("a")
    for pool in (0, 1):
        for _ in range(3):
            yard.asks("a", pool=pool)
    assert turns_ahead(yard.pools[0].waiting, yard.book.account("a", "x"), 2, 1) == 6
