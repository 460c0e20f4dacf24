"""An operator's word about a worker: that its sessions are to end, or that its process has.

To fence a worker is to revoke its lease and to terminate the sessions it has now, each by process and start.
They are marked first, so that it closes them instead of taking them back; whether they are gone is proven as
ever. A worker that lives registers anew, without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import structlog
import trio

from coordinator.admin import NoAdminPermit
from coordinator.events import Event
from coordinator.ledger.attestation import Attestation
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.record import Permit, Session, WorkerExit
from coordinator.ledger.rules import Code, MarkOwnerGone, Refused, Terminating
from coordinator.ledger.snapshot import LedgerSnapshot
from coordinator.ledger.states import SessionState
from coordinator.looks import Eyes, LookFailed
from coordinator.store.api import Put, Store, StoreUnavailable, Txn, Won, absent, unchanged

PACE_SECONDS = 0.3
ROUNDS_MAX = 8
LEASE_HANDLE_SECONDS = 5.0  # of no lease that is made: only a handle on one that exists

_log = structlog.get_logger("coordinator.revoking")


class NotThis(Exception):
    """Which worker is meant cannot be told, or what was said of it is not so: says why."""


async def find_worker(store: Store, keys: FleetKeys, ledgers: Iterable[Ledger], name: str) -> str:
    """The boot id that `name` is, or is the beginning of: of a live worker, or of one that left permits.

    Raises NotThis, StoreUnavailable, UnknownSchema.
    """
    known = {entry.key.rpartition("/")[2] for entry in (await store.range(keys.workers())).entries}
    for ledger in ledgers:
        known |= {held.session.owner for held in (await ledger.snapshot()).sessions if held.session.owner}
    found = sorted({name} & known or {each for each in known if name and each.startswith(name)})
    if len(found) != 1:
        what = f"{len(found)} workers' boot ids begin so" if found else "no worker is there, or left a permit"
        raise NotThis(f'"{name}": {what}; `pooler ledger show` has them, `fleet status --json` in full')
    return found[0]


# ---- fencing a worker


@dataclass(slots=True)
class Fencing:
    """What became of one worker's sessions, by ledger."""

    worker: str
    terminated: dict[str, list[Permit]] = field(default_factory=dict)
    left: dict[str, list[str]] = field(default_factory=dict)  # those not proven gone (yet), in words
    failed: dict[str, str] = field(default_factory=dict)  # by server, why none could be terminated there

    @property
    def exit_code(self) -> int:
        """0 if none of them is left."""
        return 1 if any(self.left.values()) else 0


async def fence_worker(
    store: Store, keys: FleetKeys, ledgers: Mapping[str, Ledger], eyes: Mapping[str, Eyes | None],
    boot_id: str, *, who: str, evidence: str, now_us: Callable[[], int], seconds_max: float,
) -> Fencing:
    """Revokes its lease and terminates what it holds; returns when all of that is gone, or the time is over.

    Raises StoreUnavailable, StoreUnknown, NoAdminPermit.
    """
    done, noted = Fencing(boot_id), set()

    async def note(of: Iterable[str]) -> None:
        for db in [each for each in of if each not in noted]:
            noted.add(db)
            put = Attestation(who, f"fence worker {boot_id}", evidence, now_us(), db).put(keys)
            await store.txn(Txn((absent(put.key),), (put,)))

    seen = {db: (await ledger.snapshot()).of_owner(boot_id) for db, ledger in ledgers.items()}
    await note([db for db, held in seen.items() if held] or [""])  # before anything is done
    until = await _revoke(store, keys, boot_id)
    meant = {db: _granted_until(await ledger.snapshot(), boot_id, until) for db, ledger in ledgers.items()}
    await note(db for db, permits in meant.items() if permits)
    with trio.move_on_after(seconds_max):
        while await _round(store, keys, ledgers, eyes, meant, done):  # noqa: ASYNC110 - servers tell nobody
            await trio.sleep(PACE_SECONDS)  # noqa: TID251 - the pace of what is asked
    done.left = {db: [f"{session.permit}: {session.state}, pid {session.pid or 'not known'}"
                      for session in _of(await ledgers[db].snapshot(), permits)]
                 for db, permits in meant.items()}
    return done


