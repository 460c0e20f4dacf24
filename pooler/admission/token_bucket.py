"""A token bucket, strictly: level = min(B, level + r·Δt); who asks is admitted only if his cost is there.

A refused request takes nothing, there are no refunds, and a cost above B can never be met. So in any interval
t no more than B + r·t is admitted. Pure, and over any numbers that add up: with fractions it is exact. `now`
never goes back; a reading that does counts as no time at all.
"""

from __future__ import annotations

from enum import Enum
from fractions import Fraction
from typing import Generic, TypeVar

N = TypeVar("N", float, Fraction)


class Taken(Enum):
    """What a request for tokens comes to."""

    ADMITTED = "admitted"
    EMPTY = "the tokens are not there yet"
    NEVER = "it costs more than the bucket can hold"


class TokenBucket(Generic[N]):
    """`rate` tokens a second, at most `burst` at once; `level` of them are there at first."""

    __slots__ = ("_at", "_level", "burst", "rate")

    def __init__(self, rate: N, burst: N, level: N, now: N) -> None:
        self.rate: N = rate
        self.burst: N = burst
        self._level: N = min(level, burst)
        self._at: N = now

    def settle(self, now: N) -> N:
        """What has come in until now is there; the level."""
        if now > self._at:
            self._level = min(self.burst, self._level + self.rate * (now - self._at))
            self._at = now
        return self._level

    def take(self, cost: N, now: N) -> Taken:
        """Admitted: the cost is taken. Otherwise nothing is."""
        if cost > self.burst:
            return Taken.NEVER
        if cost > self.settle(now):
            return Taken.EMPTY
        self._level -= cost
        return Taken.ADMITTED

    def seconds_until(self, cost: N, now: N) -> N:
        """In how long a cost that the bucket can hold will be there if nobody else takes any. Not for a share
        that gets none (rate 0)."""
        missing = cost - self.settle(now)
        return max(missing, missing * 0) / self.rate

    def resize(self, rate: N, burst: N, now: N) -> None:
        """Another share from now on: first what came in at the old rate, then the new cap; it does not fill.
        """
        self._level = min(self.settle(now), burst)
        self.rate, self.burst = rate, burst

    def remove(self, most: N, now: N) -> N:
        """Up to so many tokens leave for another share; how many."""
        moved = min(self.settle(now), most)
        self._level -= moved
        return moved

    def add(self, tokens: N, now: N) -> None:
        """Tokens that left another share; what does not fit is lost."""
        self._level = min(self.burst, self.settle(now) + tokens)
