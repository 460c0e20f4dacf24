"""What is settled when a worker says hello: its registration, then every slot that stands under its boot id.

Registering puts the worker's key again, so whatever reservation of it is still on its way, sent by this
coordinator or by one before it, can only lose. What it had asked for on this host ends first; after that each
slot of it is one that it lists (or had, before its session was moved), one whose answer it has yet to get, or
one that it never connected under.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import structlog
import trio

from coordinator.events import Event
from coordinator.granting import Granting
from coordinator.ledger.ledger import Applied, Ledger
from coordinator.ledger.record import LedgerState, Permit, Receipt, Session
from coordinator.ledger.rules import Code, Release, Unknown, session_of
from coordinator.ledger.states import Actor, Proof, SessionState
from coordinator.link import Args, Link, LinkRefused
from coordinator.link_values import parse_permit, permit_list
from coordinator.registry import Local, Registry
from coordinator.store.api import TXN_OPERATIONS_MAX, Store, StoreUnavailable, StoreUnknown
from coordinator.view import Views
from coordinator.waiting import Pool

HELLO_TIMEOUT_SECONDS = 5.0
CONNECTED = frozenset({SessionState.OPEN, SessionState.CLOSING})

_log = structlog.get_logger("coordinator.workers")

Key = tuple[str, Permit]
Found = dict[Key, Session]


@dataclass(frozen=True, slots=True)
class Settled:
    """What the worker must hear of its permits, as the link carries them."""

    unknown: list[Any] = field(default_factory=list)
    gone: list[Any] = field(default_factory=list)
    moved: list[Any] = field(default_factory=list)


class Greeter:
    """Registers workers and settles what they and the ledger believe."""

    def __init__(
        self, store: Store, views: Views, ledgers: dict[str, Ledger], registry: Registry, granting: Granting
    ) -> None:
        self._store = store
        self._views = views
        self._ledgers = ledgers
        self._registry = registry
        self._granting = granting

    async def greet(self, local: Local, link: Link, args: Args) -> Settled:
        """Registers `local` and settles its permits; while etcd is away, a worker known here is only linked.

        `local.settled` says which. Raises LinkRefused (say hello again), Unregistered.
        """
        local.settled = False
        known = local.boot_id in self._registry.workers
        if known and not self._views.reachable:
            return Settled()
        try:
            with trio.fail_after(HELLO_TIMEOUT_SECONDS):
                await self._granting.interrupt(local)
                await self._registry.register(local)
                if not await self._views.refresh():  # the answer is no older than what the registration read
                    raise StoreUnavailable("what it is to serve under cannot be read")
                answer = await self._settle(local, link, args)
        except (StoreUnavailable, StoreUnknown, trio.TooSlowError):
            if known:
                return Settled()
            raise LinkRefused(Code.LEDGER_UNAVAILABLE, "etcd does not answer: say hello again") from None
        local.settled = True
        for db in self._ledgers:
            self._granting.stir(db)  # some may have waited for the registration
        return answer

    async def _settle(self, local: Local, link: Link, args: Args) -> Settled:
        listed = {(each["db"], parse_permit(each["permit"])) for each in args.get("permits") or ()}
        before = set(local.requests)
        found, unreadable = await self._standing(local.boot_id)
        moved = _moved(found, listed)
        listed = {moved.get(key, key) for key in listed}
        awaited = await self._awaited(local, link, found, set(args.get("requests") or ()))
        for (db, permit), session in found.items():
            if (db, permit) not in listed | awaited:
                await self._free(local, db, session)
        kept = found.keys() & (listed | awaited)
        local.requests = {request: key for request, key in local.requests.items()
                          if key in kept or request not in before}
        noted = set(local.requests.values())
        local.permits = {key: Pool(key[0], found[key].seats_of, found[key].user, key[1].kind)
                         for key in kept} | {
            key: pool for key, pool in local.permits.items() if key in noted}
        return Settled(
            [[db, permit_list(permit)] for db, permit in found.keys() & listed
             if found[db, permit].state is SessionState.UNKNOWN],
            [[db, permit_list(permit)] for db, permit in listed - found.keys()
             if db in self._ledgers and db not in unreadable
             and not self.is_lost(db) and not self._is_of_before(db, permit)],
            [[db, permit_list(old), permit_list(new)] for (db, old), (_, new) in moved.items()])

    async def _standing(self, boot_id: str) -> tuple[Found, set[str]]:
        """Every slot of every ledger that stands under this boot id; and the ledgers with one that cannot be
        read: whose that is nobody knows, so nothing that is missing there is gone."""
        found: Found = {}
        unreadable: set[str] = set()
        for db, ledger in self._ledgers.items():
            for entry in (await self._store.range(ledger.keys.sessions())).entries:
                try:
                    session = session_of(entry)
                except ValueError as fault:
                    unreadable.add(db)
                    _log.error(Event.SOMETHING_FAILED, database=db, why=f"{entry.key}: {fault}")
                    continue
                if session.owner == boot_id:
                    found[db, session.permit] = session
        return found, unreadable

    async def _awaited(
        self, local: Local, link: Link, found: Found, outstanding: Collection[str]
    ) -> set[tuple[str, Permit]]:
        """The slots of outstanding requests whose answer is on its way, or will be the same when repeated.

        A receipt goes with the worker's lease. Without it a repeated request takes a second slot, so the
        first is kept only if its answer was given on this very link, where nothing is repeated.
        """
        asked = {key: session for key, session in found.items() if session.request_id in outstanding}
        on_its_way = set(local.requests.values()) if local.link is link else set()
        in_progress = set(local.attempts.values())
        kept = {key for key, session in asked.items()
                if key in on_its_way or session.request_id in in_progress}
        for db in {db for db, _ in asked}:
            kept |= {(db, permit) for permit in await self._answers(db, [
                session for (each, _), session in asked.items() if each == db])} & asked.keys()
        return kept

    async def _answers(self, db: str, sessions: list[Session]) -> set[Permit]:
        """The permits that the receipts of these sessions' requests name."""
        keys = [self._ledgers[db].keys.receipt(session.request_id) for session in sessions]
        named: set[Permit] = set()
        for first in range(0, len(keys), TXN_OPERATIONS_MAX):
            snapshot = await self._store.read(*keys[first:first + TXN_OPERATIONS_MAX])
            for entry in snapshot.entries:
                receipt = Receipt.decode(entry.value)
                named.add(Permit(receipt.kind, receipt.slot, entry.create_revision + receipt.base))
        return named

    async def _free(self, local: Local, db: str, session: Session) -> None:
        """The worker knows nothing of it: it never connected under it, unless a process is noted.

        Raises StoreUnavailable when that could not be written: the hello settles nothing then.
        """
        connected = session.pid or session.abandoned or session.state in CONNECTED
        if connected and session.state is SessionState.UNKNOWN:
            return
        unused = Release(session.permit, Proof.UNUSED, Actor.OWNER, observer=local.boot_id)
        outcome = await self._ledgers[db].apply(Unknown(session.permit) if connected else unused)
        if isinstance(outcome, Applied):
            if outcome.session is None:
                _log.info(Event.PERMIT_RELEASED, database=db, permit=str(session.permit),
                          proof=str(Proof.UNUSED), owner=local.boot_id, observer=local.boot_id)
        elif outcome.code not in (Code.GONE, Code.LEDGER_LOST):
            raise StoreUnavailable(f"{session.permit} could not be settled: {outcome.code} {outcome.detail}")

    def _is_of_before(self, db: str, permit: Permit) -> bool:
        """A permit of the ledger that was lost: its session is yet to get another."""
        head = self._views.views[db].head
        return head is not None and permit.generation <= head.generation_base

    def is_lost(self, db: str) -> bool:
        """Whether nothing that is missing in this ledger proves anything."""
        view = self._views.views[db]
        recovering = view.head is not None and view.head.state is not LedgerState.ACTIVE
        return bool(view.lost) or recovering or self._ledgers[db].lost


def _moved(found: Found, listed: Collection[Key]) -> dict[Key, Key]:
    """What it lists of sessions that were moved to another slot, and where those stand."""
    return {(db, former): (db, permit) for (db, permit), session in found.items()
            for former in session.former_permits if (db, former) in listed}
