"""Reservations of this host's workers: one try at once, then first come, first served until the wait is over.

Whoever found no room is not tried again before something may have changed: a permit given back here or (a
watch says so) elsewhere, or another revision of the store when it is next read anyway. So a saturated ledger
on which nothing moves asks nothing of etcd.

A request that is given up with an outcome unknown is voided in the background until etcd has it, so that
whatever it may have taken, or may yet take, comes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import structlog
import trio

from coordinator.events import Event
from coordinator.ledger.ledger import Granted, Ledger, Voided
from coordinator.ledger.limits import generation_for
from coordinator.ledger.record import Kind, UnknownSchema
from coordinator.ledger.reservation import Reserve
from coordinator.ledger.rules import Code, Refused
from coordinator.link import LinkLost
from coordinator.registry import Local, Registry
from coordinator.store.api import Compacted, Store, StoreUnavailable, StoreUnknown
from coordinator.view import Views
from coordinator.waiting import (
    NO_ROOM,
    WAITED_FOR,
    Asks,
    Holding,
    Pool,
    Queue,
    Round,
    Waiter,
    choose_idle,
    choose_shed,
)
from coordinator.wanting import SHED, is_last_one
from coordinator.wants import Wants

TICK_SECONDS = 1.0  # a watch is a hint: at this pace it is asked whether anything changed
VOID_BACKOFF_SECONDS = 0.5
_BEHIND: Mapping[Code | None, str] = {
    Code.LEDGER_UNAVAILABLE: "etcd takes no reservation (is it full?), and others wait already"}
UNREACHABLE = Refused(Code.LEDGER_UNAVAILABLE, "etcd does not answer")

_log = structlog.get_logger("coordinator.granting")


class _Turn:
    """The right to try once: given by the pump, answered by the waiter or by its leaving."""

    def __init__(self) -> None:
        self.given = trio.Event()
        self.over = trio.Event()
        self.refused: Code | None = None

    def end(self, refused: Code | None) -> None:
        self.refused = refused
        self.over.set()


class _Line:
    """The queue of one ledger, what stirs it, and what is known of it since it was stirred last.

    `full` has the revision of the store at which a pool found no room; `tried_at` is that of the last round.
    """

    def __init__(self) -> None:
        self.queue = Queue()
        self.asks = Asks()
        self.full: dict[tuple[Pool, int], tuple[Code, int]] = {}  # with the generation that found none
        self.tried_at = 0
        self.idle_turn = 0  # whom to ask next for an idle session
        self.doubtful = False  # an answer is missing: room may have been made or taken by it
        self.turns: dict[Waiter, _Turn] = {}
        self.stirred = trio.Event()
        self.occupied = trio.Event()
        self.empty = trio.Event()


class Granting:
    """Reserves for this host's workers; `run` must be running."""

    def __init__(
        self, store: Store, views: Views, ledgers: dict[str, Ledger], registry: Registry, *, host: str,
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._store = store
        self._views = views
        self._ledgers = ledgers
        self._registry = registry
        self.wants = Wants(store, ledgers, registry, self, host=host, now_us=now_us)
        self._lines = {db: _Line() for db in ledgers}
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Gives turns to those who wait."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self.wants.run)
            for db in self._lines:
                nursery.start_soon(self._pump, db)
                nursery.start_soon(self._watch, db)

    def stir(self, db: str) -> None:
        """A slot or seat may be free, or the ledger is back: let the waiters try."""
        self._lines[db].full.clear()
        self._lines[db].stirred.set()

    def waiting(self) -> dict[str, int]:
        """How many wait, by database."""
        return {db: len(line.queue) for db, line in self._lines.items()}

    def waiters(self, db: str) -> Iterable[Waiter]:
        """Who waits, the oldest first."""
        return iter(self._lines[db].queue)

    def ask_for(self, op: str, holder: Holding, waiter: Waiter) -> None:
        """One of this host's workers is asked for a session by a waiter of another host."""
        if self._ask(op, holder) and op == SHED:
            self._lines[holder.pool.db].asks.add(holder, waiter, trio.current_time())

    async def reserve(self, local: Local, db: str, ask: Reserve, wait_seconds: float) -> Granted | Refused:
        """A permit within `wait_seconds`, or the last reason why not."""
        outcome: Granted | Refused = Refused(Code.VOIDED, "the worker registers anew", settled=False)
        with trio.CancelScope() as scope:
            local.attempts[scope] = ask.request_id
            try:
                outcome = await self._reserve(local, db, ask, trio.current_time() + wait_seconds)
            finally:
                del local.attempts[scope]
                if not local.attempts:
                    local.quiet.set()
        if isinstance(outcome, Granted):
            self._note(local, db, ask, outcome)
        elif not outcome.settled:
            self._void_later(local, db, ask)
        return outcome

    async def interrupt(self, local: Local) -> None:
        """Ends what this worker has asked for and not got; it is told `voided` and may ask anew."""
        for scope in tuple(local.attempts):
            scope.cancel()
        while local.attempts:
            local.quiet = trio.Event()
            await local.quiet.wait()

    async def _reserve(self, local: Local, db: str, ask: Reserve, deadline: float) -> Granted | Refused:
        line, pool = self._lines[db], Pool(db, ask.seats_of, ask.user, ask.kind)
        waits = deadline > trio.current_time() and ask.kind is Kind.MAIN  # nobody sheds any other for it
        generation = self._generation_for(db, ask)
        vain = line.queue.reason_before(pool, generation) or (
            self._known_full(line, pool, generation) if waits else None) or (
            Code.FULL if self.wants.stands_back(pool) else None)
        outcome: Granted | Refused = Refused(vain or Code.FULL, _BEHIND.get(vain, "others wait already"))
        if vain is None:
            outcome = await self._try(line, pool, ask, deadline)
        if isinstance(outcome, Refused) and outcome.code in WAITED_FOR and waits:
            waiter = Waiter(local.boot_id, pool, outcome.code, generation, ask.request_id,
                            trio.current_time())
            outcome = await self._wait(line, waiter, ask, deadline, outcome)
        return outcome

    def freed(self, local: Local, db: str, pool: Pool) -> None:
        """One permit of this pool was given back by this worker: whoever asked it to shed may ask again."""
        receiver = self._lines[db].asks.given(Holding(local.boot_id, pool))
        if receiver is None or receiver.boot_id not in self._registry.workers:  # else it is for that sibling
            self.wants.freed(db, local.boot_id)
        self.stir(db)

    def _note(self, local: Local, db: str, ask: Reserve, granted: Granted) -> None:
        local.permits[db, granted.permit] = Pool(db, ask.seats_of, ask.user, ask.kind)
        local.requests[ask.request_id] = (db, granted.permit)
        self.wants.stir(db)
        _log.debug(Event.PERMIT_RESERVED, database=db, permit=str(granted.permit), worker=local.boot_id)

    def _generation_for(self, db: str, ask: Reserve) -> int:
        """Which policy generation decides it: of two, one may have room where the other has none."""
        alias = self._views.views[db].alias
        return generation_for(alias, ask.request_id, ask.kind) if alias is not None else 0

    def _known_full(self, line: _Line, pool: Pool, generation: int) -> Code | None:
        """Why another try of this pool would be in vain, if that is known."""
        code, revision = line.full.get((pool, generation), (None, 0))
        return code if revision == self._views.views[pool.db].revision else None

    async def _try(self, line: _Line, pool: Pool, ask: Reserve, deadline: float) -> Granted | Refused:
        """One attempt; past the deadline (and a short grace for a first try) its outcome is unknown."""
        view, stirred = self._views.views[pool.db], line.stirred
        if not view.reachable:
            return UNREACHABLE
        outcome: Granted | Refused = Refused(Code.LEDGER_UNAVAILABLE, "no answer in time", settled=False)
        with trio.move_on_at(max(deadline, trio.current_time() + TICK_SECONDS)):
            outcome = await self._ledgers[pool.db].reserve(ask)
        if isinstance(outcome, Refused):
            if outcome.code in NO_ROOM and stirred is line.stirred and not stirred.is_set():
                line.full[pool, self._generation_for(pool.db, ask)] = (outcome.code, view.revision)
            if outcome.code not in NO_ROOM or not outcome.settled:
                line.full.clear()
                line.doubtful = True
        return outcome

    async def _wait(
        self, line: _Line, waiter: Waiter, ask: Reserve, deadline: float, last: Refused
    ) -> Granted | Refused:
        """Waits for turns. What an earlier try left unknown stays unknown, unless a later one is granted."""
        settled = last.settled
        turn = line.turns[waiter] = _Turn()
        line.queue.join(waiter)
        line.occupied.set()
        self.wants.stir(waiter.pool.db)
        try:
            while trio.current_time() < deadline:
                self._ask_for_room(line, waiter)
                with trio.move_on_at(deadline):
                    await turn.given.wait()
                if not turn.given.is_set():
                    break
                outcome = await self._try(line, waiter.pool, ask, deadline)
                if isinstance(outcome, Granted) or outcome.code not in WAITED_FOR:
                    return outcome
                last, waiter.reason = outcome, outcome.code
                settled = settled and outcome.settled
                turn.end(outcome.code)
                turn = line.turns[waiter] = _Turn()
        finally:
            turn.end(None)
            line.queue.leave(waiter)
            del line.turns[waiter]
            self.wants.stir(waiter.pool.db)
            if not line.queue:
                line.occupied = trio.Event()
                line.empty.set()
        return Refused(last.code, last.detail, settled=settled)

    def _ask_for_room(self, line: _Line, waiter: Waiter) -> None:
        """Asks one worker to shed one session for this waiter, unless one was asked already."""
        if waiter.reason not in NO_ROOM:
            return
        linked, now = self._registry.linked(), trio.current_time()
        line.asks.keep(linked, now)
        if line.asks.waits(waiter):
            return
        held = self._registry.holdings()
        chosen = choose_shed(waiter, held, line.asks.by_holder(), linked, line.asks.coming(waiter.holding))
        if chosen is not None and is_last_one(waiter, chosen, held):
            self.wants.short(waiter)
        if chosen is None:
            self._ask_for_idle(line, waiter)
        elif self._ask("shed", chosen):
            line.asks.add(chosen, waiter, now)

    def _look_for_idle(self, line: _Line) -> None:
        """For the first who waits and for whom nobody was asked."""
        line.asks.keep(self._registry.linked(), trio.current_time())
        waiter = next(iter(line.queue), None)
        if waiter is not None and waiter.reason in NO_ROOM and not line.asks.waits(waiter):
            self._ask_for_idle(line, waiter)

    def _ask_for_idle(self, line: _Line, waiter: Waiter) -> None:
        """Asks the next worker for a session that nobody uses there. It need not have one."""
        chosen = choose_idle(
            waiter, self._registry.holdings(), self._registry.linked(), line.idle_turn)
        line.idle_turn += 1
        if chosen is not None:
            self._ask("spare", chosen)

    def _ask(self, op: str, holding: Holding) -> bool:
        """Whether it was asked to shed, or to spare, one session."""
        link, pool = self._registry.workers[holding.boot_id].link, holding.pool
        if link is None:
            return False
        try:
            link.notify(op, db=pool.db, pool=pool.name, user=pool.user, count=1)
        except LinkLost:
            return False  # it does not read: its link ends by itself
        _log.debug(Event.SHED_ASKED, database=pool.db, worker=holding.boot_id, user=pool.user, op=op)
        return True

    async def _pump(self, db: str) -> None:
        """A round whenever something may have changed."""
        line = self._lines[db]
        while True:
            await line.occupied.wait()
            with trio.move_on_after(TICK_SECONDS) as tick:
                await line.stirred.wait()
            if tick.cancelled_caught:
                self._look_for_idle(line)
            if self._may_be_granted(line, db):
                await self._round(line, db)

    def _may_be_granted(self, line: _Line, db: str) -> bool:
        """Whether another try may end otherwise than the last."""
        return (line.stirred.is_set() or line.doubtful
                or line.tried_at != self._views.views[db].revision
                or any(waiter.reason not in NO_ROOM for waiter in line.queue))

    async def _round(self, line: _Line, db: str) -> None:
        """The waiters try in their order, one at a time."""
        line.stirred, line.doubtful = trio.Event(), False
        line.tried_at = self._views.views[db].revision
        this = Round()
        for waiter in line.queue:
            turn = line.turns.get(waiter)
            if turn is None or not this.may_try(waiter) or self.wants.stands_back(waiter.pool):
                continue
            turn.given.set()
            await turn.over.wait()
            if turn.refused is not None:
                this.refused(waiter, turn.refused)

    async def _watch(self, db: str) -> None:
        """While somebody waits: whether other hosts freed anything, as the leader tells."""
        line = self._lines[db]
        while True:
            await line.occupied.wait()
            line.empty = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_frees, db)
                await line.empty.wait()
                nursery.cancel_scope.cancel()

    async def _watch_frees(self, db: str) -> None:
        key = self._ledgers[db].keys.freed()
        while True:
            try:
                async with self._store.watch(key, after=self._views.views[db].revision) as changes:
                    async for batch in changes:
                        if any(change.key == key for change in batch):
                            self.wants.freed(db)
                            self.stir(db)
            except (StoreUnavailable, StoreUnknown, Compacted):
                pass
            await trio.sleep(TICK_SECONDS)  # noqa: TID251 - a broken watch: the ticks go on meanwhile

    def _void_later(self, local: Local, db: str, ask: Reserve) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(self._void, local, db, ask)

    async def _void(self, local: Local, db: str, ask: Reserve) -> None:
        while not local.exited:  # its reservations end with its registration then
            try:
                voided = await self._ledgers[db].void(ask.request_id, local.boot_id, ask.kind)
            except (UnknownSchema, ValueError) as fault:  # of this request: the others go on
                _log.error(Event.SOMETHING_FAILED, database=db, request=ask.request_id, why=str(fault))
            else:
                if isinstance(voided, Voided):
                    self.stir(db)
                    return
            await trio.sleep(VOID_BACKOFF_SECONDS)  # noqa: TID251 - back-off towards the store
