"""The backend reaper: every permit in SESSION_UNKNOWN is looked up at its server until it is proven gone.

With `reconcile: terminate` a session that a look still shows after `unknown_terminate_after` is told to end;
that is noted in the permit first, and the proof is needed all the same.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
import trio

from coordinator.awaiting import Waits, proof_open
from coordinator.events import Event
from coordinator.ledger.claims import FleetClaims
from coordinator.ledger.ledger import Applied, Ledger
from coordinator.ledger.proofs import Look, Proven
from coordinator.ledger.record import LedgerHead, Permit, Session
from coordinator.ledger.rules import Release, Terminating
from coordinator.ledger.snapshot import LedgerSnapshot
from coordinator.ledger.states import Actor
from coordinator.looks import NEEDS_GRANT, Eyes, LookFailed
from coordinator.reaping import Case, FirstLooks, unknown_cases
from coordinator.spec import CoordinatorSpec
from coordinator.store.api import StoreUnavailable, StoreUnknown

PASS_SECONDS = 1.0  # then the next pass may begin, without the nodes that have not answered
OLD_LEASE_CYCLES = 2  # an unknown permit that stands longer is somebody's to look at

_log = structlog.get_logger("coordinator.reconcile")


@dataclass(slots=True)
class _Looked:
    """How far one pass has come."""

    unproven: int
    nodes: int = 0
    all: trio.Event = field(default_factory=trio.Event)


class BackendReaper:
    """Looks unknown permits up. `awaiting` says what each waits for, `released` counts by proof."""

    def __init__(
        self, ledgers: dict[str, Ledger], eyes: Eyes, *, spec: CoordinatorSpec, now_us: Callable[[], int],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledgers = ledgers
        self._eyes = eyes
        self._spec = spec
        self._now_us = now_us
        self._monotonic = monotonic
        self._first = {db: FirstLooks() for db in ledgers}
        self._void_said: set[str] = set()
        self._refusal_said: dict[str, str] = {}  # by node, why a session could not be terminated
        self._old_said: dict[str, set[tuple[Permit, int]]] = {db: set() for db in ledgers}
        self.awaiting: dict[str, dict[str, str]] = {db: {} for db in ledgers}
        self.waits: dict[str, dict[str, Waits]] = {db: {} for db in ledgers}  # the same in full, to be shown
        self._unreachable: dict[str, int] = {}  # nodes that could not be looked at, since when: shown
        self.unknown_since_us: dict[str, int] = {}  # the oldest unknown permit, by database: shown
        self.nursery: trio.Nursery | None = None  # where looks may go on when their pass is over
        self._at_work: set[tuple[str, str]] = set()  # nodes at which a look of an earlier pass goes on
        self.unknown_old: dict[str, int] = {}  # how many have stood for OLD_LEASE_CYCLES or more
        self.released: Counter[str] = Counter()
        self.on_released: list[Callable[[str, Session], None]] = []

    async def prove(self, db: str, snapshot: LedgerSnapshot) -> int:
        """Looks up every unknown permit of `snapshot`; how many stay unproven."""
        cases = unknown_cases(snapshot)
        self._first[db].keep_only(cases, self.clock_us())
        self.unknown_since_us[db] = min((c.session.state_since_us for c in cases), default=0)
        unproven = await self._look_up(db, snapshot, cases) if cases else 0
        self._alert_if_old(db, cases)
        if not unproven:
            self.awaiting[db], self.waits[db], self.unknown_since_us[db] = {}, {}, 0
        return unproven

    def clock_us(self) -> int:
        """Our monotonic clock."""
        return int(self._monotonic() * 1_000_000)

    async def _look_up(self, db: str, snapshot: LedgerSnapshot, cases: Sequence[Case]) -> int:
        by_node: dict[str, list[Case]] = defaultdict(list)
        for case in cases:
            by_node[case.backend.address if case.backend else ""].append(case)
        named = {str(case.session.permit) for case in cases}
        self.awaiting[db] = {permit: why for permit, why in self.awaiting[db].items() if permit in named}
        self.waits[db] = {permit: why for permit, why in self.waits[db].items() if permit in named}
        looked = _Looked(len(cases))
        idle = {address: group for address, group in by_node.items() if (db, address) not in self._at_work}

        async def at_node(address: str, group: Sequence[Case]) -> None:
            self._at_work.add((db, address))
            try:
                left = await self._look_up_at(db, snapshot, address, group)
                looked.unproven -= len(group) - left
            except (StoreUnavailable, StoreUnknown):
                pass  # etcd went away: the next pass tries again
            except ValueError as fault:  # another process wrote meanwhile what this one cannot read
                _log.error(Event.SOMETHING_FAILED, database=db, why=str(fault))
            finally:
                self._at_work.discard((db, address))
                looked.nodes += 1
                if looked.nodes == len(idle):
                    looked.all.set()

        if self.nursery is None:
            async with trio.open_nursery() as nursery:
                for address, group in idle.items():
                    nursery.start_soon(at_node, address, group)
        elif idle:
            for address, group in idle.items():
                self.nursery.start_soon(at_node, address, group)
            with trio.move_on_after(PASS_SECONDS):  # a node that does not answer holds up no other
                await looked.all.wait()
        return looked.unproven

    async def _look_up_at(
        self, db: str, snapshot: LedgerSnapshot, address: str, group: Sequence[Case]
    ) -> int:
        if not address:
            for case in group:
                self._await(db, case, "nothing says which server it was for: only an attestation helps")
            return len(group)
        first, grace = self._first[db], self._spec.orphan_connect_grace_seconds
        now = self.clock_us()
        try:
            look = await self._eyes.look(
                address, fresh=any(first.wants_fresh(case, now, grace) for case in group))
        except LookFailed as failed:
            self._unreachable.setdefault(address, self._now_us())
            for case in group:
                self._await(db, case, f"a look: {failed}")
            _log.warning(Event.LOOK_FAILED, database=db, why=str(failed), permits=len(group))
            return len(group)
        self._unreachable.pop(address, None)
        self._alert_if_void(address, look)
        assert snapshot.head is not None  # reconcile saw to it
        terminates = self._spec.reconcile == "terminate"
        claims = await self._ledgers[db].fleet_claims() if terminates else FleetClaims()
        freed = [await self._judge(db, case, look, snapshot.head, claims) for case in group]
        return freed.count(False)

    async def _judge(
        self, db: str, case: Case, look: Look, head: LedgerHead, claims: FleetClaims
    ) -> bool:
        """Whether the permit was freed (by whomever)."""
        grace = self._spec.orphan_connect_grace_seconds
        verdict = self._first[db].judge(
            case, look, ledger_tag=head.tag, grace_seconds=grace, tag_before=head.tag_before)
        if isinstance(verdict, Proven):
            return await self._release(db, case, verdict)
        self._await(db, case, verdict.reason)
        await self._terminate_if_due(db, case, look, claims)
        return False

    async def _release(self, db: str, case: Case, proven: Proven) -> bool:
        session = case.session
        outcome = await self._ledgers[db].apply(Release(
            session.permit, proven.proof, Actor.BACKEND_REAPER, observer=self._spec.host,
            seen_revision=case.held.mod_revision, exit_revision=case.exit_revision))
        if not isinstance(outcome, Applied):
            return False  # it moved meanwhile: the next pass decides anew
        self.waits[db].pop(str(session.permit), None)
        self.released[str(proven.proof)] += 1
        self.awaiting[db].pop(str(session.permit), None)
        _log.warning(
            Event.PERMIT_RELEASED, database=db, permit=str(session.permit), proof=str(proven.proof),
            evidence=proven.evidence, owner=session.owner, observer=self._spec.host, pid=session.pid,
            unknown_seconds=max(0, self._now_us() - session.state_since_us) / 1_000_000)
        self._tell(db, session)
        return True

    async def _terminate_if_due(self, db: str, case: Case, look: Look, claims: FleetClaims) -> None:
        """With `reconcile: terminate`: notes it in the permit first, so that the owner cannot come back."""
        session = case.session
        age_us = self.clock_us() - self._first[db].since_us.get(case.key, self.clock_us())
        old = session.terminating or age_us >= self._spec.unknown_terminate_after_seconds * 1_000_000
        due = self._spec.reconcile == "terminate" and old
        seen = any((row.pid, row.backend_start_us) == (session.pid, session.backend_start_us)
                   for row in look.rows)
        if not due or not session.pid or not seen or look.void is not None:
            return
        if session.backend is None or not session.backend.same_server(look.backend):
            return
        whose = _claimed_elsewhere(db, session, claims)
        if whose:
            self._await(db, case, whose)
            return
        outcome = await self._ledgers[db].apply(Terminating(session.permit, case.held.mod_revision))
        if not isinstance(outcome, Applied):
            return
        if outcome.changed:
            _log.warning(Event.PERMIT_TERMINATING, database=db, permit=str(session.permit), pid=session.pid)
        try:
            await self._eyes.terminate(look.backend.address, session.pid, session.backend_start_us)
        except LookFailed as failed:
            self._await(db, case, f"its termination: {failed}")
            self._alert_if_refused(db, session, look.backend.address, str(failed))

    def _await(self, db: str, case: Case, reason: str) -> None:
        permit, node = str(case.session.permit), case.backend.address if case.backend else ""
        before = self.waits[db].get(permit)
        self.awaiting[db][permit] = reason
        self.waits[db][permit] = Waits(
            proof_open(case.session), node, reason, before.since_us if before else self._now_us(),
            self._unreachable.get(node, 0))

    def _alert_if_old(self, db: str, cases: Sequence[Case]) -> None:
        """Those still awaited after so long, once each, with what they wait for."""
        limit_us = int(OLD_LEASE_CYCLES * self._spec.lease_ttl_seconds * 1_000_000)
        awaiting, since, now = self.awaiting[db], self._first[db].since_us, self.clock_us()
        old = {case.key: case.session for case in cases
               if now - since.get(case.key, now) >= limit_us and str(case.session.permit) in awaiting}
        for key in old.keys() - self._old_said[db]:
            session = old[key]
            _log.error(
                Event.PERMIT_UNKNOWN_OLD, database=db, permit=str(session.permit), owner=session.owner,
                host=session.host, user=session.user, dbname=session.dbname, pid=session.pid,
                ticket=session.ticket, age_seconds=(now - since[key]) / 1_000_000,
                awaits=awaiting[str(session.permit)])
        self._old_said[db] = set(old)
        self.unknown_old[db] = len(old)

    def _alert_if_void(self, address: str, look: Look) -> None:
        if look.void is None:
            self._void_said.discard(address)
        elif address not in self._void_said:
            self._void_said.add(address)
            _log.error(Event.LOOK_VOID, node=address, why=look.void)

    def _alert_if_refused(self, db: str, session: Session, node: str, why: str) -> None:
        """Once for each node and reason."""
        if self._refusal_said.get(node) != why:
            self._refusal_said[node] = why
            _log.error(Event.TERMINATION_FAILED, database=db, permit=str(session.permit), pid=session.pid,
                       node=node, why=why, hint=NEEDS_GRANT)

    def _tell(self, db: str, session: Session) -> None:
        for listener in self.on_released:
            listener(db, session)


def _claimed_elsewhere(db: str, session: Session, claims: FleetClaims) -> str:
    """Why it is not to be terminated for this ledger's sake; "": no other has it."""
    if (session.pid, session.backend_start_us) in claims.besides(db).firm:
        return "its end: it is a session of another ledger, and not terminated for this one"
    return f"its end: {claims.unread} records that cannot be read may claim it" if claims.unread else ""
