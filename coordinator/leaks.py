"""Which permits no pool of their worker holds: found from what workers tell of their pools. Pure.

Once a lease cycle a worker tells the permits that its pools hold. One that stands under the worker's name and
is missing from two such words in a row was in no pool for a cycle: nobody will ever use it or give it back.
While a session is being opened or handed over it may be missing from one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from coordinator.ledger.record import Permit

Key = tuple[str, Permit]  # database, permit


@dataclass(slots=True)
class Reports:
    """What each worker's last words lacked, and since when by our monotonic clock."""

    _missing: dict[str, dict[Key, int]] = field(default_factory=dict)
    _leaked: dict[str, dict[Key, int]] = field(default_factory=dict)

    def heard(self, worker: str, said: Collection[Key], under_its_name: Collection[Key], now_us: int) -> bool:
        """A worker's word; whether a permit that was not known to be leaked is now."""
        before = self._missing.get(worker, {})
        missing = {key: before.get(key, now_us) for key in under_its_name if key not in said}
        leaked = {key: since for key, since in missing.items() if key in before}
        is_news = bool(leaked.keys() - self._leaked.get(worker, {}).keys())
        self._missing[worker], self._leaked[worker] = missing, leaked
        return is_news

    def leaked(self, workers: Collection[str]) -> dict[Key, int]:
        """Every leaked permit of these workers, and since when; what the others said is forgotten."""
        for gone in self._missing.keys() - set(workers):
            del self._missing[gone], self._leaked[gone]
        return {key: since for each in self._leaked.values() for key, since in each.items()}
