"""Which permits a reconciliation marks, looks up, terminates and frees: decided from one snapshot. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from coordinator.ledger.proofs import Awaiting, Look, Proven, never_born_interval_us, proof_of_absence
from coordinator.ledger.record import Backend, Permit, Session
from coordinator.ledger.snapshot import Held, LedgerSnapshot
from coordinator.ledger.states import SessionState


@dataclass(frozen=True, slots=True)
class Case:
    """One permit in SESSION_UNKNOWN, and where it can be looked up (None: nowhere)."""

    held: Held
    backend: Backend | None
    owner_known_dead: bool
    exit_revision: int = 0

    @property
    def session(self) -> Session:
        return self.held.session

    @property
    def key(self) -> tuple[Permit, int]:
        """A permit that moved since is another case: what was seen of it before counts no more."""
        return self.held.permit, self.held.mod_revision


def orphans(snapshot: LedgerSnapshot) -> list[Session]:
    """Permits whose owner has no worker key and that are not in SESSION_UNKNOWN yet."""
    return [held.session for held in snapshot.sessions
            if held.session.state is not SessionState.UNKNOWN and held.session.owner not in snapshot.workers]


def unknown_cases(snapshot: LedgerSnapshot) -> list[Case]:
    """Every permit in SESSION_UNKNOWN that can be read: of another it is not known what would prove it."""
    return [_case(held, snapshot) for held in snapshot.sessions
            if held.session.state is SessionState.UNKNOWN and not held.unreadable]


def _case(held: Held, snapshot: LedgerSnapshot) -> Case:
    session, epoch = held.session, snapshot.epoch
    backend = session.backend
    if backend is None and epoch is not None and epoch.number == session.epoch:
        backend = epoch.backend
    died = snapshot.exits.get(session.owner)
    return Case(held, backend, died is not None, died.mod_revision if died else 0)


@dataclass(slots=True)
class FirstLooks:
    """What one leader saw of each unknown permit: since when, and the first look for those without a pid.

    Each counts only for the case it was taken for.
    """

    looks: dict[tuple[Permit, int], Look] = field(default_factory=dict)
    since_us: dict[tuple[Permit, int], int] = field(default_factory=dict)  # by our monotonic clock

    def judge(
        self, case: Case, look: Look, *, ledger_tag: str, grace_seconds: float, tag_before: str = ""
    ) -> Proven | Awaiting:
        """What `look` proves; remembers it as the first look where it can be one."""
        first = self.looks.get(case.key)
        verdict = proof_of_absence(
            case.session, look, ledger_tag=ledger_tag, epoch_backend=case.backend,
            owner_known_dead=case.owner_known_dead, first=first, orphan_connect_grace_seconds=grace_seconds,
            tag_before=tag_before)
        if isinstance(verdict, Awaiting) and self._can_be_first(case, look, first, ledger_tag):
            self.looks[case.key] = look
        return verdict

    def wants_fresh(self, case: Case, now_us: int, grace_seconds: float) -> bool:
        """Whether the second look is due: it needs a connection of its own."""
        first = self.looks.get(case.key)
        return first is not None and now_us - first.at_us >= never_born_interval_us(first, grace_seconds)

    def keep_only(self, cases: Iterable[Case], now_us: int) -> None:
        """Forgets what was seen for permits that moved or are gone; notes when the others were first met."""
        keys = {case.key for case in cases}
        self.since_us = {key: self.since_us.get(key, now_us) for key in keys}
        self.looks = {key: look for key, look in self.looks.items() if key in keys}

    def _can_be_first(self, case: Case, look: Look, first: Look | None, ledger_tag: str) -> bool:
        if case.session.pid or look.void is not None or case.backend is None:
            return False
        if not (case.owner_known_dead or case.session.abandoned):
            return False
        tag = case.session.permit.birth_tag(ledger_tag)
        if any(row.application_name == tag for row in look.rows):
            return False
        # nothing that starts again for a later look: only a server that was restarted meanwhile does
        return first is None or not first.backend.same_server(look.backend)


def removable_exits(snapshot: LedgerSnapshot, owners_of_any_permit: Mapping[str, int]) -> list[str]:
    """Boot ids of dead workers of which neither key nor permit is left, in any ledger."""
    return [boot_id for boot_id in snapshot.exits
            if boot_id not in snapshot.workers and boot_id not in owners_of_any_permit]
