"""Sessions of this host's workers leave the slots that the policy no longer has, or keeps for a failover.

Each goes on in a lower slot that is free, whatever it does: neither its client nor the server has a part in
it. Its worker is told then; until it has heard, what it says of the session by the old permit is done to the
session all the same. Sessions without a slot to go to are given up as they fall idle. Nothing is remembered
that the ledger does not say: whatever is cut short, the next pass goes on from what stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog
import trio

from coordinator.events import Event
from coordinator.granting import Granting
from coordinator.ledger.answers import Applied
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.limits import Limits
from coordinator.ledger.record import Alias, Permit, Session, UnknownSchema
from coordinator.ledger.relocation import find_excess, is_high
from coordinator.ledger.snapshot import LedgerSnapshot
from coordinator.link import LinkLost, LinkRefused
from coordinator.link_values import parse_permit, permit_list
from coordinator.registry import Local, Registry
from coordinator.store.api import StoreUnavailable, StoreUnknown
from coordinator.view import View, Views

ANSWER_SECONDS_MAX = 2.0
AGAIN_SECONDS = 0.5

_log = structlog.get_logger("coordinator.relocating")


class Relocating:
    """Looks after what this host's workers hold; `run` must run."""

    def __init__(
        self, views: Views, ledgers: Mapping[str, Ledger], registry: Registry, granting: Granting, *,
        ttl_seconds: float,
    ) -> None:
        self._views = views
        self._ledgers = ledgers
        self._registry = registry
        self._granting = granting
        self._ttl = ttl_seconds
        self._limits: dict[str, tuple[Alias, Limits]] = {}  # as they were when the alias was that
        self._told: dict[tuple[str, str], frozenset[Permit]] = {}  # by worker and ledger: to give up
        self._did = False  # something, in the passes of this round
        self._stirred = trio.Event()
        views.on_change.append(lambda view: self.stir())

    def stir(self) -> None:
        """A ledger changed or a worker came."""
        self._stirred.set()

    async def run(self) -> None:
        """Passes: on every change, now and then, and again soon after one that did something. While passes
        do nothing (a session is busy where it is not to be) they come ever later."""
        pause = AGAIN_SECONDS
        while True:
            self._stirred = trio.Event()
            self._did, left = False, False
            for view in tuple(self._views.views.values()):
                left |= await self.relocate(view)
            longest = self._ttl / 3
            pause = AGAIN_SECONDS if self._did else min(2 * pause, longest) if left else longest
            with trio.move_on_after(pause):
                await self._stirred.wait()
                pause = AGAIN_SECONDS

    async def relocate(self, view: View) -> bool:
        """One pass over one ledger; whether another is due soon. Asks nothing of etcd while all is well."""
        if not view.reachable or view.lost or not self._may_be_high(view):
            return False
        try:
            snapshot = await self._ledgers[view.db].snapshot()
            self._did |= await self._pass(view.db, snapshot)
        except (StoreUnavailable, StoreUnknown):
            return True  # the views say so
        except (UnknownSchema, ValueError) as fault:
            _log.error(Event.SOMETHING_FAILED, database=view.db, why=f"relocation: {fault}")
        return self._may_be_high(view)

    def _may_be_high(self, view: View) -> bool:
        """By what its workers hold, and the limits as they were last read."""
        held = [permit for local in self._registry.workers.values()
                for db, permit in local.permits if db == view.db]
        alias, limits = self._limits.get(view.db, (None, None))
        if limits is None or alias != view.alias:
            return bool(held)
        if alias is not None and alias.withdrawn:  # which generation granted a permit, only the ledger says
            return bool(held)
        failover = view.epoch is not None and view.epoch.failover
        return any(is_high(permit, limits, failover=failover) for permit in held)

    async def _pass(self, db: str, snapshot: LedgerSnapshot) -> bool:
        """Whether it moved something, or told a worker what it had not heard yet."""
        did = False
        if snapshot.alias is not None and snapshot.active_limits is not None:
            self._limits[db] = (snapshot.alias, snapshot.active_limits)
        excess = find_excess(snapshot)
        for local in tuple(self._registry.workers.values()):
            if local.link is None or not local.settled:
                continue
            moved = {held.session.request_id: held.session for held in snapshot.of_owner(local.boot_id)
                     if local.name_of(db, held.session) != held.permit}
            for session, move in excess.moves:
                if session.owner == local.boot_id:
                    outcome = await self._ledgers[db].apply(move)
                    if isinstance(outcome, Applied) and outcome.session is not None:
                        did = True
                        _log.info(Event.SESSION_MOVED, database=db, worker=local.boot_id, pid=session.pid,
                                  permit=str(session.permit), to=str(outcome.session.permit))
                        moved[session.request_id] = outcome.session
            did |= await self._tell(local, db, tuple(moved.values()))
            did |= self._give_up(local, db, [local.name_of(db, each) for each in excess.given_up
                                             if each.owner == local.boot_id])
        if excess.moves:
            self._granting.stir(db)
        return did

    async def _tell(self, local: Local, db: str, moved: Sequence[Session]) -> bool:
        """A worker takes the new permits; what it does not answer for, it is told again. Whether it took any.
        """
        names = {each.permit: local.name_of(db, each) for each in moved}
        if not names or local.link is None:
            return False
        moves = [[permit_list(old), permit_list(new)] for new, old in names.items()]
        try:
            with trio.fail_after(ANSWER_SECONDS_MAX):
                answer = await local.link.call("moved", db=db, moves=moves)
            lost = set(map(parse_permit, answer["lost"]))
        except (LinkLost, LinkRefused, trio.TooSlowError):
            return False
        except (KeyError, TypeError, ValueError) as fault:  # it may be of another version
            _log.error(Event.SOMETHING_FAILED, worker=local.boot_id, why=f"its answer to moved: {fault!r}")
            return False
        taken = [each for each in moved if each.permit not in lost]
        for each in taken:
            local.call(db, each, each.permit)
        return bool(taken)

    def _give_up(self, local: Local, db: str, permits: list[Permit]) -> bool:
        """Whether it is told something that it was not told before."""
        if not permits or local.link is None:
            return False
        try:
            local.link.notify("retire", db=db, permits=[permit_list(each) for each in permits])
        except LinkLost:
            return False  # it does not read: its link ends by itself
        told, self._told[local.boot_id, db] = self._told.get((local.boot_id, db)), frozenset(permits)
        if told == frozenset(permits):
            return False
        _log.info(Event.SESSIONS_GIVEN_UP, database=db, worker=local.boot_id, sessions=len(permits))
        return True
