"""A token bucket admits what the strict model admits, to the token."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from pooler.admission.token_bucket import Taken, TokenBucket

F = Fraction
A, E, NEVER = Taken.ADMITTED, Taken.EMPTY, Taken.NEVER


def bucket(rate: int = 2, burst: int = 3, level: int | None = None) -> TokenBucket[Fraction]:
    return TokenBucket(F(rate), F(burst), F(burst if level is None else level), F(0))


def test_the_worked_example_comes_out_exactly() -> None:
    """B = 3, r = 2, full at first."""
    one = bucket()
    asked = [(F(at), F(cost)) for at, cost in (
        *(("0", 1),) * 4, ("1/4", 1), ("1/2", 1), ("3/2", 2), *(("100", 1),) * 4)]
    taken = [one.take(cost, at) for at, cost in asked]
    assert taken == [A, A, A, E, E, A, A, A, A, A, E]
    assert one.settle(F(100)) == 0
    admitted = [each for each, was in zip(asked, taken, strict=True) if was is A]
    for (since, _), (until, _) in combinations(admitted, 2):
        assert sum(cost for at, cost in admitted if since <= at <= until) <= 3 + 2 * (until - since)
    assert one.take(F(4), F(200)) is NEVER
    assert one.settle(F(200)) == 3
    assert one.take(F(3), F(200)) is A


def test_four_workers_that_share_one_bucket_admit_three_at_once_and_four_of_their_own_twelve() -> None:
    def at_once(buckets: list[TokenBucket[Fraction]]) -> int:
        return sum(each.take(F(1), F(0)) is A for each in buckets for _ in range(10))

    assert at_once([bucket()] * 4) == 3
    assert at_once([bucket() for _ in range(4)]) == 12
    shares = [TokenBucket(F(2) / 4, F(each), F(each), F(0)) for each in (1, 1, 1, 0)]
    assert at_once(shares) == 3


def test_a_refused_request_takes_nothing_and_is_told_when_to_come_back() -> None:
    one = bucket(level=1)
    assert one.take(F(2), F(0)) is E
    assert one.settle(F(0)) == 1
    assert one.seconds_until(F(2), F(0)) == F(1, 2)
    assert one.take(F(2), F(1, 2) - F(1, 10**9)) is E
    assert one.take(F(2), F(1, 2)) is A
    assert bucket().seconds_until(F(2), F(0)) == 0


def test_a_clock_that_goes_back_brings_nothing() -> None:
    one = bucket(level=0)
    assert one.settle(F(1)) == 2
    assert one.settle(F(0)) == 2
    assert one.settle(F(1)) == 2


Steps = st.lists(st.tuples(
    st.fractions(0, 2, max_denominator=8), st.sampled_from(["take", "move", "resize"]), st.integers(0, 3),
    st.integers(0, 3), st.fractions(0, 4, max_denominator=4)), max_size=60)


@given(Steps)
def test_whatever_is_split_moved_and_resized_no_interval_admits_more_than_the_whole(
    steps: list[tuple[Fraction, str, int, int, Fraction]]
) -> None:
    """Four shares of B = 8, r = 4: B and r are moved between them, tokens before they are given."""
    shares = [TokenBucket(F(1), F(2), F(2), F(0)) for _ in range(4)]
    now = F(0)
    admitted: list[tuple[Fraction, Fraction]] = []
    for wait, what, one, other, amount in steps:
        now += wait
        if what == "take":
            if shares[one].take(amount, now) is A:
                admitted.append((now, amount))
        elif one != other:
            giver, taker = shares[one], shares[other]
            if what == "move":
                taker.add(giver.remove(amount, now), now)
            else:
                rate, burst = min(giver.rate, amount), min(giver.burst, amount)
                giver.resize(giver.rate - rate, giver.burst - burst, now)
                taker.resize(taker.rate + rate, taker.burst + burst, now)
        assert all(0 <= share.settle(now) <= share.burst for share in shares)
        assert sum(share.burst for share in shares) == 8
        assert sum(share.rate for share in shares) == 4
    for first, (since, _) in enumerate(admitted):
        total = F(0)
        for until, cost in admitted[first:]:
            total += cost
            assert total <= 8 + 4 * (until - since)
