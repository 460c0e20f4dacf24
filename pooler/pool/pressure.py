"""What a pool does next for whoever waits longest: open a session, expect one that comes back, or neither.

Pure. Below the warm threshold a session is opened at once; from there on first one is expected for a while
that transactions of late suggest, for a pool that a burst has found busy needs no more sessions. One in which
somebody waits all that while does. All of it is part of the one wait of a ticket: a time is counted from when
a ticket was queued, never from now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

JITTER = 0.2
EXPECTED_SECONDS = (0.005, 0.5)  # least and most that a session is expected for
EXPECTED_COLD_SECONDS = 0.1  # while too little is known
BUDGET_SECONDS = (0.02, 0.5)  # least and most at the gate before a session is insisted on
LEFT_SECONDS = 0.5  # of query_wait_timeout, for the opening
SAMPLES_MIN = 20
WINDOW_SECONDS = 30.0
ENDS_SECONDS = 1.0
SUCCESSOR_AT = 0.95  # of its lifetime
SUCCESSOR_LIFETIME_SECONDS_MIN = 60.0
SUCCESSORS_MAX = 3
SUCCESSOR_PERMITS_MIN = 2
SUCCESSOR_IDLE_SHARE = 0.25  # from there on the idle ones are successors enough


class Step(StrEnum):
    """The next thing for who waits longest."""

    NOTHING = "nothing"  # nobody waits
    CREATE = "create"  # to the gate at once
    EXPECT = "expect"  # a session that comes back, until a time


@dataclass(frozen=True, slots=True)
class Pressure:
    """A pool of one worker at one moment. `warm_below`: so many sessions are opened without being expected;
    `coming`: free but for the pooler's own queries; `in_use`: a client has them. `short_since`: when the
    first was queued of those of whom one has waited at every look since."""

    sessions: int
    warm_below: float
    coming: int
    in_use: int
    waiting: int
    short_since: float
    p99_seconds: float | None
    wait_seconds: float
    holds_session: bool
    jitter: float

    def next_step(self) -> tuple[Step, float]:
        """What to do, and for EXPECT until when."""
        if self.waiting <= 0:
            return Step.NOTHING, 0.0
        seconds = expected_seconds(self.p99_seconds, self.wait_seconds, self.jitter)
        # a hold of session pooling is as long as its client likes: transactions say nothing of its end
        cannot_tell = self.sessions < self.warm_below or self.holds_session or self.in_use + self.coming == 0
        if not seconds or (cannot_tell and self.coming < self.waiting):
            return Step.CREATE, 0.0
        return Step.EXPECT, self.short_since + seconds


def expected_seconds(p99_seconds: float | None, wait_seconds: float, jitter: float) -> float:
    """How long after a ticket was queued a session is expected to come back for it. 0: not at all."""
    seconds = EXPECTED_COLD_SECONDS * jitter if p99_seconds is None else (
        _within(2 * p99_seconds * jitter, EXPECTED_SECONDS))
    return max(0.0, min(wait_seconds - LEFT_SECONDS, seconds))


def budget_seconds(p99_seconds: float | None, jitter: float) -> float:
    """How long at the gate a session that comes back ends the wish for another."""
    return _within(EXPECTED_COLD_SECONDS * jitter if p99_seconds is None else 2 * p99_seconds * jitter,
                   BUDGET_SECONDS)


def _within(seconds: float, least_and_most: tuple[float, float]) -> float:
    least, most = least_and_most
    return max(least, min(most, seconds))


def warm_threshold(pool_size: int, ratio_percent: float, workers: int) -> float:
    """The share of one of `workers`: together they have the pool's, and each has one session. At 100 % no
    session is expected at all."""
    if ratio_percent >= 100:
        return inf
    return max(1.0, pool_size * ratio_percent / 100 / workers)


class RecentTimes:
    """The 99th percentile of what a histogram counted of late: over the last whole window and since."""

    __slots__ = ("_at", "_before", "_latest")

    def __init__(self) -> None:
        self._before: Sequence[int] = ()
        self._latest: Sequence[int] = ()
        self._at = -inf

    def p99(self, bounds_seconds: Sequence[float], counts: Sequence[int], now: float) -> float | None:
        """The upper bound of its bucket; None while there is too little to tell by."""
        if now - self._at >= WINDOW_SECONDS:
            self._before = self._latest if now - self._at < 2 * WINDOW_SECONDS else tuple(counts)
            self._latest, self._at = tuple(counts), now
        before = self._before or (0,) * len(counts)
        recent = [count - past for count, past in zip(counts, before, strict=True)]
        total = sum(recent)
        if total < SAMPLES_MIN:
            return None
        reached = 0
        for bound, count in zip((*bounds_seconds, inf), recent, strict=True):
            reached += count
            if reached * 100 >= total * 99:
                return bound
        return None


class Ends:
    """Ends of sessions that their server made: one is that session's, two in a second are the server's."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at: deque[float] = deque(maxlen=2)

    def is_restart(self, now: float) -> bool:
        """Count one; whether all that was opened before is of yesterday. Then it counts anew."""
        self._at.append(now)
        if len(self._at) < 2 or now - self._at[0] > ENDS_SECONDS:
            return False
        self._at.clear()
        return True


@dataclass(frozen=True, slots=True)
class Replacing:
    """Whether sessions near their end get successors now. `free_permits`: as far as the worker knows."""

    idle: int
    in_use: int
    waiting: int
    making: int
    lifetime_seconds: float
    free_permits: int

    @property
    def room(self) -> int:
        """How many more may be made."""
        total = self.idle + self.in_use
        under_pressure = self.waiting > 0 or self.idle == 0
        if (under_pressure or self.lifetime_seconds < SUCCESSOR_LIFETIME_SECONDS_MIN
                or self.idle >= total * SUCCESSOR_IDLE_SHARE
                or self.free_permits < SUCCESSOR_PERMITS_MIN):
            return 0
        return max(0, min(SUCCESSORS_MAX - self.making, self.free_permits - SUCCESSOR_PERMITS_MIN + 1))
