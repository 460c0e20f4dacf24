"""What must hold of a ledger, and of a ledger beside the real server: I1, I2, I4, I5, I11 by name.

Pure. `pooler ledger audit`, the model and the simulation judge by these same functions. The rows given are
those of our own roles and hosts (the caller tells strangers apart); a violation says what is wrong, never
what to do about it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.ledger.keys import DbKeys
from coordinator.ledger.limits import Limits
from coordinator.ledger.proofs import Row
from coordinator.ledger.record import Kind, Permit, Session
from coordinator.ledger.snapshot import LedgerSnapshot
from coordinator.ledger.states import Actor, IllegalMove, Proof, SessionState, find_move


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise: which, in one word what, and the particulars."""

    invariant: str
    what: str
    detail: str
    permit: Permit | None = None
    pid: int = 0

    def __str__(self) -> str:
        return f"{self.invariant} {self.what}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Released:
    """One release as it was carried out."""

    permit: Permit
    source: SessionState
    actor: Actor
    proof: Proof | None


UNFOUNDED_TAG = "new"  # in the reaper's name until its ledger has a tag, and until it looks again after that


def reaper_name(ledger_tag: str) -> str:
    """application_name of the one session without a permit: the leader's own looks."""
    return f"pooler:{ledger_tag}:reaper"


def check_ledger(snapshot: LedgerSnapshot, keys: DbKeys) -> list[Violation]:
    """I1, I4 and I11, which the ledger shows by itself."""
    return [*all_readable(snapshot), *within_budget(snapshot), *balanced(snapshot, keys),
            *generations_together(snapshot)]


def check_server(snapshot: LedgerSnapshot, rows: Iterable[Row]) -> list[Violation]:
    """I2: the ledger beside what the server shows."""
    return sessions_have_permits(snapshot, list(rows))


def all_readable(snapshot: LedgerSnapshot) -> list[Violation]:
    """I4: whose each slot is."""
    return [Violation("I4", "unreadable", f"{each.permit.kind}/{each.permit.slot}: {each.unreadable}",
                      each.permit) for each in snapshot.sessions if each.unreadable]


def within_budget(snapshot: LedgerSnapshot) -> list[Violation]:
    """I1: of each kind no more slots are held than the largest policy under which one was granted has."""
    found: list[Violation] = []
    for kind in Kind:
        held = snapshot.held(kind)
        limits = [_slots(snapshot, h.session.policy_generation, kind) for h in held]
        most = max(limits, default=0)
        if len(held) > most:
            found.append(Violation("I1", "over_budget", f"{len(held)} {kind} slots held, {most} allowed"))
        found += [
            Violation("I1", "slot_beyond_policy", f"slot {h.session.slot} of {limit}", h.permit)
            for h, limit in zip(held, limits, strict=True) if h.session.slot >= limit
        ]
    return found


def generations_together(snapshot: LedgerSnapshot) -> list[Violation]:
    """I11: no move of the alias lets two generations hold more than the larger of them has; and one that is
    newer than the active one has sessions only while it takes over, or is being rolled back."""
    alias = snapshot.alias
    if alias is None or snapshot.active_limits is None:
        return []
    grant = {alias.granting, alias.taking_over} - {0}
    found: list[Violation] = []
    for kind in (Kind.MAIN, Kind.RESERVE):
        held = snapshot.held(kind)
        together = sum(each.session.policy_generation in grant for each in held)
        most = snapshot.active_limits.of(kind)
        if together > most:
            found.append(Violation("I11", "generations_over_budget",
                                   f"{together} {kind} slots held under {sorted(grant)}, {most} allowed"))
        found += [
            Violation("I11", "granted_by_none", f"generation {each.session.policy_generation} does not grant",
                      each.permit)
            for each in held
            if each.session.policy_generation > alias.active
            and each.session.policy_generation not in (alias.taking_over, alias.withdrawn)
        ]
    return found


def _slots(snapshot: LedgerSnapshot, generation: int, kind: Kind) -> int:
    return snapshot.limits.get(generation, snapshot.active_limits or Limits(0)).of(kind)


