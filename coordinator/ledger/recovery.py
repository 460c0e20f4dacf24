"""A ledger that takes a lost one's place: which slot each session gets that lives, and when it may grant.

Pure. A worker's open session gets its slot back, or another; any other session that a server shows under a
role of ours gets one in SESSION_UNKNOWN, as what a worker may still come for, and as what is proven gone like
any other. Two may find the same session at the same time: its receipt, named after the server process, lets
one of them win. While the ledger is RECOVERING nothing is granted beside this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from coordinator.ledger.claims import NO_CLAIMS, Claims
from coordinator.ledger.keys import DbKeys
from coordinator.ledger.living import Living
from coordinator.ledger.proofs import Look, Row
from coordinator.ledger.record import (
    Backend,
    Kind,
    LedgerHead,
    LedgerState,
    Permit,
    Receipt,
    Seat,
    Session,
    Worker,
    pool_name,
)
from coordinator.ledger.snapshot import Held, LedgerSnapshot
from coordinator.ledger.states import SessionState
from coordinator.spec import DatabaseSpec
from coordinator.store.api import Compare, Put, Txn, absent, unchanged

NOBODY = ""  # owner of a session that only its server shows


@dataclass(frozen=True, slots=True)
class Recovered:
    """What to write, and the session that then stands; a new one's generation comes from the revision."""

    txn: Txn
    session: Session


@dataclass(frozen=True, slots=True)
class Role:
    """Whose sessions at a server are ours. Without a user: only those that were born there under a permit."""

    dbname: str
    user: str


def roles_of(specs: Iterable[DatabaseSpec]) -> set[Role]:
    """Those that the config knows."""
    return {Role(spec.dbname, user) for spec in specs for user in ("", *spec.users)}


def receipt_name(head: LedgerHead, pid: int, backend_start_us: int) -> str:
    """The request under which a session found living gets its slot: one for each server process."""
    return f"recovered-{head.incarnation[:8]}-{pid}-{backend_start_us}"


def plan_living(
    living: Living, snapshot: LedgerSnapshot, keys: DbKeys, head_revision: int, *, owner: str, host: str,
    now_us: int,
) -> Recovered | None:
    """The slot of a session that `owner` holds; None where none is free: the session is to be closed.

    A slot that names the same server process is taken over, whoever it was thought to belong to; unless it
    is to be terminated. A new one is made only while the ledger is RECOVERING: once it grants, whatever lives
    has one.
    """
    worker = snapshot.workers.get(owner)
    if worker is None or snapshot.head is None:
        return None
    registered = unchanged(keys.worker(owner), worker.mod_revision)
    standing = _of_process(snapshot, living.process, living.backend)
    if standing is not None:
        return _taken_over(standing, living, keys, registered, worker.worker, host=host, now_us=now_us)
    if snapshot.head.state is not LedgerState.RECOVERING:
        return None
    slot = _free_slot(snapshot, living.permit)
    if slot is None:
        return None
    seats = {seat.key for seat in snapshot.seats}
    seat = next((n for n in range(living.seats)
                 if keys.seat(pool_name(living.dbname, living.pool), living.user, n) not in seats), -1)
    session = Session(
        kind=living.permit.kind, slot=slot, generation=-snapshot.head.generation_base,
        state=SessionState.OPEN, owner=owner, host=host, dbname=living.dbname, user=living.user,
        pool=living.pool, seat=seat,
        request_id=receipt_name(snapshot.head, *living.process),
        epoch=living.epoch, policy_generation=snapshot.alias.granting if snapshot.alias else 0,
        backend=living.backend, pid=living.pid, backend_start_us=living.backend_start_us,
        state_since_us=now_us, machine=worker.worker.machine_id, kernel_boot=worker.worker.kernel_boot_id)
    return _made(session, keys, (registered, unchanged(keys.ledger(), head_revision)))


def plan_shown(
    row: Row, backend: Backend, snapshot: LedgerSnapshot, keys: DbKeys, head_revision: int, now_us: int
) -> Recovered:
    """The slot in SESSION_UNKNOWN of a session that a server shows and no permit names.

    Where all slots are held it gets one beyond them: then nothing is granted before it is gone.
    """
    head = snapshot.head
    assert head is not None  # whoever calls is rebuilding it
    taken = {held.session.slot for held in snapshot.held(Kind.MAIN)}
    session = Session(
        kind=Kind.MAIN, slot=next(n for n in count() if n not in taken), generation=-head.generation_base,
        state=SessionState.UNKNOWN, owner=NOBODY, host="", dbname=row.dbname or "", user=row.user or "",
        seat=-1, request_id=receipt_name(head, row.pid, row.backend_start_us or 0),
        epoch=snapshot.epoch.number if snapshot.epoch else 0,
        policy_generation=snapshot.alias.granting if snapshot.alias else 0, backend=backend, pid=row.pid,
        backend_start_us=row.backend_start_us or 0, state_since_us=now_us)
    return _made(session, keys, (unchanged(keys.ledger(), head_revision),))


