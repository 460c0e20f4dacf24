"""Who else has sessions at a server, and whether they leave room for what was promised. Pure.

Ordinary sessions count, those of superusers too: they take ordinary slots as long as there are any. What has
a permit is ours, and so is the leader's own look; the slots that commands and that look have now are what the
admin reserve is for, so that they count as free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.ledger.claims import NO_CLAIMS, Claims
from coordinator.ledger.invariants import UNFOUNDED_TAG, reaper_name
from coordinator.ledger.proofs import Look, Row
from coordinator.ledger.record import Kind
from coordinator.ledger.snapshot import LedgerSnapshot

SHOWN_MAX = 20  # groups in the metrics, of one server


@dataclass(frozen=True, slots=True)
class Ours:
    """What is known of the fleet's own sessions: processes, birth tags, and those of commands apart."""

    processes: frozenset[tuple[int, int]] = frozenset()
    names: frozenset[str] = frozenset()
    admins: frozenset[tuple[int, int]] = frozenset()
    admin_names: frozenset[str] = frozenset()
    claims: Claims = NO_CLAIMS

    @classmethod
    def of(cls, snapshots: Iterable[LedgerSnapshot], claims: Claims = NO_CLAIMS) -> Ours:
        """By every ledger that may have sessions there; several readings of one add up. `claims` are those of
        the whole fleet: also of ledgers that are lost, or are none of this host's."""
        processes: set[tuple[int, int]] = set()
        names: set[str] = {reaper_name(UNFOUNDED_TAG)}
        admins: set[tuple[int, int]] = set()
        admin_names: set[str] = set(names)
        for snapshot in snapshots:
            tag = snapshot.head.tag if snapshot.head else ""
            admin_names.add(reaper_name(tag))
            for session in (held.session for held in snapshot.sessions):
                is_admin = session.kind is Kind.ADMIN
                (admins if is_admin else processes).add((session.pid, session.backend_start_us))
                (admin_names if is_admin else names).add(session.permit.birth_tag(tag))
        return cls(frozenset(processes), frozenset(names), frozenset(admins), frozenset(admin_names),
                   claims)

    def has(self, row: Row) -> bool:
        """Whether it has a permit, or needs none."""
        return (self.is_admin(row) or _among(row, self.processes) or row.application_name in self.names
                or self.claims.has(row))

    def is_admin(self, row: Row) -> bool:
        """Whether it is a command's, or a leader's look."""
        return _among(row, self.admins) or row.application_name in self.admin_names


def _among(row: Row, processes: frozenset[tuple[int, int]]) -> bool:
    return row.backend_start_us is not None and (row.pid, row.backend_start_us) in processes


@dataclass(frozen=True, slots=True)
class Group:
    """So many sessions of one role, from one address, under one name."""

    user: str
    address: str
    application_name: str
    count: int


@dataclass(frozen=True, slots=True)
class Census:
    """The strangers of one server as one look showed them."""

    node: str
    free: int | None  # ordinary slots that an administrator could have now; None: the server tells no limits
    strangers: int = 0
    by_role: dict[tuple[str, str], int] = field(default_factory=dict)  # (role, client address) → sessions
    biggest: Group | None = None

    def shown(self) -> list[tuple[str, str, int]]:
        """(role, address, sessions), the biggest first; who is beyond SHOWN_MAX is summed up."""
        found = [(*key, count) for key, count in sorted(self.by_role.items(), key=lambda each: -each[1])]
        rest = sum(count for *_, count in found[SHOWN_MAX:])
        return [*found[:SHOWN_MAX], *([("others", "", rest)] if rest else [])]


def count_strangers(look: Look, ours: Ours) -> Census:
    """What `look` shows of others. Precondition: the look counts (`look.void` is None)."""
    rows = [row for row in look.rows if row.is_client]
    strangers = [row for row in rows if not ours.has(row)]
    groups = Counter((row.user or "", row.client or "local", row.application_name) for row in strangers)
    biggest = max(groups, key=lambda group: groups[group], default=None)
    free = None
    if look.max_connections:
        taken = sum(not ours.is_admin(row) for row in rows)
        free = look.max_connections - look.reserved_connections - taken
    return Census(
        look.backend.address, free, len(strangers),
        dict(Counter((row.user or "", row.client or "local") for row in strangers)),
        Group(*biggest, groups[biggest]) if biggest is not None else None)


@dataclass(frozen=True, slots=True)
class Promise:
    """What the policies of the ledgers at one server say of it, summed."""

    other_clients: int
    admin_reserve: int


def is_over(census: Census, promise: Promise) -> bool:
    """More strangers than the policies reckoned with."""
    return census.strangers > promise.other_clients


def is_eaten(census: Census, promise: Promise) -> bool:
    """Strangers have taken slots that administrators were promised."""
    return census.free is not None and census.strangers > 0 and census.free < promise.admin_reserve
