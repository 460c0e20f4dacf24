"""What may become of one session permit: decided from the entry that was read, never from memory.

Pure. `decide` turns (entry, command) into one transaction or says why not; every move it produces is a row
of `states.MOVES`. Two things hold for every write: it compares the slot's mod revision, and the command's
permit is the one that stands there (a permit of another generation is somebody else's: `gone`).

The generation of a permit is the create revision of its receipt; in a rebuilt ledger, whose revisions may
have been those of the lost one's permits, plus a base that is above them all. The transaction that reserves
cannot know it, so it stores the base, negative (0 without one); as long as that is stored, the value is the
one the reserving transaction wrote, hence the *mod* revision of the slot's key is the receipt's create
revision. Every later write stores the number. This also holds when a slot is handed over in place (its create
revision then stays that of the session before), and a session that moves to another slot keeps the number
because the move is a later write.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from coordinator.ledger.keys import DbKeys, only
from coordinator.ledger.record import Backend, Kind, Permit, Seat, Session
from coordinator.ledger.siblings import may_move_to
from coordinator.ledger.states import Actor, IllegalMove, Proof, SessionState, find_move
from coordinator.store.api import Compare, Entry, Put, Txn, absent, unchanged


class Code(StrEnum):
    """One-word reasons of a refusal; those of docs/link.md and the reapers' own."""

    GONE = "gone"  # no such permit: released, or the slot has another tenant
    TERMINATING = "terminating"  # it is about to be terminated: close it, do not reassert
    ABANDONED = "abandoned"  # the owner said that it gave this attempt up: it may not come back
    ILLEGAL = "illegal"  # the state table has no such move from where the permit stands
    CONFLICT = "conflict"  # the permit records another server process
    CHANGED = "changed"  # the permit moved after the evidence was taken: look again
    UNPROVEN = "unproven"  # the proof does not apply to this permit
    OWNER_LIVES = "owner_lives"  # the owner has a worker key (again)
    FULL = "full"
    NO_GROWTH = "no_growth"  # a server has no room for what the policies promise
    SEATS_FULL = "seats_full"
    DRAINING = "draining"
    FROZEN = "frozen"  # an operator forbade growth
    VOIDED = "voided"
    LEDGER_UNAVAILABLE = "ledger_unavailable"
    LEDGER_LOST = "ledger_lost"


@dataclass(frozen=True, slots=True)
class Connecting:
    """The owner starts to connect. Sent beside the connect, not waited for."""

    permit: Permit


@dataclass(frozen=True, slots=True)
class Open:
    """The owner connected and knows the server process. Also from UNKNOWN: that is a reassertion."""

    permit: Permit
    pid: int
    backend_start_us: int
    backend: Backend


@dataclass(frozen=True, slots=True)
class Closing:
    """The owner is about to send Terminate."""

    permit: Permit


@dataclass(frozen=True, slots=True)
class Release:
    """The session is gone, and why that is known.

    `seen_revision`: the slot's mod revision the evidence was taken on (reapers; 0: the owner's own word).
    `exit_revision`: mod revision of the owner's `worker-exit` key, where its process is known dead.
    """

    permit: Permit
    proof: Proof
    actor: Actor
    observer: str = ""
    seen_revision: int = 0
    exit_revision: int = 0


@dataclass(frozen=True, slots=True)
class Unknown:
    """The owner cannot say whether the session still exists. `abandoned`: it closed an unanswered attempt."""

    permit: Permit
    abandoned: bool = False


@dataclass(frozen=True, slots=True)
class MarkOwnerGone:
    """The owner reaper found no worker key; `ticket` is the one in a transaction on it, where known, and
    `tenant` whose."""

    permit: Permit
    ticket: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class NoteTicket:
    """A dead owner's host read which ticket was in a transaction on it: noted, no move."""

    permit: Permit
    ticket: str
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Reassert:
    """The owner still holds the session (`closing`: and is closing it)."""

    permit: Permit
    closing: bool = False


@dataclass(frozen=True, slots=True)
class Terminating:
    """The backend reaper will call pg_terminate_backend; noted first, so the owner does not come back."""

    permit: Permit
    seen_revision: int = 0


@dataclass(frozen=True, slots=True)
class Relocate:
    """The session goes on in another slot, which is free: a lower one of its kind, or one of the main ones.

    `head_revision`: mod revision of the `ledger/` key as it was read, ACTIVE.
    """

    permit: Permit
    kind: Kind
    slot: int
    head_revision: int


Command = (
    Connecting | Open | Closing | Release | Unknown | MarkOwnerGone | Reassert | Terminating | Relocate
    | NoteTicket
)


@dataclass(frozen=True, slots=True)
class Write:
    """Carry out `txn`; `session` is what then stands in the slot (None: released)."""

    txn: Txn
    session: Session | None


