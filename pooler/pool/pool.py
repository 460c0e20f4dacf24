"""One pool of one worker: the sessions of a (database, user), opened and closed under permits.

The decisions are the core's; here they are carried out: tasks that open and close, what is counted, and the
second face of a checkout (`async with pool.checkout()`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import structlog
import trio

from pooler.admission.ticket import Ticket, TicketState
from pooler.errors import NotServing, PoolerError
from pooler.observe.events import Event
from pooler.observe.metrics import Histogram
from pooler.pool.core import PoolCore
from pooler.pool.early import count_refused, queue_full, too_late
from pooler.pool.growth import Growth
from pooler.pool.opener import OpenSession, close_session, session_ended
from pooler.pool.parts import Parts
from pooler.pool.plan import PoolPlan
from pooler.pool.promises import Promises
from pooler.pool.reset import Reset
from pooler.pool.starts import Starts
from pooler.pool.successors import Successors
from pooler.relay.cancel import cancel_and_wait, cancel_for, end_without_word
from pooler.relay.leaving import deserted
from pooler.relay.refusal import MESSAGE_BYTES_MAX
from pooler.relay.server import RETIRED, ServerConn
from pooler.relay.task import TaskClient
from pooler.wire.session_state import Residue, kinds

if TYPE_CHECKING:
    from pooler.relay.client import ClientConn

SPARE_SECONDS = 0.5  # what was idle for so long can be spared for another worker
CLOSE_TIMEOUT_SECONDS = 5.0
LIFETIME_JITTER = 0.2
IDLE = 0x49
QUEUED = TicketState.QUEUED

log = structlog.get_logger()


class Pool:
    """The sessions and clients of one (database, user) in this worker."""

    def __init__(self, parts: Parts, plan: PoolPlan) -> None:
        self.parts, self.plan, self.book = parts, plan, parts.classes.of(plan.ledger)
        self.core: PoolCore[ServerConn] = PoolCore(plan.size_max, plan.settings.scaling_max_parallel_creates)
        self.core.grants_until, self.core.on_room = parts.cut_off.until, self.grow
        self.refused: PoolerError | None = None  # what a ticket was refused with by the request just made
        self.statements, self.look = parts.statements, parts.look.residue
        self.look_at_piece = parts.look.residue_of_piece
        self.custom_names = parts.look.custom
        self.function_residue = int(Residue.SUSPECT)
        self.apply_settings(plan)
        self.counted_as = (plan.name, plan.user)  # by whom its clients' limits are
        self.notified_at = 0.0  # who has waited since before is told
        self.greeting: dict[bytes, bytes] | None = None
        self.clients: set[ClientConn] = set()
        self.pinned: set[ClientConn] = set()
        self.states_left: dict[str, int] = {}
        self.received_bytes = self.sent_bytes = self.logins = 0
        self.client_parses = self.server_parses = self.binds = 0
        self.queries = self.errors = self.assignments = 0
        self.query_seconds = 0.0
        self.sessions_opened = self.sessions_closed = self.sessions_lost = 0
        self.waits, self.transaction_times = Histogram(), Histogram()  # waits: those that ended in a session
        self.waited, self.transaction_counted = self.waits.observe, self.transaction_times.observe
        self.drain_at: float | None = None  # when what still runs under an epoch that is over is cancelled
        self.drain_cancelled = False  # it was: what is left is closed at drain_at
        self.past_limit: dict[ServerConn, float] = {}  # cancelled at transactionLimit, what began when
        self.growth, self.successors = Growth(self), Successors(self)
        self.starts, self.promises = Starts(self), Promises(self)

    def apply_settings(self, plan: PoolPlan) -> None:
        """At the making, whenever a client comes for it, and at a reload."""
        self.plan = plan
        self.used_at = monotonic()  # when somebody last came for it or was in it, as the janitor saw
        core = self.core
        core.size_max, core.serves_once = plan.size_max, not plan.server_lifetime_seconds
        if (excess := core.total - core.closing - core.shed - plan.size_max - plan.reserve) > 0 and (
                excess := excess - self.successors.overlap()) > 0:
            self.shed(excess, "the pool was made smaller")
        settings = plan.settings
        core.opening_max = settings.scaling_max_parallel_creates
        self.check_query = b"" if settings.server_check_query == "<empty>" else (
            settings.server_check_query.encode())
        self.core.check_after = settings.server_check_delay_seconds if settings.server_check_query else (
            float("inf"))
        self.packet_bytes_max = min(MESSAGE_BYTES_MAX, settings.max_packet_size_bytes)
        self.wait_timeout_seconds = max(0.0, plan.query_wait_timeout_seconds or float("inf"))  # 0: no wait
        self.holds_session: bool = plan.mode == "session"
        self.is_statement_mode = plan.mode == "statement"
        self.statements_max: int = settings.max_prepared_statements
        self.passes_names = self.holds_session or self.statements_max == 0
        self.state_rule = settings.session_state
        self.refuses = self.state_rule == "reject" and not self.holds_session
        self.hits: Callable[[bytes], object] = len if self.refuses else self.parts.look.hits  # len: each
        self.reset = Reset.of(plan)

    # ---- asking and giving

    def request(self, ticket: Ticket) -> ServerConn | None:
        """A session at once, or the ticket waits and will be called.

        One that does not even wait then was refused at once: `why_refused` says why; it is not called.
        """
        if ticket.account.tolls:
            self.refused = self.parts.tollgate.admit(self, ticket)
            if self.refused is not None:
                ticket.end(TicketState.REJECTED)
                return None
            if ticket.toll is not None:
                return None
        session = self.core.request(ticket)
        self.assignments += 1
        if session is None:
            if ticket.state is not QUEUED:
                self.refused = queue_full(ticket)
                return None
            if (late := too_late(self, ticket)) is not None:
                self.core.withdraw(ticket, TicketState.REJECTED)
                count_refused(ticket)
                self.refused = late
                return None
            if self.growth.last_error is not None and self.growth.refusal(monotonic()) is not None:
                self.core.withdraw(ticket, TicketState.REJECTED)
                self.refused = None
            if self.core.idle or self.core.opening < self.core.opening_max:  # else all are on their way
                self.grow()
        if ticket.account.tolls and ticket.state is not TicketState.REJECTED:
            self.parts.tollgate.pay(ticket)
        return session

    def enter(self, ticket: Ticket) -> None:
        """One that waited for tokens may pass: it is served, queued or refused, and called."""
        session = self.request(ticket)
        if session is not None:
            ticket.granted(session)
        elif ticket.state is not QUEUED:
            ticket.refused(self.why_refused)

    @property
    def why_refused(self) -> PoolerError:
        """Why the request that was made last neither has a session nor waits."""
        return self.refused or self.last_error or NotServing("no session can be had")

    @property
    def last_error(self) -> PoolerError | None:
        """Why no session could be opened, while that holds."""
        return self.growth.last_error

    def give(self, server: ServerConn, now: float) -> None:
        """A free, clean session comes back."""
        if server.retire or not self.core.give(server, now):
            self.retire(server, server.retire or RETIRED)

    @property
    def transactions(self) -> int:
        """How many ended."""
        return self.transaction_times.count

    def next_ticket(self) -> int:
        """A number for the session table."""
        self.parts.tickets += 1
        return self.parts.tickets

    def withdraw(self, ticket: Ticket) -> bool:
        """End a wait. False if the ticket does not wait: it has a session, or ended already."""
        if ticket.toll is not None:
            ticket.toll.forget(ticket)
        return self.core.withdraw(ticket, TicketState.CANCELLED)

    def state_left(self, residue: int) -> None:
        """Count what a transaction left on its session."""
        for kind in kinds(residue):
            self.states_left[kind] = self.states_left.get(kind, 0) + 1

    def client_left(self, server: ServerConn, client: Any) -> None:
        """A client went away with a session of its own."""
        deserted(server, client)

    def client_closed(self, client: ClientConn) -> None:
        """A client is gone."""
        self.clients.discard(client)
        self.pinned.discard(client)
        self.promises.forget(client.ticket)
        self.parts.client_closed(client)

    # ---- opening

    def grow(self) -> None:
        """Ask idle sessions whether they are there, and start as many openings as the core wants."""
        for server in self.core.take_to_check():
            server.write(server.run_own([self.check_query], partial(self._checked, server)))
        for _ in range(self.core.openings_wanted()):
            self.core.opening += 1
            self.growth.start()

    def _checked(self, server: ServerConn, ok: bool) -> None:
        if ok and server.status == IDLE:
            self.give(server, monotonic())
        else:
            server.give_up("server_check_query was not answered as it should be")

    def refuse_waiting(self, error: PoolerError) -> None:
        """Answer everybody who waits."""
        for ticket in (*self.core.reject_all(), *self.parts.tollgate.reject_all(self)):
            ticket.refused(error)

    def adopt(self, opened: OpenSession) -> ServerConn:
        """A session that was opened for this pool enters the reactor."""
        parts = self.parts
        self.greeting = dict(opened.parameters)  # of the newest: the server may be another one by now
        server = ServerConn(parts.reactor, self, opened, parts.parameters_of(dict(opened.parameters)))
        lifetime = self.plan.server_lifetime_seconds
        if lifetime:
            jitter = parts.random.uniform(1 - LIFETIME_JITTER, 1 + LIFETIME_JITTER)
            server.expires_at = server.connected_at + lifetime * jitter
        server.generation = self.core.generation
        if parts.table is not None:
            server.row = parts.table.take(self.plan.ledger, opened.permit, opened.pid)
        parts.servers[server] = parts.next_number()
        parts.reactor.add(server.fd, server.on_event)
        self.sessions_opened += 1
        log.info(Event.SESSION_OPENED, database=self.plan.name, user=self.plan.user,
                 permit=str(server.permit), pid=server.pid, epoch=server.epoch)
        return server

    # ---- closing

    def retire(self, server: ServerConn, reason: str) -> None:
        """Close a session with proof; it is out of the core from now on."""
        self.core.remove(server)
        self.growth.stir()
        if self.core.idle and self.core.waiting:  # another may have to be asked
            self.grow()
        server.close_down()
        self.core.closing += 1
        self.parts.nursery.start_soon(self._close, server, reason)

    async def _close(self, server: ServerConn, reason: str) -> None:
        log.info(Event.SESSION_CLOSED, database=self.plan.name, permit=str(server.permit), reason=reason)
        try:
            if server.owed:  # something still runs there: Terminate alone would not be read before it ends;
                # beside it, for a server that takes no cancel any more must not keep its permit OPEN so long
                self.parts.nursery.start_soon(
                    cancel_and_wait, server, self.plan.settings.cancel_wait_timeout_seconds)
            if server.cut:
                orderly = await end_without_word(server.sock, CLOSE_TIMEOUT_SECONDS)
                await session_ended(self.parts.permits, server.opened, orderly=orderly)
            else:
                await close_session(self.parts.permits, server.opened, CLOSE_TIMEOUT_SECONDS)
        finally:
            self.core.closing -= 1
            self._forget(server)
        self.grow()

    def session_ended(self, server: ServerConn, orderly: bool) -> None:
        """The server ended it, or the connection broke."""
        self.core.remove(server)
        self.growth.stir()
        self.growth.ended(server, orderly=orderly)
        self.grow()
        self.sessions_lost += 1
        log.warning(Event.SESSION_LOST, database=self.plan.name, permit=str(server.permit), orderly=orderly)
        self.core.closing += 1
        self.parts.nursery.start_soon(self._end, server, orderly)

    async def _end(self, server: ServerConn, orderly: bool) -> None:
        try:
            await session_ended(self.parts.permits, server.opened, orderly=orderly)
        finally:
            self.core.closing -= 1
            self._forget(server)
        self.grow()

    def _forget(self, server: ServerConn) -> None:
        self.sessions_closed += 1
        self.parts.servers.pop(server, None)
        self.parts.places.ended(server)
        self.parts.server_forgotten.set()
        self.parts.server_forgotten = trio.Event()
        if server.row is not None:
            server.row.free()
            server.row = None

    def close_idle(self, reason: str, count: int | None = None) -> int:
        """Close idle sessions (all, or so many); returns how many."""
        taken = self.core.take_idle(len(self.core.idle) if count is None else count)
        for server in taken:
            self.retire(server, reason)
        return len(taken)

    def spare(self, count: int) -> int:
        """Close up to `count` sessions that nobody has needed for a while, and nobody waits for; how many."""
        core, idle_before = self.core, monotonic() - SPARE_SECONDS
        if core.waiting:
            return 0
        unused = sum(each.idle_since <= idle_before and not each.promised for each in core.idle)
        return self.close_idle("another worker waits, and nobody here uses it", min(count, unused))

    def shed(self, count: int, reason: str = "another worker waits for its permit") -> int:
        """Give up to `count` sessions up as they fall idle; how many."""
        closed = self.close_idle(reason, count)
        before = self.core.shed
        self.core.shed = min(len(self.core.active), before + count - closed)
        return closed + self.core.shed - before

    def break_off_session(self, server: ServerConn) -> None:
        """Cancel what runs there: its client hears it from the server, and the session closes when idle."""
        server.retire = server.retire or "its epoch drains"
        self.parts.nursery.start_soon(
            cancel_for, server, server.client, self.plan.settings.cancel_wait_timeout_seconds)

    # ---- what the operator says

    def pause(self) -> None:
        """Grant nothing more; sessions in use go on."""
        self.core.paused = True

    def resume(self) -> None:
        """Grant again."""
        self.core.paused = False
        self.wake()

    def wake(self) -> None:
        """Serve those who waited while nothing was granted."""
        for server in self.core.wake(monotonic()):
            self.retire(server, "its time is over")
        self.grow()

    # ---- the face for tasks

    @asynccontextmanager
    async def checkout(self, timeout_seconds: float | None = None) -> AsyncIterator[TaskClient]:
        """A session for a task, for as long as the block lasts.

        Raises WaitEnded, NoPermit, NotServing or the server's login error. Whatever happens in the block, and
        at whichever await it is cancelled, the session goes back, or is closed if it is not in step.
        """
        client = TaskClient(self)
        ticket = client.ticket
        wait = timeout_seconds
        if wait is None:  # what does not wait for a session in use may wait for one that is opened
            wait = self.wait_timeout_seconds or self.plan.settings.server_connect_timeout_seconds
        now = monotonic()
        ticket.start(now, now + wait)
        server = self.request(ticket)
        if server is not None:
            client.bind(server)
        try:
            if server is None and not ticket.waiting:
                raise self.why_refused
            await client.bound()  # may raise Cancelled even if the ticket was granted meanwhile
            yield client
        finally:
            if not self.withdraw(ticket):
                client.give_back()

    async def greeting_parameters(self, timeout_seconds: float) -> dict[bytes, bytes]:
        """What a server of this pool says at login; opens a session if there has been none yet."""
        if self.greeting is None:
            async with self.checkout(timeout_seconds):
                self.assignments -= 1  # no client has it
        if self.greeting is None:
            raise NotServing("no server session could be opened")
        return self.greeting
