"""How long a ticket that comes now would wait: what its class has seen over the last minute.

Expected wait = p50 of an execution, times position / permits, and p50 of a checkout. With fewer than 20
samples of executions there is no estimate, and everybody is admitted. Pure: `now` is an argument.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

SAMPLES_MIN: Final = 20
SAMPLES_MAX: Final = 512  # of one minute: those that come above it push the oldest out
WINDOW_SECONDS: Final = 60.0
KEPT_SECONDS: Final = 0.25  # a median is not worked out anew for each ticket


class Recent:
    """Durations of the last minute."""

    __slots__ = ("_median", "_median_at", "_samples")

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES_MAX)
        self._median: float | None = None
        self._median_at = float("-inf")

    def add(self, seconds: float, now: float) -> None:
        """One more."""
        self._samples.append((now, seconds))

    def median(self, now: float, at_least: int = 1) -> float | None:
        """Of those that are no older than a minute; None if they are fewer than `at_least`."""
        if now - self._median_at >= KEPT_SECONDS:
            samples = self._samples
            while samples and now - samples[0][0] > WINDOW_SECONDS:
                samples.popleft()
            enough = len(samples) >= at_least
            self._median, self._median_at = (median(each for _, each in samples) if enough else None), now
        return self._median


class Estimator:
    """Of one class."""

    __slots__ = ("checkouts", "executions")

    def __init__(self) -> None:
        self.executions, self.checkouts = Recent(), Recent()

    def expected_wait_seconds(self, position: int, permits: int, now: float) -> float | None:
        """For who would be the `position`-th to be served; None: it cannot be told yet."""
        execution = self.executions.median(now, SAMPLES_MIN)
        if execution is None or permits <= 0:
            return None
        return execution * position / permits + (self.checkouts.median(now) or 0.0)

    def is_too_short(self, seconds_left: float, position: int, permits: int, now: float) -> bool:
        """Whether it is better to be refused now than to wait and be refused then."""
        expected = self.expected_wait_seconds(position, permits, now)
        return expected is not None and seconds_left < expected
