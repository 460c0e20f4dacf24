"""A lost ledger is made anew: by order of an operator, and as far as servers and workers show what lives.

`order_rebuild` writes a new incarnation, RECOVERING. Every coordinator then gives its workers' sessions their
slots (`coordinator.recovering`); the leader gives one to every other session of our roles that a server
shows, and lets the ledger grant again when servers and ledger agree. A first start in front of a server that
has sessions of ours already goes the same way.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog
import trio

from coordinator.events import Event
from coordinator.ledger.access import Seen
from coordinator.ledger.attestation import Attestation
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.proofs import Look
from coordinator.ledger.record import LedgerHead, LedgerState, UnknownSchema
from coordinator.ledger.recovery import Role, disagreement, not_heard, plan_shown, roles_of, without_permit
from coordinator.ledger.snapshot import LedgerSnapshot
from coordinator.looks import Eyes, LookFailed
from coordinator.spec import DatabaseSpec
from coordinator.store.api import (
    TXN_OPERATIONS_MAX,
    Compare,
    Put,
    Store,
    StoreUnavailable,
    StoreUnknown,
    Txn,
    Won,
    absent,
    unchanged,
)
from coordinator.view import Views

PACE_SECONDS = 0.5
GENERATIONS_APART = 1_000_000_000  # other hosts may have seen as many revisions more than this one

_log = structlog.get_logger("coordinator.rebuild")


class NotLost(Exception):
    """There is nothing to rebuild, or nobody here can tell: says why."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """The incarnation that was begun; `again`: by an earlier order, which is still being carried out."""

    head: LedgerHead
    again: bool = False


async def order_rebuild(
    store: Store, keys: FleetKeys, db: str, seen: Seen, *, who: str, evidence: str,
    now_us: Callable[[], int],
) -> Ordered:
    """Begins a new incarnation in the place of a ledger that `seen` (what this host remembers) says is lost.

    What stands in it stays: slots of an older state are proven gone like any others, and a freeze holds (one
    that went with a wiped etcd is forgotten). Raises NotLost,
    StoreUnavailable, StoreUnknown; ValueError without evidence.
    """
    if not evidence.strip():
        raise ValueError("a rebuild needs its evidence in words")
    key = keys.db(db).ledger()
    snapshot = await store.read(key)
    entry = snapshot.entries[0] if snapshot.entries else None
    standing = LedgerHead.decode(entry.value) if entry else None
    same = standing is not None and standing.incarnation == seen.incarnation
    whole = same and not seen.lost and snapshot.revision >= seen.revision
    if standing is not None and standing.state is LedgerState.RECOVERING and (
            standing.rebuilt > seen.rebuilt or whole):
        return Ordered(standing, again=True)
    if not seen.incarnation:
        raise NotLost(f"this host never saw a ledger {db}: it cannot tell whether it is lost. Give the order "
                      "on a host of the fleet, with its config")
    if whole:
        raise NotLost(f"the ledger {db} is the one that this host remembers: nothing is to be rebuilt")
    latest = max(seen.rebuilt, standing.rebuilt if standing else "")
    at_us = max(now_us(), int(latest.partition("-")[0] or 0) + 1)  # after any rebuild, whatever the clock
    order = f"{at_us:020d}-{secrets.token_hex(3)}"
    head = LedgerHead(
        secrets.token_hex(16), LedgerState.RECOVERING, secrets.token_hex(4), rebuilt=order,
        tag_before=standing.tag if standing else "",
        generation_base=_above(seen, snapshot.revision, standing),
        frozen=standing.frozen if standing else "")  # who forbade growth has not allowed it
    record = Attestation(who=who, what=f"rebuild {db}", evidence=evidence, at_us=now_us(), database=db)
    compare = unchanged(key, entry.mod_revision) if entry else absent(key)
    puts = (Put(key, head.encode()), Put(keys.operator(order), record.encode()))
    if not isinstance(await store.txn(Txn((compare, absent(keys.operator(order))), puts)), Won):
        raise NotLost(f"the ledger {db} moved meanwhile: nothing was changed; give the order again")
    return Ordered(head)


def _above(seen: Seen, revision: int, standing: LedgerHead | None) -> int:
    """More than any generation that a permit of the lost ledger can have, also one that another host saw."""
    base = standing.generation_base if standing else 0
    return max(seen.base + seen.revision, base + revision) + GENERATIONS_APART


class Rebuilder:
    """What the leader does for ledgers that are RECOVERING. `waits`: what each waits for, for people."""

    def __init__(
        self, store: Store, views: Views, ledgers: Mapping[str, Ledger],
        databases: Mapping[str, Sequence[DatabaseSpec]], eyes: Eyes, *, now_us: Callable[[], int],
    ) -> None:
        self._store = store
        self._views = views
        self._ledgers = ledgers
        self._databases = databases
        self._eyes = eyes
        self._now_us = now_us
        self._changed = trio.Event()
        self.waits: dict[str, str] = {}
        views.on_change.append(lambda view: self._changed.set())

    async def lead(self, fence: Compare) -> None:
        """For as long as this coordinator leads."""
        while True:
            self._changed = trio.Event()
            for db in self._recovering():
                try:
                    self._say(db, await self.step(db, fence))
                except (StoreUnavailable, StoreUnknown, UnknownSchema, ValueError) as why:
                    self._say(db, str(why))
            with trio.move_on_after(PACE_SECONDS if self._recovering() else float("inf")):
                await self._changed.wait()

    async def step(self, db: str, fence: Compare) -> str:
        """One step; "" when the ledger grants again, else what it waits for.

        Raises StoreUnavailable, StoreUnknown, UnknownSchema, ValueError.
        """
        ledger = self._ledgers[db]
        snapshot = await ledger.snapshot()
        head = snapshot.head
        if head is None or ledger.lost or head.state is not LedgerState.RECOVERING:
            return ""
        if snapshot.epoch is None or snapshot.active_limits is None:
            return "a backend epoch and a policy"
        unheard = not_heard(snapshot, db)
        if unheard:
            return f"the workers {', '.join(unheard)} to say what they hold"
        roles = roles_of(self._databases[db]) | {
            Role(held.session.dbname, held.session.user) for held in snapshot.sessions}
        before = await ledger.elsewhere()
        try:
            looks = await self._looks(db, snapshot)
        except LookFailed as failed:
            return f"a look at the server: {failed}"
        elsewhere = before | await ledger.elsewhere()  # what was opened there meanwhile, or has ended
        found = [(look, row) for look in looks if look.void is None
                 for row in without_permit(snapshot, look, roles, elsewhere)]
        for look, row in found:
            plan = plan_shown(
                row, look.backend, snapshot, ledger.keys, snapshot.head_revision, self._now_us())
            if isinstance(await self._store.txn(plan.txn), Won):
                _log.warning(Event.PERMIT_UNKNOWN, database=db, pid=row.pid, user=row.user, owner="",
                             was="a session without a permit", node=look.backend.address)
            snapshot = await ledger.snapshot()
        why = disagreement(snapshot, looks, roles, elsewhere)
        if found or why:
            return why or "another look"
        return await self._grant_again(db, head, snapshot, fence)

    async def _grant_again(
        self, db: str, head: LedgerHead, snapshot: LedgerSnapshot, fence: Compare
    ) -> str:
        keys = self._ledgers[db].keys
        active = replace(head, state=LedgerState.ACTIVE)
        compares = (fence, unchanged(keys.ledger(), snapshot.head_revision))
        if not isinstance(await self._store.txn(Txn(compares, (Put(keys.ledger(), active.encode()),))), Won):
            return "the ledger's key, which moved meanwhile"
        _log.warning(Event.LEDGER_REBUILT, database=db, incarnation=head.incarnation,
                     permits=len(snapshot.sessions))
        left = [keys.receipt(each.request_id) for each in snapshot.receipts if not each.lease]
        for first in range(0, len(left), TXN_OPERATIONS_MAX):
            await self._store.txn(Txn(deletes=tuple(left[first:first + TXN_OPERATIONS_MAX])))
        self._views.hint()
        return ""

    async def _looks(self, db: str, snapshot: LedgerSnapshot) -> list[Look]:
        """At every node that has sessions of this ledger, or may have: a worker that is stopped tells nothing
        of those that it left at another host. Raises LookFailed.

        None where nobody may look: then what the workers said is all that can be known.
        """
        specs = self._databases[db]
        if not any(spec.monitor for spec in specs):
            return []
        assert snapshot.epoch is not None
        nodes = {snapshot.epoch.backend.address} | {host for spec in specs for host in spec.hosts} | {
            held.session.backend.address for held in snapshot.sessions if held.session.backend}
        looks = []
        for node in sorted(nodes):
            try:
                look = await self._eyes.look(node)
            except LookFailed:
                if node == snapshot.epoch.backend.address:
                    raise
                continue  # an old server that is gone: what stands there waits for its proofs
            if look.backend.system_identifier != snapshot.epoch.backend.system_identifier:
                continue  # another cluster's: what is there is none of ours
            looks.append(look)
        return looks

    def _recovering(self) -> list[str]:
        return [db for db, view in self._views.views.items()
                if view.reachable and not view.lost and view.head is not None
                and view.head.state is LedgerState.RECOVERING]

    def _say(self, db: str, why: str) -> None:
        if self.waits.get(db, "") != why:
            _log.info(Event.LEDGER_RECOVERING, database=db, waits_for=why)
        self.waits[db] = why
