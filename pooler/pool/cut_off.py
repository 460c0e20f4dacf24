"""`on_ledger_loss: stop`: a worker grants no session past the end of its lease, by its own clock.

An advance of the epoch is complete when each worker has acknowledged it or its lease is over. One that is cut
off serves on by default; with `stop` it does not, so that nothing is granted under an old epoch then. The end
of the lease is compared with each grant, not waited for: who was paused past it grants nothing on waking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pooler.pool.pool import Pool


class CutOff:
    """Until when pools may grant. `lease_left_seconds` is the worker's lease; `stops`: whether it matters."""

    def __init__(
        self, stops: Callable[[], bool] = bool, lease_left_seconds: Callable[[], float] = float,
        pools: Callable[[], Iterable[Pool]] = tuple,
    ) -> None:
        self._stops = stops
        self._lease_left_seconds = lease_left_seconds
        self._pools = pools
        self.until = self._end()

    @property
    def is_over(self) -> bool:
        """Whether nobody is granted anything now."""
        return monotonic() >= self.until

    def renewed(self) -> None:
        """The lease was renewed, or the setting may have changed: who waits is served again."""
        before, self.until = self.until, self._end()
        was_over = before <= monotonic()
        for pool in self._pools():
            pool.core.grants_until = self.until
            if was_over:
                pool.wake()

    def _end(self) -> float:
        return monotonic() + self._lease_left_seconds() if self._stops() else float("inf")
