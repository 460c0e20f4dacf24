"""How long a ticket that comes now would wait: what its class has seen over the last minute.

Expected wait = p50 of an execution, times position / permits. An execution is counted from its grant to its
end, so that the checkout (a session is made ready for its client) is in it. With fewer than 20 samples there
is no estimate, and everybody is admitted. Pure: `now` is an argument, in seconds of a monotonic clock.
"""

from __future__ import annotations

from statistics import median
from typing import Final

SAMPLES_MIN: Final = 20
SAMPLES_MAX: Final = 256  # of one minute: those that come above it push the oldest out
WINDOW_SECONDS: Final = 60.0
KEPT_SECONDS: Final = 0.25  # a median is not worked out anew for each ticket


class Recent:
    """Durations of the last minute, in a ring: one more makes no object."""

    __slots__ = ("_at", "_median", "_median_at", "_next", "_seconds")

    def __init__(self) -> None:
        self._at = [float("-inf")] * SAMPLES_MAX
        self._seconds = [0.0] * SAMPLES_MAX
        self._next = 0
        self._median: float | None = None
        self._median_at = float("-inf")

    def add(self, seconds: float, now: float) -> None:
        """One more, in the place of the oldest."""
        place = self._next
        self._at[place] = now
        self._seconds[place] = seconds
        self._next = place + 1 if place + 1 < SAMPLES_MAX else 0

    def median(self, now: float, at_least: int = SAMPLES_MIN) -> float | None:
        """Of those that are no older than a minute; None if they are fewer than `at_least`."""
        if now - self._median_at >= KEPT_SECONDS:
            since = now - WINDOW_SECONDS
            recent = [seconds for seconds, at in zip(self._seconds, self._at, strict=True) if at >= since]
            self._median, self._median_at = (median(recent) if len(recent) >= at_least else None), now
        return self._median


class Estimator:
    """Of one class."""

    __slots__ = ("executions",)

    def __init__(self) -> None:
        self.executions = Recent()

    def may_exceed(self, seconds: float, turns_max: int, now: float) -> bool:
        """Whether that many turns would take longer."""
        execution = self.executions.median(now)
        return execution is not None and execution * turns_max > seconds

    def expected_seconds(self, turns: float, now: float) -> float | None:
        """Until that is served which comes after so many `turns` (position / permits) of an execution each.
        None: it cannot be told yet."""
        execution = self.executions.median(now)
        return None if execution is None else execution * turns