@dataclass(frozen=True, slots=True)
class Already:
    """Nothing to write: it is so already."""

    session: Session


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was written, and why. `settled` False: an earlier attempt may still take effect."""

    code: Code
    detail: str = ""
    settled: bool = True


Decision = Write | Already | Refused


def session_of(entry: Entry) -> Session:
    """The session in a slot, with its generation filled in (see the head of this module)."""
    session = Session.decode(entry.value)
    if session.generation > 0:
        return session
    return replace(session, generation=entry.mod_revision - session.generation)


def decide(entry: Entry | None, command: Command, keys: DbKeys, now_us: int) -> Decision:
    """What `command` does to the slot as it was read.

    Arguments: `entry` is the slot's key now (None: there is none); `now_us` is shown, never compared.
    Never raises for what a peer sent: a move the table lacks is refused as `illegal`.
    """
    if entry is None:
        return Refused(Code.GONE)
    session = session_of(entry)
    if session.permit != command.permit:
        return Refused(Code.GONE, f"the slot is held by {session.permit}")
    move = _Mover(entry, session, keys, now_us)
    match command:
        case Connecting():
            return _connecting(session, move)
        case Open():
            return _open(session, command, move)
        case Closing():
            return _closing(session, move)
        case Release():
            return _release(session, command, move)
        case Unknown():
            return _unknown(session, command, move)
        case MarkOwnerGone():
            return _mark_owner_gone(session, command, move)
        case Reassert():
            return _closing(session, move) if command.closing else _reassert(session, move)
        case Terminating():
            return _terminating(session, command, move)
        case Relocate():
            return _relocate(session, command, move)
        case NoteTicket():
            return _note_ticket(session, command, move)


@dataclass(frozen=True, slots=True)
class _Mover:
    """Builds the transaction of one move of one slot as it was read; the table has the last word."""

    entry: Entry
    session: Session
    keys: DbKeys
    now_us: int

    def to(self, target: SessionState, actor: Actor, *compares: Compare, **changes: Any) -> Decision:
        """A move that frees nothing."""
        try:
            find_move(self.session.state, target, actor)
        except IllegalMove as why:
            return Refused(Code.ILLEGAL, str(why))
        since = self.session.state_since_us if target is self.session.state else self.now_us
        moved = self.session.moved(target, since, **changes)
        put = Put(self.entry.key, moved.encode())
        return Write(Txn(self._compares(compares), puts=(put,), reads=self._reads()), moved)

    def note(self, **changes: Any) -> Decision:
        """What is known of it, where it stands."""
        noted = replace(self.session, **changes)
        put = Put(self.entry.key, noted.encode())
        return Write(Txn(self._compares(()), puts=(put,), reads=self._reads()), noted)

    def across(self, kind: Kind, slot: int, head_revision: int) -> Decision:
        """The session in a free slot, and its seat with it: one key is put and the other deleted at once."""
        before = self.session
        if before.state is not SessionState.OPEN:
            return Refused(Code.ILLEGAL, f"{before.permit} is {before.state}")
        find_move(before.state, before.state, Actor.OWNER)
        moved = replace(before, kind=kind, slot=slot,
                        left_slots=(*before.left_slots, f"{before.kind}/{before.slot}"))
        puts = [Put(self.keys.session(kind, slot), moved.encode())]
        puts += [Put(key, Seat(kind, slot, moved.request_id).encode()) for key in seat_keys(moved, self.keys)]
        compares = self._compares((absent(puts[0].key), unchanged(self.keys.ledger(), head_revision)))
        return Write(Txn(compares, tuple(puts), (self.entry.key,), self._reads()), moved)

    def out(self, proof: Proof, actor: Actor, *compares: Compare) -> Decision:
        """The release: deletes only, which even a full etcd carries out."""
        try:
            find_move(self.session.state, SessionState.RELEASED, actor, proof)
        except IllegalMove as why:
            return Refused(Code.ILLEGAL, str(why))
        deletes = (self.entry.key, *seat_keys(self.session, self.keys))
        return Write(Txn(self._compares(compares), deletes=deletes, reads=self._reads()), None)

    def _compares(self, more: tuple[Compare, ...]) -> tuple[Compare, ...]:
        return (unchanged(self.entry.key, self.entry.mod_revision), *more)

    def _reads(self) -> tuple[tuple[str, str], ...]:
        return only(self.entry.key), only(self.keys.ledger())


def seat_keys(session: Session, keys: DbKeys) -> tuple[str, ...]:
    """The key of the session's seat, if it has one."""
    if session.seat < 0:
        return ()
    return (keys.seat(session.seats_of, session.user, session.seat),)


def _connecting(session: Session, move: _Mover) -> Decision:
    if session.state in (SessionState.CONNECTING, SessionState.OPEN):
        return Already(session)
    return move.to(SessionState.CONNECTING, Actor.OWNER)


