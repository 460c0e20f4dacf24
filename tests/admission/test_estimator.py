"""What a ticket has to expect, by what its class has seen of late."""

from __future__ import annotations

from random import Random

from pooler.admission.estimator import SAMPLES_MAX, SAMPLES_MIN, WINDOW_SECONDS, Estimator


def seen(executions: int, seconds: float = 0.5, checkout: float = 0.1, now: float = 0.0) -> Estimator:
    made = Estimator()
    for _ in range(executions):
        made.executions.add(seconds, now)
        made.checkouts.add(checkout, now)
    return made


def test_it_is_the_median_execution_by_the_place_in_the_queue_and_a_checkout() -> None:
    assert seen(SAMPLES_MIN).expected_wait_seconds(8, 4, 0.0) == 0.5 * 8 / 4 + 0.1


def test_with_few_samples_everybody_is_admitted() -> None:
    few = seen(SAMPLES_MIN - 1)
    assert few.expected_wait_seconds(1_000, 1, 0.0) is None
    assert not few.is_too_short(0.0, 1_000, 1, 0.0)
    assert not seen(SAMPLES_MIN).is_too_short(0.0, 5, 0, 0.0)


def test_who_has_less_time_left_than_that_is_told_at_once() -> None:
    made = seen(SAMPLES_MIN)
    assert made.is_too_short(1.09, 8, 4, 0.0)
    assert not made.is_too_short(1.11, 8, 4, 0.0)


def test_only_the_last_minute_counts_and_no_more_than_so_many() -> None:
    made = seen(SAMPLES_MIN, seconds=9.0)
    later = WINDOW_SECONDS + 1.0
    for _ in range(SAMPLES_MIN):
        made.executions.add(1.0, later)
    assert made.executions.median(later) == 1.0
    for _ in range(2 * SAMPLES_MAX):
        made.executions.add(3.0, later)
    assert made.executions.median(later + 1.0) == 3.0
    assert made.expected_wait_seconds(1, 1, later + 2 * WINDOW_SECONDS) is None


def test_of_a_queue_played_out_nine_of_ten_are_judged_right() -> None:
    """One server, whole queue known: who was to be refused would have missed it, who was admitted made it."""
    random = Random(7)
    made = Estimator()
    for _ in range(200):
        made.executions.add(random.uniform(0.05, 0.15), 0.0)
    right = 0
    for _ in range(1_000):
        position = random.randint(5, 60)
        left = random.uniform(0.0, 4.0)
        took = sum(random.uniform(0.05, 0.15) for _ in range(position)) / 2
        right += made.is_too_short(left, position, 2, 0.0) is (took > left)
    assert right > 900