def balanced(snapshot: LedgerSnapshot, keys: DbKeys) -> list[Violation]:
    """I4 as a balance: each request holds one slot at most, each seat is one session's and the reverse."""
    sessions = [held.session for held in snapshot.sessions]
    requests = Counter(session.request_id for session in sessions)
    found = [
        Violation("I4", "request_holds_two", f"request {request} holds {count} slots")
        for request, count in requests.items() if count > 1
    ]
    voided = {given.request_id for given in snapshot.receipts if given.receipt.voided}
    found += [
        Violation("I4", "voided_request_holds", f"request {s.request_id} was voided", s.permit)
        for s in sessions if s.request_id in voided
    ]
    return found + _seats_match(snapshot, keys)


def _seats_match(snapshot: LedgerSnapshot, keys: DbKeys) -> list[Violation]:
    wanted = {keys.seat(s.seats_of, s.user, s.seat): s
              for s in (held.session for held in snapshot.sessions) if s.seat >= 0}
    taken = {seat.key: seat.seat for seat in snapshot.seats}
    found = [
        Violation("I4", "seat_without_session", f"{key} is taken by nobody")
        for key in taken.keys() - wanted.keys()
    ]
    found += [
        Violation("I4", "session_without_seat", f"{key} is not taken", wanted[key].permit)
        for key in wanted.keys() - taken.keys()
    ]
    found += [
        Violation("I4", "seat_of_another", f"{key} says {taken[key].request_id}", wanted[key].permit)
        for key in wanted.keys() & taken.keys() if taken[key].request_id != wanted[key].request_id
    ]
    seated = sum(held.session.seat >= 0 for held in snapshot.sessions)
    if seated != len(wanted):
        found.append(Violation("I4", "seat_shared", f"{seated} sessions sit in {len(wanted)} seats"))
    return found


def sessions_have_permits(snapshot: LedgerSnapshot, rows: Sequence[Row]) -> list[Violation]:
    """I2: each real session has exactly one permit, by (pid, backend_start) or, while it opens, birth tag.

    An OPEN permit without its session is named too: nothing is over budget then, but a slot is lost.
    """
    tag = snapshot.head.tag if snapshot.head else ""
    reaper_names = {reaper_name(tag), reaper_name(UNFOUNDED_TAG)}
    sessions = [held.session for held in snapshot.sessions]
    by_pid: dict[int, list[Session]] = {}
    for session in sessions:
        by_pid.setdefault(session.pid, []).append(session)
    by_tag = {session.permit.birth_tag(tag): session for session in by_pid.pop(0, [])}
    found: list[Violation] = []
    shown: Counter[Permit] = Counter()
    reapers = 0
    for row in rows:
        if row.application_name in reaper_names:
            reapers += 1
            continue
        owners = _permits_of(row, by_pid, by_tag)
        shown.update(session.permit for session in owners)
        if len(owners) != 1:
            what = "session_with_two_permits" if owners else "session_without_permit"
            found.append(Violation("I2", what, f"pid {row.pid} of {row.user}", pid=row.pid))
    if reapers > 1:
        found.append(Violation("I2", "second_reaper", f"{reapers} sessions are named {reaper_name(tag)}"))
    found += [
        Violation("I2", "permit_with_two_sessions", f"{count} sessions show {permit}", permit)
        for permit, count in shown.items() if count > 1
    ]
    found += [
        Violation("I2", "permit_without_session", f"pid {s.pid} is gone", s.permit, s.pid)
        for s in sessions if s.state is SessionState.OPEN and s.permit not in shown
    ]
    return found


def _permits_of(
    row: Row, by_pid: Mapping[int, Sequence[Session]], by_tag: Mapping[str, Session]
) -> list[Session]:
    """A hidden backend_start (None) contradicts nothing."""
    owners = [
        session for session in by_pid.get(row.pid, ())
        if row.backend_start_us in (None, session.backend_start_us)
    ]
    if row.application_name in by_tag:
        owners.append(by_tag[row.application_name])
    return owners


def check_releases(releases: Iterable[Released]) -> list[Violation]:
    """I4 and I5 over what was done: each permit freed once, and by a proof its row of the table allows."""
    found: list[Violation] = []
    seen: set[Permit] = set()
    for each in releases:
        if each.permit in seen:
            found.append(Violation("I4", "released_twice", f"by {each.actor}", each.permit))
        seen.add(each.permit)
        try:
            find_move(each.source, SessionState.RELEASED, each.actor, each.proof)
        except IllegalMove as why:
            found.append(Violation("I5", "released_without_proof", str(why), each.permit))
    return found
