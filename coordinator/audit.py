"""Both ledgers against the real servers: what etcd says is held beside what each server shows.

Things move while one looks: etcd is read before and after each server, and only what is wrong with both
readings, in two passes, is a difference. Permits in SESSION_UNKNOWN are listed apart; they become a
difference when they are older than their proofs could take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import trio

from coordinator.inspect import session_rows
from coordinator.ledger.attestation import Attestation
from coordinator.ledger.claims import Claims
from coordinator.ledger.invariants import Violation, check_ledger, check_server, reaper_name
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.proofs import Look, Row
from coordinator.ledger.record import Kind
from coordinator.ledger.snapshot import Held, LedgerSnapshot
from coordinator.ledger.states import SessionState
from coordinator.looks import Eyes, LookFailed

BETWEEN_PASSES_SECONDS = 0.5
NO_EYES = "nobody may log in there to look: no monitor is given"
AUTHENTICATION_TIMEOUT_SECONDS = 60.0  # PostgreSQL's default, where no server said its own


@dataclass(frozen=True, slots=True)
class Pool:
    """Whose rows are ours: a role in a database."""

    dbname: str
    user: str


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit found. `differences` empty and every node audited: exit code 0."""

    db: str
    differences: tuple[Violation, ...]
    not_audited: dict[str, str]  # node → why
    unknown: tuple[dict[str, Any], ...]
    held: int
    slots: int
    reserve_held: int
    reserve_slots: int
    admin_held: int  # this command's own included
    admin_slots: int
    ours: dict[str, int]  # sessions of ours by node
    elsewhere: dict[str, int]  # of other ledgers of the fleet, by node
    foreign: dict[str, int]  # other client sessions by role
    revision: int
    attested: tuple[Attestation, ...] = ()  # what operators forced in this ledger, the oldest first
    strange: tuple[str, ...] = ()  # keys that cannot be read and are left out, each with why

    @property
    def exit_code(self) -> int:
        return 1 if self.differences or self.not_audited else 0

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        values = asdict(self)
        values["differences"] = [
            {"invariant": each.invariant, "what": each.what, "detail": each.detail,
             "permit": str(each.permit) if each.permit else "", "pid": each.pid}
            for each in self.differences]
        values["attested"] = [
            {"at_us": each.at_us, "who": each.who, "what": each.what, "evidence": each.evidence,
             "outcome": each.outcome}
            for each in self.attested]
        return {**values, "exit_code": self.exit_code}


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass: what was wrong with both readings."""

    before: LedgerSnapshot
    after: LedgerSnapshot
    violations: frozenset[Violation]
    claims: Claims  # of other ledgers, by the last reading
    looks: dict[str, Look] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


async def audit(
    ledger: Ledger, eyes: Eyes | None, *, db: str, hosts: Sequence[str], pools: Iterable[Pool] = (),
    lease_ttl_seconds: float, now_us: Callable[[], int], attested: Sequence[Attestation] = (),
) -> Audit:
    """Audits one ledger at `hosts` and at every node it has sessions on.

    `pools` are the roles whose sessions are ours besides those that hold a permit now. Without `eyes` only
    what etcd holds is judged, and no node is audited. Raises StoreUnavailable if etcd does not answer.
    """
    known = frozenset(pools)
    first = await _one_pass(ledger, eyes, hosts, known)
    await trio.sleep(BETWEEN_PASSES_SECONDS)  # noqa: TID251 - what is on its way has arrived by then
    second = await _one_pass(ledger, eyes, hosts, known)
    standing = _standing(first.violations, second.violations)
    rows = session_rows(db, second.after, {}, now_us())
    unknown = [row for row in rows if row["state"] == SessionState.UNKNOWN]
    wait = max((look.authentication_timeout_seconds for look in second.looks.values()),
               default=AUTHENTICATION_TIMEOUT_SECONDS)
    late = tuple(Violation("I5", "unknown_too_long", f"{row['permit']} for {row['age_seconds']:.0f} s, "
                                                     f"waits for {row['awaited_proof']}", pid=row["pid"])
                 for row in unknown if row["age_seconds"] > 2 * lease_ttl_seconds + wait)
    found = _sum_up(db, second, known, (*sorted(standing, key=str), *late), tuple(unknown))
    return replace(found, attested=tuple(attested))


def _sum_up(
    db: str, last: _Pass, pools: frozenset[Pool], differences: tuple[Violation, ...],
    unknown: tuple[dict[str, Any], ...],
) -> Audit:
    limits = last.after.active_limits
    kinds = Counter(str(held.session.kind) for held in last.after.sessions)
    foreign: Counter[str] = Counter()
    ours: dict[str, int] = {}
    elsewhere: dict[str, int] = {}
    for node, look in last.looks.items():
        mine = our_rows(last.after, look, pools, last.claims)
        others = [row for row in look.rows if row.is_client and row not in mine]
        ours[node] = len(mine)
        elsewhere[node] = sum(last.claims.has(row) and not row.application_name.endswith(":reaper")
                              for row in others)  # the leader's look is no ledger's session
        foreign.update(str(row.user) for row in others if not last.claims.has(row))
    return Audit(
        db=db, differences=differences, not_audited=last.failed, unknown=unknown, held=kinds["main"],
        slots=limits.main if limits else 0, reserve_held=kinds["reserve"],
        reserve_slots=limits.reserve if limits else 0, admin_held=kinds["admin"],
        admin_slots=limits.admin if limits else 0, ours=ours,
        elsewhere=elsewhere, foreign=dict(foreign), revision=last.after.revision,
        strange=tuple(map(str, last.after.strange)),
    )


async def _one_pass(ledger: Ledger, eyes: Eyes | None, hosts: Sequence[str], pools: frozenset[Pool]) -> _Pass:
    before = await ledger.snapshot(), await ledger.elsewhere()
    looks: dict[str, Look] = {}
    failed: dict[str, str] = {}
    for node in dict.fromkeys((*hosts, *_nodes(before[0]))):
        if eyes is None:
            failed[node] = NO_EYES
            continue
        try:
            look = await eyes.look(node)
        except LookFailed as why:
            failed[node] = str(why)
            continue
        if look.void is not None:
            failed[node] = look.void
        else:
            looks[node] = look
    after = await ledger.snapshot(), await ledger.elsewhere()
    wrong = [_wrong(snapshot, ledger, looks, pools, claims) for snapshot, claims in (before, after)]
    return _Pass(before[0], after[0], _standing(*wrong), after[1], looks, failed)


def _wrong(
    snapshot: LedgerSnapshot, ledger: Ledger, looks: dict[str, Look], pools: frozenset[Pool], claims: Claims
) -> frozenset[Violation]:
    found = list(check_ledger(snapshot, ledger.keys))
    for node, look in looks.items():
        found += check_server(of_node(snapshot, node), our_rows(snapshot, look, pools, claims))
    return frozenset(found)


def _standing(one: frozenset[Violation], other: frozenset[Violation]) -> frozenset[Violation]:
    """What is wrong in both; the particulars (counts) may differ."""
    also = {(each.invariant, each.what, each.permit, each.pid) for each in other}
    return frozenset(each for each in one if (each.invariant, each.what, each.permit, each.pid) in also)


def _nodes(snapshot: LedgerSnapshot) -> list[str]:
    found = {held.session.backend.address for held in snapshot.sessions if held.session.backend}
    if snapshot.epoch is not None:
        found.add(snapshot.epoch.backend.address)
    return sorted(found)


def of_node(snapshot: LedgerSnapshot, node: str) -> LedgerSnapshot:
    """The same ledger with only the sessions that are, or may be being opened, at this node."""
    def here(held: Held) -> bool:
        backend = held.session.backend
        return backend is None or backend.address == node

    return replace(snapshot, sessions=tuple(held for held in snapshot.sessions if here(held)))


def our_rows(
    snapshot: LedgerSnapshot, look: Look, pools: frozenset[Pool], elsewhere: Claims
) -> list[Row]:
    """The rows that must have a permit: by role and database, by birth tag, or by a recorded pid.

    What another ledger claims (`elsewhere`) is that one's, unless a permit of this one names it.
    """
    tag = snapshot.head.tag if snapshot.head else ""
    held = [each.session for each in snapshot.sessions]
    known = pools | {
        Pool(session.dbname, session.user) for session in held if session.kind is not Kind.REPLICATION}
    pids = {(session.pid, session.backend_start_us) for session in held if session.pid}
    births = tuple(f"pooler:{tag}:{kind[0]}" for kind in Kind)
    opening = {session.permit.birth_tag(tag) for session in held if not session.pid}

    def is_others(row: Row) -> bool:
        named = (row.pid, row.backend_start_us) in pids or row.application_name in opening
        return not named and elsewhere.has(row)

    def has_permit(row: Row) -> bool:
        return row.application_name.startswith(births) or (row.pid, row.backend_start_us) in pids

    return [
        row for row in look.rows if not is_others(row) and (
            (row.is_walsender and has_permit(row)) or (row.is_client and (
                Pool(row.dbname or "", row.user or "") in known
                or row.application_name == reaper_name(tag) or has_permit(row))))
    ]
