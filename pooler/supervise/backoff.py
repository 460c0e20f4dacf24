"""When a process that died is started again. Pure: `now` is in seconds of any monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass, field

BACKOFF_SECONDS_MIN = 0.1
BACKOFF_SECONDS_MAX = 5.0
DEATHS_MAX = 5
DEATHS_WINDOW_SECONDS = 60.0
DOWN_RETRY_SECONDS = 30.0


@dataclass(slots=True)
class Deaths:
    """The deaths of one place in the fleet. A life longer than the window starts the back-off anew.

    `too_often`: it counts as down. It is tried again all the same, rarely but for ever, because what kills it
    may pass while nobody looks.
    """

    total: int = 0
    too_often: bool = False
    _recent: list[float] = field(default_factory=list)
    _in_a_row: int = 0

    def died(self, now: float, lived_seconds: float) -> float:
        """Seconds to wait before the next start."""
        self.total += 1
        self._recent = [at for at in self._recent if now - at < DEATHS_WINDOW_SECONDS] + [now]
        lived_long = lived_seconds >= DEATHS_WINDOW_SECONDS
        self._in_a_row = 1 if lived_long else self._in_a_row + 1
        self.too_often = len(self._recent) >= DEATHS_MAX or (self.too_often and not lived_long)
        if self.too_often:
            return DOWN_RETRY_SECONDS
        return float(min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS_MIN * 2 ** (self._in_a_row - 1)))

    def forgive(self) -> None:
        """An operator asked for another try."""
        self._recent.clear()
        self.too_often = False
        self._in_a_row = 0
