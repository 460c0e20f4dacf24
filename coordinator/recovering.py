"""A rebuilt ledger gets the sessions of this host's workers: what each holds open is asked and given a slot.

While a ledger is RECOVERING a worker is asked once for all that it holds; each session gets its slot again,
or another, or, where none is free, is closed. What stands under the worker's name and is not among that is
not its any more. The worker's key says then that it was heard, and the leader waits for that of every worker
that lives. A worker that comes later, when the ledger is ACTIVE again, takes over what its sessions got as
sessions of nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog
import trio

from coordinator.events import Event
from coordinator.ledger.claims import told_of
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.living import Living
from coordinator.ledger.record import (
    Epoch,
    EpochState,
    LedgerHead,
    LedgerState,
    Permit,
    backend_from,
    pool_name,
)
from coordinator.ledger.recovery import plan_living
from coordinator.ledger.rules import Release, Unknown
from coordinator.ledger.states import Actor, Proof, SessionState
from coordinator.link import Args, LinkLost, LinkRefused
from coordinator.link_values import parse_permit, permit_list
from coordinator.registry import Local, Registry, Unregistered
from coordinator.store.api import Put, Store, StoreUnavailable, StoreUnknown, Txn, Won, absent, unchanged
from coordinator.view import View, Views
from coordinator.waiting import Pool

ANSWER_SECONDS_MAX = 5.0
AGAIN_SECONDS = 0.5
ROUNDS_MAX = 12  # of read, plan, lose

_log = structlog.get_logger("coordinator.recovering")


class NotYet(Exception):
    """To be done again soon, from the beginning: says why."""


class Recovering:
    """Asks this host's workers for their sessions whenever a rebuilt ledger lacks them; `run` must run."""

    def __init__(
        self, store: Store, views: Views, ledgers: Mapping[str, Ledger], registry: Registry, *, host: str,
        now_us: Callable[[], int],
    ) -> None:
        self._store = store
        self._views = views
        self._ledgers = ledgers
        self._registry = registry
        self._host = host
        self._now_us = now_us
        self._stirred = trio.Event()
        self._said: dict[str, str] = {}
        views.on_change.append(lambda view: self.stir())

    def stir(self) -> None:
        """A ledger changed or a worker came."""
        self._stirred.set()

    async def run(self) -> None:
        """Passes: on every change, and again soon while somebody is left to be heard."""
        while True:
            self._stirred = trio.Event()
            left = 0
            for view in tuple(self._views.views.values()):
                left += await self.recover(view)
            with trio.move_on_after(AGAIN_SECONDS if left else float("inf")):
                await self._stirred.wait()

    async def recover(self, view: View) -> int:
        """One pass over one ledger; how many linked workers are left to be heard."""
        head = view.head
        if head is None or view.lost or not view.reachable or not _was_rebuilt(head):
            return 0
        left = 0
        for local in tuple(self._registry.workers.values()):
            if local.recovered.get(view.db) == head.incarnation or local.link is None:
                continue
            try:
                await self._recover_worker(local, view.db, head)
                local.recovered[view.db] = head.incarnation
            except (NotYet, StoreUnavailable, StoreUnknown, LinkLost, LinkRefused, Unregistered,
                    trio.TooSlowError, ValueError) as why:
                left += 1
                self._say(local, str(why) or type(why).__name__)
            except (KeyError, TypeError) as fault:  # it may be of another version
                left += 1
                self._say(local, f"its answer: {fault!r}")
        return left

    async def _recover_worker(self, local: Local, db: str, head: LedgerHead) -> None:
        await self._registry.register(local)  # its key may have gone with the rest
        heard = await self._ask(local, "recover", db=db)
        recovering = head.state is LedgerState.RECOVERING
        await self._keep_claims(local, db, heard)
        if recovering:
            if heard["opening"]:
                raise NotYet(f"{heard['opening']} sessions are being opened")
            await self._keep_epoch(db, heard.get("epoch"))
        moves: list[list[Any]] = []
        mine = {parse_permit(each) for each in heard["permits"]}
        sessions = [each for each in heard["sessions"] if _is_of_before(each, head)]
        for each in sessions:
            new = await self._give_slot(local, db, _living(each))
            mine.discard(parse_permit(each["permit"]))
            moves.append([each["permit"], permit_list(new) if new is not None else None])
            if new is not None:
                mine.add(new)
        answer = await self._ask(local, "moved", db=db, moves=moves)
        for lost in map(parse_permit, answer["lost"]):
            await self._ledgers[db].apply(Unknown(lost))
            mine.discard(lost)
        if recovering:
            await self._disown(local, db, mine)
        self._note(local, db, sessions, moves)
        await self._registry.note_recovered(local, db, head.incarnation)
        _log.info(Event.SESSIONS_RECOVERED, database=db, worker=local.boot_id, sessions=len(moves),
                  closed=sum(new is None for _, new in moves))

    async def _keep_claims(self, local: Local, db: str, heard: Args) -> None:
        """What it holds of every ledger is in etcd before it counts as heard: where another ledger is lost,
        too, no permit says that these sessions are not this one's."""
        all_heard = {db: heard["sessions"]}
        for other in self._ledgers.keys() - {db}:
            told = await self._ask(local, "recover", db=other)
            view = self._views.views.get(other)
            if told["opening"] and (view is None or view.state != "ACTIVE"):
                raise NotYet(f"{told['opening']} sessions of {other} are being opened")
            all_heard[other] = told["sessions"]
        if len(all_heard) > 1:
            local.told = told_of(all_heard, local.boot_id)
            await self._registry.register(local)

    async def _give_slot(self, local: Local, db: str, living: Living) -> Permit | None:
        """The permit it has from now on; None: it is to be closed."""
        ledger = self._ledgers[db]
        for _ in range(ROUNDS_MAX):
            snapshot = await ledger.snapshot()
            if snapshot.active_limits is None:
                raise NotYet("no policy says yet how many slots there are")
            plan = plan_living(living, snapshot, ledger.keys, snapshot.head_revision, owner=local.boot_id,
                               host=self._host, now_us=self._now_us())
            if plan is None:
                return None
            outcome = await self._store.txn(plan.txn)
            if isinstance(outcome, Won):
                session = plan.session
                new = session.generation <= 0
                return Permit(session.kind, session.slot,
                              outcome.revision - session.generation if new else session.generation)
        raise NotYet("others were faster")

    async def _disown(self, local: Local, db: str, mine: set[Permit]) -> None:
        """What an older state of the ledger says of this worker, and it does not hold."""
        ledger = self._ledgers[db]
        for held in (await ledger.snapshot()).of_owner(local.boot_id):
            session = held.session
            if session.permit in mine or session.state is SessionState.UNKNOWN:
                continue
            unused = Release(session.permit, Proof.UNUSED, Actor.OWNER, observer=local.boot_id)
            await ledger.apply(Unknown(session.permit) if session.pid else unused)

    async def _keep_epoch(self, db: str, told: Mapping[str, Any] | None) -> None:
        """The epoch never goes back: what the workers serve under is at least what the ledger says."""
        backend = backend_from(told["backend"]) if told else None
        if told is None or backend is None:
            return
        key = self._ledgers[db].keys.epoch()
        entries = (await self._store.read(key)).entries
        if entries and Epoch.decode(entries[0].value).number >= told["number"]:
            return
        epoch = Epoch(told["number"], EpochState.ACTIVE, backend, self._now_us(), "as the workers serve it")
        compare = unchanged(key, entries[0].mod_revision) if entries else absent(key)
        if not isinstance(await self._store.txn(Txn((compare,), (Put(key, epoch.encode()),))), Won):
            raise NotYet("the epoch moved")

    async def _ask(self, local: Local, op: str, **args: Any) -> Args:
        if local.link is None:
            raise NotYet("it is not linked")
        with trio.fail_after(ANSWER_SECONDS_MAX):
            answer: Args = await local.link.call(op, **args)
            return answer

    def _note(
        self, local: Local, db: str, sessions: Sequence[Args], moves: Sequence[Sequence[Any]]
    ) -> None:
        """What this coordinator keeps of the worker's permits."""
        for old, _ in moves:
            local.permits.pop((db, parse_permit(old)), None)
        for told, (_, new) in zip(sessions, moves, strict=True):
            if new is not None:
                permit = parse_permit(new)
                name = pool_name(told["dbname"], told.get("pool") or "")
                local.permits[db, permit] = Pool(db, name, told["user"], permit.kind)
        local.requests = {request: key for request, key in local.requests.items() if key[0] != db}
        local.answered.pop(db, None)

    def _say(self, local: Local, why: str) -> None:
        if self._said.get(local.boot_id) != why:
            self._said[local.boot_id] = why
            _log.warning(Event.RECOVERY_WAITS, worker=local.boot_id, why=why)


def _was_rebuilt(head: LedgerHead) -> bool:
    return bool(head.rebuilt) or head.state is not LedgerState.ACTIVE


def _is_of_before(told: Mapping[str, Any], head: LedgerHead) -> bool:
    return parse_permit(told["permit"]).generation <= head.generation_base


def _living(told: Mapping[str, Any]) -> Living:
    backend = backend_from(told["backend"])
    if backend is None:
        raise NotYet("a session without a server")
    return Living(
        permit=parse_permit(told["permit"]), dbname=told["dbname"], user=told["user"], seats=told["seats"],
        pid=told["pid"], backend_start_us=told["backend_start_us"], backend=backend, epoch=told["epoch"],
        pool=told.get("pool") or "")
