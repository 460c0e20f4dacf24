"""What people and commands see of a ledger: the sum line, one row per permit, and an operator's attestation.

Works on a store alone, so that a dead fleet can be inspected. Times shown come from records and this
machine's clock; nothing is decided by them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.admin import NoAdminPermit
from coordinator.awaiting import Waits, proof_open
from coordinator.ledger.attestation import ORDERED, Attestation
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.ledger import Applied, Ledger
from coordinator.ledger.proofs import Look
from coordinator.ledger.record import Kind, Permit, Session
from coordinator.ledger.rules import Release
from coordinator.ledger.snapshot import Held, LedgerSnapshot
from coordinator.ledger.states import Actor, Proof, SessionState
from coordinator.looks import Eyes, LookFailed
from coordinator.session_table import (
    Activity,
    Doing,
    TableUnreadable,
    list_tables,
    read_head,
    read_table,
    table_path,
)
from coordinator.store.api import Put, Store, StoreUnavailable, StoreUnknown, Txn, absent, unchanged

LOST_WITH_HOST = "lost with host"  # in the place of a ticket: its host has no coordinator that could read it
Activities = Mapping[tuple[str, Permit], Doing]


def read_activities(run_dir: Path) -> dict[tuple[str, Permit], Doing]:
    """What each session of this host's tables is doing; a table that cannot be read is left out."""
    return {key: doing for boot_id in list_tables(run_dir)
            for key, doing in read_table_of(run_dir, boot_id).items()}


def read_table_of(run_dir: Path, boot_id: str) -> dict[tuple[str, Permit], Doing]:
    """The same of one worker; of a table that cannot be read nothing."""
    try:
        rows = read_table(table_path(run_dir, boot_id))
        return {(row.db, Permit(Kind(row.kind), row.slot, row.generation)): row.doing for row in rows}
    except (TableUnreadable, OSError, ValueError):
        return {}


def remove_table(run_dir: Path, boot_id: str) -> None:
    """The session table of a worker of which nothing is left; no table here is no error."""
    try:
        table_path(run_dir, boot_id).unlink(missing_ok=True)
    except (ValueError, OSError):
        return


def tables_without_process(run_dir: Path) -> list[str]:
    """Boot ids of tables whose process is gone from /proc."""
    found = []
    for boot_id, path in list_tables(run_dir).items():
        try:
            pid = read_head(path).pid
        except (TableUnreadable, OSError):
            continue
        if not Path(f"/proc/{pid}").exists():
            found.append(boot_id)
    return found


def shown_state(session: Session, doing: Doing | None) -> str:
    """OPEN is refined by the worker's table where that can be read."""
    if session.state is SessionState.OPEN and doing is not None and doing.activity is not Activity.TORN:
        return f"OPEN_{doing.activity.upper()}"
    return str(session.state)


SHOWN_STATES = (  # every state that a row may show
    *(str(state) for state in SessionState if state not in (SessionState.OPEN, SessionState.RELEASED)),
    "OPEN", *(f"OPEN_{activity.upper()}" for activity in (Activity.IDLE, Activity.BUSY)))


def doing_of(activities: Activities, db: str, session: Session) -> Doing | None:
    """What its worker's table says of a session; of one that was moved, maybe by a permit it had before."""
    names = (session.permit, *session.former_permits)
    return next((activities[db, each] for each in names if (db, each) in activities), None)


