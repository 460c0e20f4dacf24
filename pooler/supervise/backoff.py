"""When a process that died is started again. Pure: `now` is in seconds of any monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass, field

BACKOFF_SECONDS_MIN = 0.1
BACKOFF_SECONDS_MAX = 5.0
DEATHS_MAX = 5
DEATHS_WINDOW_SECONDS = 60.0


@dataclass(slots=True)
class Deaths:
    """The deaths of one place in the fleet. A life longer than the window starts the back-off anew."""

    total: int = 0
    _recent: list[float] = field(default_factory=list)
    _in_a_row: int = 0

    def died(self, now: float, lived_seconds: float) -> float | None:
        """Seconds to wait before the next start; None: it died too often and stays down."""
        self.total += 1
        self._recent = [at for at in self._recent if now - at < DEATHS_WINDOW_SECONDS] + [now]
        self._in_a_row = 1 if lived_seconds >= DEATHS_WINDOW_SECONDS else self._in_a_row + 1
        if len(self._recent) >= DEATHS_MAX:
            return None
        return float(min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS_MIN * 2 ** (self._in_a_row - 1)))

    def forgive(self) -> None:
        """An operator asked for another try."""
        self._recent.clear()
        self._in_a_row = 0