def _open(session: Session, command: Open, move: _Mover) -> Decision:
    process = (command.pid, command.backend_start_us)
    if session.pid and process != (session.pid, session.backend_start_us):
        return Refused(Code.CONFLICT, f"it records server process {session.pid}")
    if session.state is SessionState.OPEN:
        return Already(session)
    return _returning(session) or move.to(
        SessionState.OPEN, Actor.OWNER,
        pid=command.pid, backend_start_us=command.backend_start_us, backend=command.backend, ticket="",
        tenant="")


def _closing(session: Session, move: _Mover) -> Decision:
    if session.state is SessionState.CLOSING:
        return Already(session)
    return _returning(session) or move.to(SessionState.CLOSING, Actor.OWNER)


def _reassert(session: Session, move: _Mover) -> Decision:
    if session.state is not SessionState.UNKNOWN:
        return Already(session)
    if not session.pid:  # an open session was recorded with its pid: this one never got so far
        return Refused(Code.ILLEGAL, "no server process is recorded: open it instead")
    return _returning(session) or move.to(SessionState.OPEN, Actor.OWNER, ticket="", tenant="")


def _returning(session: Session) -> Refused | None:
    """Why an owner may not take a session back out of UNKNOWN, if so."""
    if session.terminating:
        return Refused(Code.TERMINATING)
    if session.abandoned:  # never_born relies on the owner's word: it cannot be taken back
        return Refused(Code.ABANDONED)
    return None


def _unknown(session: Session, command: Unknown, move: _Mover) -> Decision:
    if session.state is SessionState.UNKNOWN and (session.abandoned or not command.abandoned):
        return Already(session)
    return move.to(SessionState.UNKNOWN, Actor.OWNER, abandoned=session.abandoned or command.abandoned)


def _mark_owner_gone(session: Session, command: MarkOwnerGone, move: _Mover) -> Decision:
    if session.state is SessionState.UNKNOWN:
        return Already(session)
    no_key = absent(move.keys.worker(session.owner))
    return move.to(SessionState.UNKNOWN, Actor.OWNER_REAPER, no_key, ticket=command.ticket or session.ticket,
                   tenant=command.tenant or session.tenant)


def _note_ticket(session: Session, command: NoteTicket, move: _Mover) -> Decision:
    if session.ticket:
        return Already(session)
    if session.state is not SessionState.UNKNOWN:
        return Refused(Code.ILLEGAL, f"it is {session.state}: its owner's own word counts")
    return move.note(ticket=command.ticket, tenant=command.tenant)


def _terminating(session: Session, command: Terminating, move: _Mover) -> Decision:
    if command.seen_revision not in (0, move.entry.mod_revision):
        return Refused(Code.CHANGED)
    if session.terminating:
        return Already(session)
    if not session.pid:
        return Refused(Code.UNPROVEN, "no server process is recorded")
    return move.to(SessionState.UNKNOWN, Actor.BACKEND_REAPER, terminating=True)


def _release(session: Session, command: Release, move: _Mover) -> Decision:
    if command.seen_revision not in (0, move.entry.mod_revision):
        return Refused(Code.CHANGED)
    if command.proof in (Proof.ABSENT, Proof.RESTARTED) and not session.pid:
        return Refused(Code.UNPROVEN, f"{command.proof} needs a recorded server process")
    if command.proof is Proof.NEVER_BORN and session.pid:
        return Refused(Code.UNPROVEN, "it was born: a server process is recorded")
    if session.pid or command.proof not in (Proof.NEVER_BORN, Proof.FENCED):
        return move.out(command.proof, command.actor)
    # nothing is known to have come of it: something may yet, by an owner that was only paused
    if session.abandoned:
        return move.out(command.proof, command.actor)
    if not command.exit_revision:
        return Refused(Code.UNPROVEN, "its owner's process is not known dead")
    dead = unchanged(move.keys.worker_exit(session.owner), command.exit_revision)
    return move.out(command.proof, command.actor, dead)


def _relocate(session: Session, command: Relocate, move: _Mover) -> Decision:
    """Only ever downwards, so that a session never comes back to a slot that it had; and never into a slot
    that was granted with it: under its generation, that one's permit would come again."""
    target = (command.kind, command.slot)
    lower = command.kind is session.kind and command.slot < session.slot
    if not lower and (session.kind, command.kind) != (Kind.RESERVE, Kind.MAIN):
        return Refused(Code.ILLEGAL, f"{session.permit} does not go to {target[0]}/{target[1]}")
    if not may_move_to(session, command.slot):
        return Refused(Code.ILLEGAL, f"{target[0]}/{target[1]} is for what was granted with {session.permit}")
    return move.across(*target, command.head_revision)
