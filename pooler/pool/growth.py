"""How a pool opens sessions: one task each, trying again with back-off as long as somebody waits for it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

import structlog
import trio

from pooler.errors import BackendLost, NoPermit, PoolerError
from pooler.net.dial import DialFailed
from pooler.net.facts import facts_and_query, session_facts
from pooler.observe.events import Event
from pooler.pool.duty import BackendUnfit
from pooler.pool.gate import BUSY, NotWanted, Place, PoolGate, ScalingCounts
from pooler.pool.opener import OpenPlan, OpenSession, open_session
from pooler.pool.places import Turn
from pooler.pool.pressure import (
    JITTER,
    SUCCESSORS_MAX,
    Ends,
    Pressure,
    RecentTimes,
    Step,
    budget_seconds,
    warm_threshold,
)

if TYPE_CHECKING:
    from pooler.pool.plan import PoolPlan
    from pooler.pool.pool import Pool
    from pooler.relay.server import ServerConn

RETRY_FIRST_SECONDS = 0.25
RESERVE_WAIT_SECONDS = 5.0
TOLD_WAIT_SECONDS = 1.0  # at the gate, for a login that can do without
RETAIN_SECONDS = 30.0  # retain_connections_time: what min_pool_size lacks is looked for again
LOOKS, LOOK_SECONDS_MIN = 4, 0.002  # at who waits, while a session is expected; between two of them
RESTARTS = (b"C57P01\0", b"C57P02\0")  # what a server that ends says to its sessions
DEFERS = frozenset({BUSY, "full", "seats_full"})  # for min_pool_size alone nobody waits
UNFIT_SECONDS = 10.0  # what was met longer ago says nothing of now: somebody has to try again
GIVES_WAY = "another login of its user waits"

log = structlog.get_logger()


class Growth:
    """The openings of one pool, and what is known of why they fail."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.last_error: PoolerError | None = None  # why nothing could be opened, while that holds
        self._failed_at = -inf
        self._permanent = False  # trying again soon is of no use: waiters are answered at once
        self._retry_seconds = 0.0
        self._retry_at = 0.0
        self._forgotten = trio.Event()
        self.counts = ScalingCounts()
        self.expecting = 0  # of what the core counts as opening: a session may come back yet
        self.replenish_at = -inf  # not before is anything opened for min_pool_size alone
        self._times = RecentTimes()
        self._ends = Ends()
        self._stirred = trio.Event()
        self._under_way: set[trio.CancelScope] = set()  # attempts, from the reservation to the open session
        self._outlived: set[trio.CancelScope] = set()  # those of them that began under an epoch that is over

    def start(self) -> None:
        """An opening that the core has counted."""
        self._pool.parts.nursery.start_soon(self._open)

    def refusal(self, now: float) -> PoolerError | None:
        """What to answer a new ticket with at once: a login that the server refused for good just now."""
        return self.last_error if self._permanent and now < self._retry_at else None

    def is_pausing(self, now: float) -> bool:
        """Whether none is tried at present, for the last failed."""
        return now < self._retry_at

    def unfit(self, now: float, *, has_sessions: bool) -> str:
        """Why the server is not fit to serve, by what the openings of late met there: it is not what it has
        to be, or it lets nobody in where there is no session (`has_sessions`: of any pool). Or empty."""
        error = self.last_error
        if error is None or self._permanent or now - self._failed_at > UNFIT_SECONDS:
            return ""
        says_so = BackendUnfit if has_sessions else BackendLost | DialFailed
        return str(error) if isinstance(error, says_so) else ""

    def forget(self) -> None:
        """Another backend serves now, or an operator says so: what failed is tried again at once."""
        self.last_error, self._permanent = None, False
        self._retry_seconds = self._retry_at = 0.0
        self._forgotten.set()
        self._forgotten = trio.Event()

    def outlive(self) -> None:
        """The epoch drains or is over: what is being opened now is of no use, though it may still come."""
        self._outlived |= self._under_way

    def give_up_outlived(self) -> None:
        """It has had its time: a server that says nothing must not keep its permits for ever."""
        for attempt in self._outlived:
            attempt.cancel()
        self._outlived.clear()

    # ---- what is known of the pool

    def stir(self) -> None:
        """A session ended: what is expected to come back may never come."""
        self._stirred.set()
        self._stirred = trio.Event()

    def ended(self, server: ServerConn, *, orderly: bool) -> None:
        """A server ended this session, or (not `orderly`) nobody did. Two of a pool within a second, and it
        was the server that ended: what was opened before is of yesterday, and goes as it falls idle."""
        core = self._pool.core
        by_restart = any(code in server.fatal for code in RESTARTS) if server.fatal else orderly
        if server.generation == core.generation and by_restart and self._ends.is_restart(monotonic()):
            core.generation += 1
            log.warning(Event.SERVER_RESTARTED, database=self._pool.plan.name, user=self._pool.plan.user)
            for each in core.retire_idle(monotonic(), -inf, 0):
                self._pool.retire(each, "its server restarted")

    def pressure(self, now: float, jitter: float, short_since: float) -> Pressure:
        """The pool at this moment."""
        pool, core = self._pool, self._pool.core
        times = pool.transaction_times
        coming = sum(bool(server.own) and server.client is None for server in core.active)
        sessions = len(core.idle) + len(core.active)
        return Pressure(
            sessions=sessions + self.counts.inflight_creates,
            warm_below=warm_threshold(
                pool.plan.size_max, pool.plan.settings.scaling_warm_pool_ratio, pool.parts.gates.workers),
            coming=coming, in_use=len(core.active) - coming, waiting=core.count_servable(),
            short_since=short_since, p99_seconds=self._times.p99(times.bounds, times.counts, now),
            wait_seconds=pool.wait_timeout_seconds, holds_session=pool.holds_session, jitter=jitter)

    async def _expect(self) -> None:
        """As long as sessions are likely to come back for those who wait: until nobody does at a look, or
        until somebody has at every look for as long as one of them may be expected to."""
        core, jitter = self._pool.core, self._pool.parts.random.uniform(1 - JITTER, 1 + JITTER)
        short_since = expected_for = core.oldest_wait()
        is_first = True
        self.expecting += 1
        try:
            while not core.blocked:
                now, oldest = monotonic(), core.oldest_wait()
                step, until = self.pressure(now, jitter, short_since).next_step()
                if oldest != expected_for and not is_first:
                    self.counts.anticipation_wakes_notify += 1
                if step is not Step.EXPECT:
                    return
                if until <= now:
                    self.counts.anticipation_wakes_timeout += 1
                    self.counts.create_fallback += 1
                    return
                expected_for, is_first = oldest, False
                pause = min(until - now, (until - short_since) / LOOKS)
                with trio.move_on_after(max(LOOK_SECONDS_MIN, pause)):
                    await self._stirred.wait()
        finally:
            self.expecting -= 1

    # ---- opening

    async def _open(self) -> None:
        pool, places = self._pool, self._pool.parts.places
        server: ServerConn | None = None
        turn = Turn(pool.plan.user)
        try:
            while server is None and self._still_wanted():
                await self._wait_out_failure()
                await self._expect()
                if self._still_wanted() and await self._has_place(turn):
                    server = await self._try_open()
                    if server is None:
                        places.leave(turn)  # while it waits to try again
                    else:
                        places.settle(turn, server)
        finally:
            places.leave(turn)
            if server is None:
                pool.core.open_failed()
        if server is not None and not pool.core.opened(server, monotonic()):
            pool.retire(server, "opened for an epoch that is over, or not needed any more")
        pool.promises.tried()
        pool.grow()

    def _still_wanted(self) -> bool:
        core = self._pool.core
        in_use = len(core.idle) + len(core.active)
        return not core.blocked and (
            self._is_waited_for() or (
                in_use < self._pool.plan.size_min and monotonic() >= self.replenish_at))

    def _is_waited_for(self) -> bool:
        core = self._pool.core
        return core.count_servable() > 0 or core.logins > 0

    async def _wait_out_failure(self) -> None:
        with trio.move_on_after(max(0.0, self._retry_at - monotonic())):
            await self._forgotten.wait()

    async def _has_place(self, turn: Turn) -> bool:
        """max_user_connections: wait in line for a while, and see to it that a place comes free."""
        plan, places, came = self._pool.plan, self._pool.parts.places, trio.Event()
        turn.on_place = came.set
        if places.ask(turn, plan.user_sessions_max):
            return True
        self.last_error = NoPermit(f'user "{plan.user}" has all of its {plan.user_sessions_max} sessions')
        if not self._pool.core.waiting:
            self._pool.promises.none_left()  # a login does not wait for what others have to give up
        self._make_room_for_user()
        with trio.move_on_after(RETRY_FIRST_SECONDS):
            await came.wait()
        return turn.has_place

    def _make_room_for_user(self) -> None:
        """For each that stands in line a session of another pool gives way: an idle one that nobody waits for
        there, or the next that falls idle where nobody has waited longer than here."""
        core, parts, user = self._pool.core, self._pool.parts, self._pool.plan.user
        if not core.ages:
            return  # no successor could be had for what would be closed
        others = [pool for pool in parts.of_user(user) if pool is not self._pool]
        if sum(pool.core.shed + pool.core.closing for pool in others) >= parts.places.waiting(user):
            return
        if not core.waiting and not core.logins:
            return  # for min_pool_size alone nobody gives way
        if any(not pool.core.waiting and pool.close_idle(GIVES_WAY, 1) for pool in others):
            return
        since = core.oldest_wait()
        busy = [pool for pool in others if len(pool.core.active) > pool.core.shed
                and pool.core.oldest_wait() > since]
        if busy:
            max(busy, key=lambda pool: len(pool.core.active)).shed(1, GIVES_WAY)

    def _make_room(self) -> None:
        """Where logins share an entry's user, a session that lies idle for another login gives way."""
        plan = self._pool.plan
        sharing = list(self._pool.parts.by_seat(plan.ledger, plan.seats_of, plan.user))
        in_use = sum(pool.core.total - pool.core.closing for pool in sharing)
        if in_use > plan.size_max and self._pool.core.ages:
            for pool in sharing:
                if pool is not self._pool and not pool.core.waiting and pool.close_idle(GIVES_WAY, 1):
                    return

    async def _try_open(self) -> ServerConn | None:
        only_told = self._pool.core.logins > 0 and not self._pool.core.waiting
        only_kept = not self._is_waited_for()
        self._make_room()
        try:
            return await self._open_by(self._plan_to_open(told=only_told, kept=only_kept))
        except NoPermit as refused:
            self._no_permit(refused, told=only_told, kept=only_kept)
            return None

    async def open_successor(self) -> ServerConn | None:
        """One more than the pool's size may allow, if it can be had at once."""
        plan = self._plan_to_open(told=False, kept=True)
        try:
            return await self._open_by(replace(plan, seats=plan.seats + SUCCESSORS_MAX))
        except NoPermit:
            return None

    async def _open_by(self, ask: OpenPlan) -> ServerConn | None:
        """Raises NoPermit; what else went wrong is noted."""
        plan, generation = self._pool.plan, self._pool.core.generation
        try:
            opened = await self._attempt(ask)
        except NotWanted:
            return None
        except NoPermit:
            raise
        except PoolerError as failed:
            self._back_off(failed, isinstance(failed, DialFailed) and failed.is_permanent)
            return None
        except Exception:  # a bug of ours in one opening must not end the worker; its permit is ended by now
            log.exception(Event.SOMETHING_FAILED, where="opening a session", database=plan.name)
            self._back_off(BackendLost("internal error in the pooler, opening a session"), permanent=False)
            return None
        self.forget()
        server = self._pool.adopt(opened)
        server.generation = generation  # of when its login began: a RECONNECT meanwhile means it, too
        return server

    def _plan_to_open(self, *, told: bool, kept: bool) -> OpenPlan:
        """`told`: only logins want it; `kept`: only min_pool_size does."""
        plan, parts = self._pool.plan, self._pool.parts
        return OpenPlan(
            db=plan.ledger, dbname=plan.dbname, user=plan.user, pool=plan.pool, secret=plan.secret,
            seats=self._pool.core.size_max, wait_seconds=0.0 if told or kept else RESERVE_WAIT_SECONDS,
            connect_timeout_seconds=_connect_timeout(plan), keepalive=plan.keepalive,
            eof_is_proof=plan.eof_is_proof, tls=parts.server_tls, duty=plan.duty,
            gate=self._gate(0.0 if kept else TOLD_WAIT_SECONDS if told else RESERVE_WAIT_SECONDS),
            ask=partial(facts_and_query, plan.connect_query) if plan.connect_query else session_facts,
        )

    def _gate(self, wait_seconds: float) -> PoolGate:
        pool, now = self._pool, monotonic()
        plan, times = pool.plan, pool.transaction_times
        jitter = pool.parts.random.uniform(1 - JITTER, 1 + JITTER)
        return PoolGate(
            pool.parts.gates.asks,
            Place(plan.ledger, plan.seats_of, plan.user, plan.settings.scaling_max_parallel_creates,
                  plan.settings.max_server_creates, _connect_timeout(plan)),
            self.counts, wait_seconds,
            budget_seconds(self._times.p99(times.bounds, times.counts, now), jitter),
            self._still_wanted, lambda: not pool.core.idle and not pool.core.blocked)

    def _no_permit(self, refused: NoPermit, *, told: bool, kept: bool) -> None:
        if told:  # nobody waits for it, and so nobody need give up a session for it
            self._pool.promises.none_left()
            return
        if kept and refused.reason in DEFERS:
            self.counts.replenish_deferred += 1
            self.replenish_at = monotonic() + RETAIN_SECONDS
            return
        self.last_error = refused
        self._retry_at = monotonic() + RETRY_FIRST_SECONDS

    async def _attempt(self, ask: OpenPlan) -> OpenSession:
        """Raises as the opening does."""
        with trio.CancelScope() as attempt:
            self._under_way.add(attempt)
            try:
                return await open_session(self._pool.parts.permits, ask)
            finally:
                self._under_way.discard(attempt)
                self._outlived.discard(attempt)
        raise BackendLost("the server is drained, and has not answered by now")

    def _back_off(self, error: PoolerError, permanent: bool) -> None:
        """Temporary failures: 250 ms doubling to server_login_retry; permanent ones: that pause at once."""
        plan = self._pool.plan
        retry_max = plan.settings.server_login_retry_seconds
        self._retry_seconds = min(retry_max, self._retry_seconds * 2 or RETRY_FIRST_SECONDS)
        self._retry_at = monotonic() + (retry_max if permanent else self._retry_seconds)
        self.last_error, self._permanent, self._failed_at = error, permanent, monotonic()
        self._pool.promises.none_left()
        log.warning(Event.SESSION_OPEN_FAILED, database=plan.name, user=plan.user, reason=str(error))
        if permanent:
            self._pool.refuse_waiting(error)


def _connect_timeout(plan: PoolPlan) -> float:
    return plan.settings.server_connect_timeout_seconds or inf
