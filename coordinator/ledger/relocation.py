"""What becomes of sessions in slots that the policy no longer has, or keeps for a failover.

Pure. They go on in lower slots that are free, without a reconnect; those for which there is none are given up
as they fall idle. Every coordinator works this out from the same entries for the whole ledger, and acts on
what its own workers hold: so that two of them seldom try the same slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.ledger.limits import Limits
from coordinator.ledger.record import Kind, LedgerState, Permit, Session
from coordinator.ledger.rules import Relocate
from coordinator.ledger.siblings import may_move_to
from coordinator.ledger.snapshot import LedgerSnapshot
from coordinator.ledger.states import SessionState

SHRUNK = (Kind.MAIN, Kind.RESERVE, Kind.REPLICATION)  # those of commands are soon over
GIVEN_UP = (Kind.MAIN, Kind.RESERVE)  # no client loses a replication connection for it


@dataclass(frozen=True, slots=True)
class Excess:
    """What is to be done with sessions in slots that they are not to be in, of owners that are registered.

    `moves`: with where each goes. `given_up`: for these there is no room.
    """

    moves: tuple[tuple[Session, Relocate], ...] = ()
    given_up: tuple[Session, ...] = ()


def is_high(permit: Permit, limits: Limits, *, failover: bool) -> bool:
    """Whether a session is not to be in this slot; `failover`: Epoch.failover."""
    return permit.kind in SHRUNK and permit.slot >= limits.usable(permit.kind, failover)


def find_excess(snapshot: LedgerSnapshot) -> Excess:
    """Lowest slots first, after those of sessions that may not go to every slot.

    Nothing while the ledger is not ACTIVE, or no policy says how many slots it has.
    """
    head, limits, epoch = snapshot.head, snapshot.active_limits, snapshot.epoch
    if head is None or head.state is not LedgerState.ACTIVE or limits is None or epoch is None:
        return Excess()
    moves: list[tuple[Session, Relocate]] = []
    given_up: list[Session] = []
    for kind in SHRUNK:
        held = [each.session for each in snapshot.held(kind)]
        taken = {each.slot for each in held}
        free = [slot for slot in range(limits.usable(kind, epoch.failover)) if slot not in taken]
        for session in sorted(held, key=lambda each: (not each.siblings, each.slot)):
            high = is_high(session.permit, limits, failover=epoch.failover)
            if not _goes(session, snapshot) or not (high or _is_withdrawn(session, snapshot)):
                continue
            slot = next((each for each in free if may_move_to(session, each)), None) if high else None
            if slot is not None:
                free.remove(slot)
                moves.append((session, Relocate(session.permit, kind, slot, snapshot.head_revision)))
            elif kind in GIVEN_UP:
                given_up.append(session)
    return Excess(tuple(moves), tuple(given_up))


def _is_withdrawn(session: Session, snapshot: LedgerSnapshot) -> bool:
    """Its policy generation is being rolled back, and this is one of the sessions that have to end for it."""
    withdrawn = snapshot.alias.withdrawn if snapshot.alias else 0
    return withdrawn != 0 and session.policy_generation == withdrawn


def _goes(session: Session, snapshot: LedgerSnapshot) -> bool:
    """Only what is open goes: what is being opened is on its way there, anything else on its way out."""
    return session.state is SessionState.OPEN and session.owner in snapshot.workers