def without_permit(
    snapshot: LedgerSnapshot, look: Look, roles: Collection[Role], elsewhere: Claims = NO_CLAIMS
) -> list[Row]:
    """The sessions of our roles, or of our birth tags, that no permit at this server names and no other
    ledger claims (`elsewhere`)."""
    named = {(held.session.pid, held.session.backend_start_us) for held in snapshot.sessions
             if held.session.backend is None or held.session.backend.address == look.backend.address}
    return [row for row in look.rows
            if (row.pid, row.backend_start_us) not in named and is_ours(row, roles, elsewhere)]


def disagreement(
    snapshot: LedgerSnapshot, looks: Iterable[Look], roles: Collection[Role], elsewhere: Claims = NO_CLAIMS
) -> str:
    """Why a RECOVERING ledger may not grant yet; "" when servers and ledger agree.

    `looks` are of every node that can have sessions of this ledger, taken after all live workers had said
    what they hold.
    """
    assert snapshot.head is not None
    for look in looks:
        if look.void is not None:
            return look.void
        rows = without_permit(snapshot, look, roles, elsewhere)
        if rows:
            return f"pid {rows[0].pid} of {rows[0].user} at {look.backend.address} has no permit yet"
        if look.anonymous:
            return f"pid {min(look.anonymous)} at {look.backend.address} is starting and has no name yet"
        shown = {(row.pid, row.backend_start_us) for row in look.rows}
        for held in snapshot.sessions:
            session = held.session
            here = session.backend is not None and session.backend.address == look.backend.address
            if session.state is SessionState.OPEN and here and (
                    (session.pid, session.backend_start_us) not in shown):
                return f"{session.permit} is open and its server does not show pid {session.pid}"
    return ""


def not_heard(snapshot: LedgerSnapshot, db: str) -> list[str]:
    """Boot ids of live workers that have not said yet what they hold."""
    assert snapshot.head is not None
    return sorted(
        boot_id for boot_id, each in snapshot.workers.items()
        if each.worker.index >= 0 and each.worker.recovered.get(db) != snapshot.head.incarnation)


def is_ours(row: Row, roles: Collection[Role], elsewhere: Claims = NO_CLAIMS) -> bool:
    """A session of one of these roles, or born under a permit, that no other ledger claims.

    A coordinator's own look has no permit, also where the monitor's role is a pool's; no client can bear its
    name.
    """
    named = row.application_name.startswith("pooler:")
    if elsewhere.has(row) or not row.is_client or (named and row.application_name.endswith(":reaper")):
        return False
    if named:
        return row.dbname in {role.dbname for role in roles}
    return Role(row.dbname or "", row.user or "") in roles


def _of_process(snapshot: LedgerSnapshot, process: tuple[int, int], backend: Backend) -> Held | None:
    return next(
        (held for held in snapshot.sessions
         if (held.session.pid, held.session.backend_start_us) == process and held.session.backend is not None
         and held.session.backend.same_server(backend)), None)


def _taken_over(
    standing: Held, living: Living, keys: DbKeys, registered: Compare, owner: Worker, *,
    host: str, now_us: int,
) -> Recovered | None:
    session = standing.session
    lives = session.state in (SessionState.OPEN, SessionState.UNKNOWN)
    if session.terminating or session.kind is not living.permit.kind or not lives:
        return None
    mine = replace(
        session, state=SessionState.OPEN, owner=owner.boot_id, host=host, epoch=living.epoch,
        backend=living.backend, abandoned=False, ticket="", state_since_us=now_us,
        machine=owner.machine_id, kernel_boot=owner.kernel_boot_id)
    key = keys.session(session.kind, session.slot)
    put = Put(key, mine.encode())
    return Recovered(
        Txn((unchanged(key, standing.mod_revision), registered), puts=(put,)), mine)


def _free_slot(snapshot: LedgerSnapshot, permit: Permit) -> int | None:
    """The slot that it had, if that is free, else the lowest free one of its kind."""
    limit = snapshot.active_limits.of(permit.kind) if snapshot.active_limits else 0
    taken = {held.session.slot for held in snapshot.held(permit.kind)}
    order: Iterator[int] | Sequence[int] = (permit.slot, *range(limit))
    return next((slot for slot in order if slot < limit and slot not in taken), None)


def _made(session: Session, keys: DbKeys, compares: tuple[Compare, ...]) -> Recovered:
    """Its receipt is on no lease: a worker's may end while the leader still goes by an older look, which has
    the session without a permit. It goes when the ledger grants again, and nothing is recovered any more."""
    slot, receipt = keys.session(session.kind, session.slot), keys.receipt(session.request_id)
    given = Receipt(session.kind, session.slot, base=-session.generation)
    puts = [Put(slot, session.encode()), Put(receipt, given.encode())]
    if session.seat >= 0:
        seat = keys.seat(session.seats_of, session.user, session.seat)
        puts.append(Put(seat, Seat(session.kind, session.slot, session.request_id).encode()))
    new = [absent(put.key) for put in puts]
    return Recovered(Txn((*compares, *new), puts=tuple(puts)), session)