def session_rows(
    db: str, snapshot: LedgerSnapshot, activities: Activities, now_us: int,
    waits: Mapping[str, Waits] | None = None, hosts: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """One row per permit, unknown ones first, then by slot. Ages in seconds. `waits`: what the leader says;
    `hosts`: those with a coordinator, where that is known."""
    ordered = sorted(snapshot.sessions, key=lambda held: (
        held.session.state is not SessionState.UNKNOWN, str(held.session.kind), held.session.slot))
    return [_row(db, held, doing_of(activities, db, held.session), now_us,
                 (waits or {}).get(str(held.permit)))
            | _owner(held.session, snapshot, hosts) for held in ordered]


def _owner(session: Session, snapshot: LedgerSnapshot, hosts: Collection[str] | None) -> dict[str, str]:
    """How its owner is known to have ended; and, where nobody is left who could say so, that its ticket is
    lost."""
    died = snapshot.exits.get(session.owner)
    found = {"owner_ended": died.exit.how if died is not None else ""}
    if hosts is not None and session.host not in hosts and session.pid and not session.ticket and (
            session.state is SessionState.UNKNOWN and session.kind is not Kind.ADMIN):
        found["ticket"] = LOST_WITH_HOST
    return found


def _row(
    db: str, held: Held, doing: Doing | None, now_us: int, waits: Waits | None
) -> dict[str, Any]:
    session = held.session
    unknown = session.state is SessionState.UNKNOWN
    if held.unreadable:
        waits = Waits("unreadable", "", f"an operator: it is unreadable ({held.unreadable})", 0)
    elif unknown and waits is None:
        waits = Waits(proof_open(session), session.backend.address if session.backend else "",
                      _proofs_open(session), 0)
    return {
        "database": db, "permit": str(session.permit), "kind": str(session.kind), "slot": session.slot,
        "generation": session.generation, "state": shown_state(session, doing),
        "age_seconds": 0.0 if held.unreadable else max(0, now_us - session.state_since_us) / 1_000_000,
        "owner": session.owner, "host": session.host, "dbname": session.dbname, "user": session.user,
        "pid": session.pid, "backend": session.backend.address if session.backend else "",
        "epoch": session.epoch, "policy_generation": session.policy_generation,
        "ticket": session.ticket or (str(doing.ticket_id) if doing and doing.ticket_id else ""),
        "tenant": session.tenant or (doing.tenant if doing else ""),
        "abandoned": session.abandoned, "terminating": session.terminating,
        "awaited_proof": waits.reason if unknown and waits else "",
        "waits_for": waits.text() if unknown and waits else "",
        "waits_since_us": waits.since_us if unknown and waits else 0,
        "unreachable_since_us": waits.unreachable_since_us if unknown and waits else 0,
    }


def _proofs_open(session: Session) -> str:
    if session.pid:
        return f"absent or restarted (pid {session.pid})"
    return "never_born" if session.backend else "attested"


@dataclass(frozen=True, slots=True)
class Sum:
    """The ledger in figures: held slots by state, per kind how many there are, the oldest unknown."""

    slots: int
    by_state: Mapping[str, int]
    free: int
    reserve_held: int
    reserve_slots: int
    epoch: int
    oldest_unknown_seconds: float | None
    awaited: str
    kept: int = 0  # of the free ones, for a failover
    frozen: str = ""  # by whom

    def line(self) -> str:
        """For people."""
        states = ", ".join(f"{count} {_word(state)}" for state, count in sorted(self.by_state.items()))
        oldest = ""
        if self.oldest_unknown_seconds is not None:  # "unknown" is the last of the states
            waits = f", waits for {self.awaited}" if self.awaited else ""
            what = "oldest" if str(SessionState.UNKNOWN) in self.by_state else "oldest unknown"
            oldest = f" ({what} {self.oldest_unknown_seconds:.0f} s{waits})"
        kept = f" ({self.kept} of them for a failover)" if self.kept else ""
        return (f"{self.slots} slots: {states + oldest + ', ' if states else ''}{self.free} free{kept}; "
                f"reserve {self.reserve_held}/{self.reserve_slots}; epoch {self.epoch}"
                + (f"; frozen by {self.frozen}" if self.frozen else ""))


def _word(state: str) -> str:
    return state.removeprefix("SESSION_").removeprefix("OPEN_").lower()


def _kept_free(snapshot: LedgerSnapshot) -> int:
    """Free main slots that nobody is granted before a failover."""
    limits = snapshot.active_limits
    if limits is None:
        return 0
    first = limits.usable(Kind.MAIN, snapshot.epoch is not None and snapshot.epoch.failover)
    held = {each.session.slot for each in snapshot.held(Kind.MAIN)}
    return sum(slot not in held for slot in range(first, limits.main))


def sum_up(snapshot: LedgerSnapshot, rows: Sequence[Mapping[str, Any]]) -> Sum:
    """The figures of `session_rows`."""
    limits = snapshot.active_limits
    main = [row for row in rows if row["kind"] == Kind.MAIN]
    unknown = [row for row in rows if row["state"] == SessionState.UNKNOWN]
    oldest = max(unknown, key=lambda row: float(row["age_seconds"]), default=None)
    slots = limits.main if limits else 0
    return Sum(
        slots=slots,
        by_state=dict(Counter(str(row["state"]) for row in main)),
        free=max(0, slots - len(main)),
        kept=_kept_free(snapshot),
        reserve_held=sum(row["kind"] == Kind.RESERVE for row in rows),
        reserve_slots=limits.reserve if limits else 0,
        epoch=snapshot.epoch.number if snapshot.epoch else 0,
        oldest_unknown_seconds=float(oldest["age_seconds"]) if oldest else None,
        awaited=str(oldest["waits_for"]) if oldest else "",
        frozen=snapshot.head.frozen if snapshot.head else "",
    )


# ---- an operator's attestation


@dataclass(frozen=True, slots=True)
class Resolved:
    """What became of one permit that an operator attested."""

    permit: Permit
    freed: bool
    why: str  # why not, or who could have seen it


async def resolve(
    store: Store, keys: FleetKeys, ledger: Ledger, permits: Sequence[Permit], *, who: str, evidence: str,
    eyes: Eyes | None, now_us: Callable[[], int],
) -> list[Resolved]:
    """Frees permits in SESSION_UNKNOWN on an operator's word, each by CAS, with an `operator/` entry
    each, which tells in the end what came of it.

    Refused for a permit whose session a look can see. Raises StoreUnavailable, StoreUnknown; NoAdminPermit if
    no look can be made for want of one; ValueError without evidence.
    """
    if not evidence.strip():
        raise ValueError("an attestation needs its evidence in words")
    snapshot = await ledger.snapshot()
    return [await _resolve_one(store, keys, ledger, snapshot.find(permit), permit, who=who,
                               evidence=evidence, eyes=eyes, now_us=now_us, snapshot=snapshot)
            for permit in permits]


async def _resolve_one(
    store: Store, keys: FleetKeys, ledger: Ledger, held: Held | None, permit: Permit, *, who: str,
    evidence: str, eyes: Eyes | None, now_us: Callable[[], int], snapshot: LedgerSnapshot,
) -> Resolved:
    if held is None:
        return Resolved(permit, freed=False, why="no such permit: released, or its slot has another tenant")
    if held.unreadable:
        return Resolved(permit, freed=False, why=f"its record cannot be read: {held.unreadable}")
    if held.session.state is not SessionState.UNKNOWN:
        return Resolved(permit, freed=False, why=f"it is {held.session.state}, not {SessionState.UNKNOWN}")
    tag = snapshot.head.tag if snapshot.head else ""
    seen, note = await _can_be_seen(held.session, tag, eyes)
    if seen:
        return Resolved(permit, freed=False, why=note)
    what = f"free {permit} of {ledger.keys.database} (owner {held.session.owner}, pid {held.session.pid})"
    word = Attestation(who, what, evidence, now_us(), ledger.keys.database, ORDERED)
    noted = word.put(keys)
    written = await store.txn(Txn((absent(noted.key),), (noted,)))
    outcome = await ledger.apply(Release(
        permit, Proof.ATTESTED, Actor.OPERATOR, observer=who, seen_revision=held.mod_revision))
    told = Resolved(permit, freed=True, why=note)
    if not isinstance(outcome, Applied):
        told = Resolved(permit, freed=False, why=f"{outcome.code}: {outcome.detail or 'it moved meanwhile'}")
    if isinstance(outcome, Applied) or outcome.settled:
        came = replace(word, outcome="freed" if told.freed else f"not freed: {told.why}")
        with suppress(StoreUnavailable, StoreUnknown):  # then it says that it was ordered, and no more
            await store.txn(Txn(
                (unchanged(noted.key, written.revision),), (Put(noted.key, came.encode()),)))
    return told


async def _can_be_seen(session: Session, tag: str, eyes: Eyes | None) -> tuple[bool, str]:
    """(whether a look shows the session, what to say about it)."""
    if eyes is None or session.backend is None:
        return False, "nobody could look at its server"
    try:
        look = await eyes.look(session.backend.address)
    except LookFailed as failed:
        return False, f"its server could not be looked at: {failed}"
    except NoAdminPermit as none:
        if session.kind is not Kind.ADMIN:
            raise
        return False, f"its server could not be looked at: {none}"  # perhaps because this one is not free
    pid = _visible_pid(session, look, tag)
    if pid is not None:
        return True, f"it can be seen at {session.backend.address}: pid {pid}"
    return False, f"a look at {session.backend.address} does not show it"


def _visible_pid(session: Session, look: Look, tag: str) -> int | None:
    birth_tag = session.permit.birth_tag(tag)
    for row in look.rows:
        same = row.pid == session.pid and row.backend_start_us in (None, session.backend_start_us)
        if row.application_name == birth_tag or (session.pid and same):
            return row.pid
    return None

