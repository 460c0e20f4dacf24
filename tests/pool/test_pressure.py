"""What a pool does next for who waits longest: pure, for every load."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooler.observe.metrics import BOUNDS_SECONDS, Histogram
from pooler.pool.pressure import (
    BUDGET_SECONDS,
    ENDS_SECONDS,
    EXPECTED_COLD_SECONDS,
    EXPECTED_SECONDS,
    LEFT_SECONDS,
    SAMPLES_MIN,
    SUCCESSORS_MAX,
    WINDOW_SECONDS,
    Ends,
    Pressure,
    RecentTimes,
    Replacing,
    Step,
    budget_seconds,
    expected_seconds,
    warm_threshold,
)

P99 = st.none() | st.floats(0.0, 100.0)
JITTERS = st.floats(0.8, 1.2)
BUSY = Pressure(
    sessions=10, warm_below=8, coming=0, in_use=10, waiting=5, short_since=100.0, p99_seconds=0.05,
    wait_seconds=120.0, holds_session=False, jitter=1.0)


def test_a_busy_pool_expects_a_session_for_twice_the_99th_percentile() -> None:
    assert BUSY.next_step() == (Step.EXPECT, 100.0 + 0.1)


@pytest.mark.parametrize("changes", [
    {"sessions": 7}, {"holds_session": True}, {"in_use": 0}])
def test_below_the_threshold_in_session_pooling_and_where_none_can_come_one_is_opened_at_once(
    changes: dict[str, object]
) -> None:
    assert replace(BUSY, **changes).next_step()[0] is Step.CREATE  # type: ignore[arg-type]


def test_nobody_waits_and_nothing_is_done() -> None:
    assert replace(BUSY, waiting=0, short_since=inf).next_step()[0] is Step.NOTHING


@pytest.mark.parametrize(("coming", "waiting", "step"), [
    (1, 1, Step.EXPECT), (2, 1, Step.EXPECT), (1, 2, Step.CREATE)])
@pytest.mark.parametrize("holds_session", [False, True])
def test_a_session_that_is_being_cleaned_is_waited_for_even_by_a_cold_pool(
    coming: int, waiting: int, step: Step, *, holds_session: bool
) -> None:
    cold = replace(BUSY, sessions=2, coming=coming, waiting=waiting, holds_session=holds_session)
    assert cold.next_step()[0] is step


@given(P99, st.floats(0.0, 1000.0) | st.just(inf), JITTERS)
def test_a_session_is_expected_within_its_limits_and_never_past_the_wait(
    p99: float | None, wait: float, jitter: float
) -> None:
    seconds = expected_seconds(p99, wait, jitter)
    assert 0.0 <= seconds <= max(0.0, wait - LEFT_SECONDS)
    assert seconds <= EXPECTED_SECONDS[1]
    if wait >= 1.1:
        assert seconds >= EXPECTED_SECONDS[0]
    if wait <= LEFT_SECONDS:
        assert seconds == 0.0


@given(P99, JITTERS)
def test_the_budget_at_the_gate_is_within_its_limits(p99: float | None, jitter: float) -> None:
    assert BUDGET_SECONDS[0] <= budget_seconds(p99, jitter) <= BUDGET_SECONDS[1]


def test_a_cold_pool_expects_one_for_a_tenth_of_a_second() -> None:
    assert expected_seconds(None, inf, 1.0) == EXPECTED_COLD_SECONDS == 0.1


@given(st.integers(1, 1000), st.integers(0, 99), st.integers(1, 64))
def test_workers_share_the_threshold_and_each_opens_one_at_once(size: int, ratio: int, workers: int) -> None:
    each = warm_threshold(size, ratio, workers)
    assert each >= 1.0
    assert each == 1.0 or each * workers == pytest.approx(size * ratio / 100)


def test_at_a_hundred_percent_one_is_opened_for_whoever_waits() -> None:
    always = replace(BUSY, warm_below=warm_threshold(10, 100, 4))
    assert always.next_step()[0] is Step.CREATE


# ---- the times of late


def counted(*seconds: float) -> Histogram:
    histogram = Histogram()
    for each in seconds:
        histogram.observe(each)
    return histogram


def test_too_few_transactions_tell_nothing() -> None:
    times, histogram = RecentTimes(), counted(*[0.001] * (SAMPLES_MIN - 1))
    assert times.p99(BOUNDS_SECONDS, histogram.counts, 0.0) is None
    histogram.observe(0.001)
    assert RecentTimes().p99(BOUNDS_SECONDS, (0,) * len(histogram.counts), 0.0) is None


def test_a_pool_whose_transactions_became_short_forgets_the_long_ones() -> None:
    times, histogram = RecentTimes(), Histogram()
    assert times.p99(BOUNDS_SECONDS, histogram.counts, 0.0) is None
    for _ in range(100):
        histogram.observe(2.0)
    assert times.p99(BOUNDS_SECONDS, histogram.counts, 1.0) == 2.5
    now = 1.0
    for _ in range(3):
        now += WINDOW_SECONDS
        for _ in range(100):
            histogram.observe(0.004)
        found = times.p99(BOUNDS_SECONDS, histogram.counts, now)
    assert found == 0.005


def test_after_a_long_silence_what_was_before_says_nothing() -> None:
    times, histogram = RecentTimes(), counted(*[1.0] * 100)
    times.p99(BOUNDS_SECONDS, histogram.counts, 0.0)
    assert times.p99(BOUNDS_SECONDS, histogram.counts, 10 * WINDOW_SECONDS) is None


@given(st.lists(st.floats(0.0, 59.0), min_size=SAMPLES_MIN, max_size=300))
def test_it_is_a_bound_that_99_of_100_are_not_above(seconds: list[float]) -> None:
    times, histogram = RecentTimes(), Histogram()
    times.p99(BOUNDS_SECONDS, histogram.counts, 0.0)
    for each in seconds:
        histogram.observe(each)
    found = times.p99(BOUNDS_SECONDS, histogram.counts, 1.0)
    assert found is not None
    assert sum(each <= found for each in seconds) * 100 >= len(seconds) * 99
    below = [bound for bound in BOUNDS_SECONDS if bound < found]
    if below:
        assert sum(each <= below[-1] for each in seconds) * 100 < len(seconds) * 99


# ---- ends that servers make, and successors


def test_one_end_is_one_sessions_and_two_within_a_second_are_the_servers() -> None:
    ends = Ends()
    assert [ends.is_restart(at) for at in (0.0, ENDS_SECONDS + 0.1, 2.5, 3.0, 3.1, 3.2)] == [
        False, False, False, True, False, True]


REPLACING = Replacing(idle=2, in_use=18, waiting=0, making=0, lifetime_seconds=3600.0, free_permits=20)


@pytest.mark.parametrize("changes", [
    {"waiting": 1}, {"idle": 0}, {"idle": 5, "in_use": 15}, {"lifetime_seconds": 59.0},
    {"free_permits": 1}, {"making": SUCCESSORS_MAX}])
def test_no_successor_under_pressure_with_idle_ones_for_short_lives_or_from_the_last_permit(
    changes: dict[str, int]
) -> None:
    assert REPLACING.room > 0
    assert replace(REPLACING, **changes).room == 0


@given(*[st.integers(0, 50)] * 5)
def test_there_are_never_more_than_three_and_one_permit_is_left(
    idle: int, in_use: int, waiting: int, making: int, free: int
) -> None:
    room = Replacing(idle, in_use, waiting, making, 3600.0, free).room
    assert 0 <= room <= max(0, SUCCESSORS_MAX - making)
    assert room == 0 or free - room >= 1


@given(st.integers(0, 50), st.integers(0, 20), st.integers(0, 20), st.integers(0, 300), st.floats(0.0, 1e6),
       P99, st.floats(0.0, 200.0), st.booleans(), JITTERS)
def test_no_step_goes_past_the_wait_and_one_that_expects_has_something_to_expect(
    sessions: int, coming: int, in_use: int, waiting: int, since: float, p99: float | None, wait: float,
    holds_session: bool, jitter: float,
) -> None:
    pool = Pressure(sessions, 8.0, coming, in_use, waiting, since, p99, wait, holds_session, jitter)
    step, until = pool.next_step()
    assert (step is Step.NOTHING) is (waiting == 0)
    if step is Step.EXPECT:
        assert coming + in_use > 0
        assert since < until <= since + wait - LEFT_SECONDS + 1e-6
        assert coming >= waiting or (sessions >= 8 and not holds_session)
