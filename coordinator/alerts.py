"""Permits that stand too long in a state that should pass, or that nobody uses any more: which, since when.

Pure. Each is told once when it is found, and shown for as long as it stands. Times are those of our monotonic
clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from coordinator.ledger.record import COMMAND_INDEX, Permit
from coordinator.ledger.snapshot import Held, LedgerSnapshot
from coordinator.ledger.states import SessionState
from coordinator.session_table import Doing

SHOWN_MAX = 256  # alerts in the metrics at once


class What(StrEnum):
    """What is wrong with it."""

    UNKNOWN = "unknown"
    CLOSING = "closing"
    LATE_CHECKOUT = "late_checkout"  # a client's transaction is past the limit of its class
    LEAKED = "leaked"  # OPEN, of a live worker, in none of its pools


PASSING = {SessionState.UNKNOWN: What.UNKNOWN, SessionState.CLOSING: What.CLOSING}


@dataclass(frozen=True, slots=True)
class Alert:
    """One of them. `limit_seconds`: the transaction limit that a late checkout is past, else 0; `holder`: who
    has that, and what it waits for."""

    what: What
    db: str
    permit: Permit
    state: str
    owner: str
    host: str
    pid: int
    since_us: int
    ticket: str = ""
    tenant: str = ""
    limit_seconds: float = 0.0
    holder: str = ""

    @property
    def key(self) -> tuple[What, str, Permit]:
        """What makes it the same one the next time."""
        return self.what, self.db, self.permit

    def age_seconds(self, now_us: int) -> float:
        """How long it has stood; of a late checkout, how long it has lasted."""
        return max(0, now_us - self.since_us) / 1_000_000

    def told_by(self, doing: Doing | None) -> Alert:
        """With the ticket and tenant that the worker's session table names, where the ledger does not."""
        if doing is None:
            return self
        ticket = str(doing.ticket_id) if doing.ticket_id else ""
        return replace(self, ticket=self.ticket or ticket, tenant=self.tenant or doing.tenant)


def alert_of(what: What, db: str, held: Held, since_us: int) -> Alert:
    """An alert about a permit as the ledger has it."""
    session = held.session
    return Alert(what, db, session.permit, str(session.state), session.owner, session.host, session.pid,
                 since_us, ticket=session.ticket, tenant=session.tenant)


@dataclass(slots=True)
class Watchlist:
    """Since when each permit of one ledger has stood in a state that should pass. What is noted in it
    meanwhile (that its server process was told to end) changes nothing of that."""

    since_us: dict[tuple[Permit, SessionState], int] = field(default_factory=dict)

    def look(self, db: str, held: Iterable[Held], now_us: int, limit_us: int) -> list[Alert]:
        """Those that have now stood for `limit_us` or more. One that goes to another state is met anew."""
        standing = {(each.permit, each.session.state): each for each in held
                    if each.session.state in PASSING}
        self.since_us = {key: self.since_us.get(key, now_us) for key in standing}
        return [alert_of(PASSING[standing[key].session.state], db, standing[key], since)
                for key, since in self.since_us.items() if now_us - since >= limit_us]


@dataclass(slots=True)
class Told:
    """Which alerts stand, so that each is told once."""

    standing: dict[tuple[What, str, Permit], Alert] = field(default_factory=dict)

    def news(self, alerts: Iterable[Alert]) -> list[Alert]:
        """Those of `alerts`, which are all that stand now, that did not stand before."""
        before, self.standing = self.standing, {each.key: each for each in alerts}
        return [each for key, each in self.standing.items() if key not in before]


def unwatched(snapshot: LedgerSnapshot) -> list[Held]:
    """What the leader tells of: permits of owners without a worker key, and of commands. All others have a
    coordinator of their own host that does, for who has a key has one that keeps it alive."""
    return [held for held in snapshot.sessions if not _is_watched(snapshot, held.session.owner)]


def _is_watched(snapshot: LedgerSnapshot, owner: str) -> bool:
    registered = snapshot.workers.get(owner)
    return registered is not None and registered.worker.index != COMMAND_INDEX
