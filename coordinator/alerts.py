"""Permits that stand too long in a state that should pass: told once each. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.ledger.record import Permit, Session
from coordinator.ledger.snapshot import LedgerSnapshot
from coordinator.ledger.states import SessionState

PASSING = frozenset({SessionState.UNKNOWN, SessionState.CLOSING})


@dataclass(slots=True)
class Watchlist:
    """Since when, by our monotonic clock, each such permit has stood as it does, and whether it was told."""

    since_us: dict[tuple[Permit, int], int] = field(default_factory=dict)
    told: set[tuple[Permit, int]] = field(default_factory=set)

    def look(self, snapshot: LedgerSnapshot, now_us: int, limit_us: int) -> list[tuple[Session, int]]:
        """The permits that have now stood for `limit_us` or more, each once, with their age in µs."""
        standing = {(held.permit, held.mod_revision): held.session for held in snapshot.sessions
                    if held.session.state in PASSING}
        self.since_us = {key: self.since_us.get(key, now_us) for key in standing}
        self.told &= standing.keys()
        late = [key for key, since in self.since_us.items()
                if now_us - since >= limit_us and key not in self.told]
        self.told.update(late)
        return [(standing[key], now_us - self.since_us[key]) for key in late]