async def _revoke(store: Store, keys: FleetKeys, boot_id: str) -> int:
    """Takes the worker's key away with its lease; a revision after which nothing was granted under that key.

    What it registers anew meanwhile stays: that was granted nothing of what is meant.
    """
    key, first = keys.worker(boot_id), 0
    for _ in range(ROUNDS_MAX):
        snapshot = await store.read(key)
        if not snapshot.entries:
            return snapshot.revision
        (entry,) = snapshot.entries
        if first not in (0, entry.create_revision):
            return entry.create_revision - 1
        first = entry.create_revision
        if entry.lease:
            await (await store.lease(LEASE_HANDLE_SECONDS, lease_id=entry.lease)).revoke()
        outcome = await store.txn(Txn((unchanged(key, entry.mod_revision),), deletes=(key,)))
        if isinstance(outcome, Won):
            return outcome.revision
    raise StoreUnavailable(f"worker {boot_id} registers all the time: its lease could not be revoked")


def _granted_until(snapshot: LedgerSnapshot, boot_id: str, revision: int) -> set[Permit]:
    """A generation is the revision of the grant, above the ledger's base (of a ledger before: below it)."""
    base = snapshot.head.generation_base if snapshot.head is not None else 0
    return {held.permit for held in snapshot.of_owner(boot_id) if held.permit.generation <= base + revision}


async def _round(
    store: Store, keys: FleetKeys, ledgers: Mapping[str, Ledger], eyes: Mapping[str, Eyes | None],
    meant: Mapping[str, set[Permit]], done: Fencing,
) -> bool:
    """Marks what is not marked yet, terminates what is; whether anything is left."""
    is_left = False
    for db, permits in meant.items():
        for session in _of(await ledgers[db].snapshot(), permits):
            is_left = True
            if session.state not in (SessionState.UNKNOWN, SessionState.CLOSING):
                marked = await ledgers[db].apply(MarkOwnerGone(session.permit))
                if isinstance(marked, Refused) and marked.code is Code.OWNER_LIVES:
                    await _revoke(store, keys, done.worker)  # it came back with this one before it was marked
                    await ledgers[db].apply(MarkOwnerGone(session.permit))
            elif session.pid and not session.terminating:
                await ledgers[db].apply(Terminating(session.permit))
            elif session.terminating and session.permit not in done.terminated.setdefault(db, []):
                looks = eyes.get(db)
                if looks is not None and await _terminate(db, session, looks, done.failed):
                    done.terminated[db].append(session.permit)
    return is_left


def _of(snapshot: LedgerSnapshot, permits: set[Permit]) -> list[Session]:
    return [held.session for held in snapshot.sessions if held.permit in permits]


async def _terminate(db: str, session: Session, eyes: Eyes, failed: dict[str, str]) -> bool:
    """Only where its very server answers."""
    if session.backend is None:
        return False
    address = session.backend.address
    try:
        look = await eyes.look(address)
        if look.void is not None or not session.backend.same_server(look.backend):
            return False
        ended = await eyes.terminate(address, session.pid, session.backend_start_us)
        failed.pop(address, None)  # not before: the time may be over meanwhile, and the reason still holds
    except NoAdminPermit:
        raise
    except LookFailed as why:
        failed[address] = str(why)
        return False
    _log.warning(Event.PERMIT_TERMINATING, database=db, permit=str(session.permit), pid=session.pid)
    return ended


# ---- an owner that an operator knows to be dead


async def attest_death(
    store: Store, keys: FleetKeys, boot_id: str, db: str, *, who: str, evidence: str,
    visible: str, now_us: Callable[[], int],
) -> bool:
    """Puts on record that this worker's process has ended; False if that is on record already.

    It frees nothing by itself: with a known death, looks can prove what left no server process. `visible`:
    why this host sees the process (empty: it does not). Raises NotThis where it does, or the worker has its
    key; StoreUnavailable, StoreUnknown; ValueError without evidence.
    """
    if not evidence.strip():
        raise ValueError("an attestation needs its evidence in words")
    if visible:
        raise NotThis(f"worker {boot_id} is not dead: {visible}")
    exit_key, key = keys.worker_exit(boot_id), keys.worker(boot_id)
    found = {entry.key for entry in (await store.read(exit_key, key)).entries}
    if key in found:
        raise NotThis(f"worker {boot_id} has a worker key: its host keeps its lease alive. If that is wrong, "
                      "fence it (`pooler fleet fence`), or wait until the lease has run out")
    if exit_key in found:
        return False
    ended = WorkerExit(boot_id, f"on the word of {who}", who, now_us())
    noted = Attestation(who, f"worker {boot_id} is dead", evidence, now_us(), db).put(keys)
    compares = (absent(exit_key), absent(key), absent(noted.key))
    if isinstance(await store.txn(Txn(compares, (Put(exit_key, ended.encode()), noted))), Won):
        return True
    raise NotThis(f"worker {boot_id} moved meanwhile: nothing was changed; look again")
