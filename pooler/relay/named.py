"""Clients that name their next transaction (`pooler.ticket`): it runs once at most, over workers and hosts.

The name is registered in the ledger before its client waits for a session, and begun there before anything is
sent to that session, which is held meanwhile; how it ended is told until the ledger has it. A client is a
`NamedClient` for as long as that lasts, and costs others nothing. A name is used up by a transaction that
began under it; one that was refused, or left the queue, is kept for the next try.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from enum import Enum
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from coordinator.ledger.record import Permit
from coordinator.ledger.tickets import Outcome
from coordinator.ledger.tickets import TicketState as Stored
from coordinator.link import Args, LinkRefused
from coordinator.session_table import decode_who
from pooler.admission.ticket import TicketState
from pooler.errors import (
    TicketExecuting,
    TicketFinished,
    TicketLedgerAway,
    TicketMoved,
    WaitCancelled,
)
from pooler.relay.answers import IDLE
from pooler.relay.client import ClientConn
from pooler.relay.leaving import free
from pooler.relay.losing import REFITS_MAX, is_outcome_unknown
from pooler.relay.refusal import refuse_unsent, refuse_waited
from pooler.relay.waiting import await_opening, why_refused
from pooler.wire.outcome import OutcomeWatch

if TYPE_CHECKING:
    from pooler.relay.server import ServerConn

ANSWER_SECONDS_MAX = 5.0  # for a registration whose client is gone, and for the beginning of a transaction
PAID_MAX = 256  # tries whose place was taken and not registered again here
WAIT_SECONDS_MAX: Final = 23 * 3600.0  # less than the ledger remembers who waits


class Phase(Enum):
    """Where one named use is."""

    REGISTERING = "the ledger is asked"
    QUEUED = "it waits for a session, or for its client to send something that runs"
    BEGINNING = "it has a session, and the ledger is asked"
    RUNNING = "its messages are passed on"
    OVER = "it has ended"


class Ledger(Protocol):
    """What is asked of the permits' end of the link."""

    async def register_ticket(
        self, db: str, ticket_id: str, client: str, tenant: str, klass: str) -> Args: ...

    async def begin_ticket(
        self, db: str, ticket_id: str, attempt: int, permit: Permit, pid: int) -> Args: ...

    def ticket_ended(self, db: str, ticket_id: str, attempt: int, state: str, outcome: str) -> None: ...


class Named:
    """One named use of a client."""

    def __init__(self, names: Names, client: ClientConn) -> None:
        self.names, self.client, self.id = names, client, client.ticket_id
        self.db = client.pool.plan.ledger
        self.phase = Phase.REGISTERING
        self.attempt = 0  # which registration of the name it is
        self.server: ServerConn | None = None  # held while the ledger is asked whether it may begin
        self.watch = OutcomeWatch(keeps_last=client.pool.holds_session)
        self._ended_as = Stored.CANCELLED
        self._scope: trio.CancelScope | None = None

    # ---- what waits for the ledger, in tasks

    async def register(self) -> None:
        """Wait for the ledger no longer than for a session; then wait for that."""
        client = self.client
        tenant, klass, _, _ = decode_who(client.who) if client.who else ("", "", "", "")
        answer: Args | None = None
        with trio.CancelScope() as self._scope:
            left = client.ticket.deadline - monotonic()
            self._scope.deadline = trio.current_time() + (left if left > 0 else ANSWER_SECONDS_MAX)  # nowait
            with suppress(LinkRefused):
                answer = await self.names.ledger.register_ticket(
                    self.db, self.id, client.address, tenant, klass)
        self._scope = None
        self.attempt = answer.get("attempt", 0) if answer is not None else 0
        if self.phase is not Phase.REGISTERING:
            self._tell_end(self._ended_as)
        elif answer is None:
            self._refuse(TicketLedgerAway(
                f'ticket "{self.id}" was not recorded: the ledger of database "{self.db}" does not answer'))
        elif not self.attempt:
            self._refuse(self._refused_by(answer))
        else:
            self.names.waiting[self.key] = self
            client.ticket.is_prepaid = bool(answer.get("joined")) and self.names.has_paid(
                (self.db, self.id, self.attempt - 1))
            self.ask_for_session()

    async def begin(self, server: ServerConn) -> None:
        """The session is held; nothing has been sent to it."""
        answer: Args | None = None
        with trio.move_on_after(ANSWER_SECONDS_MAX):
            with suppress(LinkRefused):
                answer = await self.names.ledger.begin_ticket(
                    self.db, self.id, self.attempt, server.permit, server.pid)
        if self.phase is not Phase.BEGINNING:
            return
        if self.server is None:
            self._again()
        elif answer is None:
            self._give_back()
            self._refuse(TicketLedgerAway(
                f'ticket "{self.id}" was not begun: the ledger of database "{self.db}" does not answer'))
        elif answer.get("refused"):
            self._give_back()
            self.moved()
        else:
            self._run(server)

    # ---- decisions, without waiting

    @property
    def key(self) -> tuple[str, str, int]:
        """What the coordinator calls it."""
        return self.db, self.id, self.attempt

    def ask_for_session(self) -> None:
        """The name is registered: queue like anybody."""
        client, now = self.client, monotonic()
        self.phase = Phase.QUEUED
        ticket = client.ticket
        ticket.queued_at = now  # what the pool may grant is decided by the time at which it was asked
        server = client.pool.request(ticket)
        if server is not None:
            self.granted(server)
        elif not (ticket.waiting and (ticket.deadline > now or await_opening(client))):
            client._refused(why_refused(client))

    def granted(self, server: ServerConn) -> None:
        """Hold the session until the ledger has said that the transaction may begin."""
        self.phase, self.server = Phase.BEGINNING, server
        server.client, server.started_at = self.client, monotonic()
        self.client.pause(True)
        self.names.nursery.start_soon(self.begin, server)

    def lose(self) -> None:
        """The session that is held ended. The ledger's answer about it is waited for all the same: what it
        writes must not come after what is asked for the next one."""
        self.server = None
        self.client.ticket.release()

    def _again(self) -> None:
        client = self.client
        client.refits += 1
        if client.refits > REFITS_MAX:
            self.phase = Phase.QUEUED
            client.break_off("08006", "session after session ended before anything was sent to it")
            return
        client.ticket.start(monotonic(), client.ticket.deadline)
        client.ticket.is_prepaid = True
        self.ask_for_session()

    def _run(self, server: ServerConn) -> None:
        client = self.client
        self.phase, self.server = Phase.RUNNING, None
        client.refits = 0
        client.pause(False)
        data, client.buffer = client.buffer, b""
        client._resume(client._bind(server, monotonic(), data))

    def _give_back(self) -> None:
        """Nothing was sent to it: it goes back as it came."""
        server, self.server = self.server, None
        if server is not None:
            self.client.ticket.release()
            server.client = None
            free(server, monotonic())

    def moved(self) -> None:
        """The name is another registration's by now: what it does is none of ours."""
        client = self.client
        client.pool.withdraw(client.ticket)
        self.over()
        _refuse(client, TicketMoved(
            f'canceling statement: ticket "{self.id}" was registered anew by another connection'))

    def cancel(self) -> None:
        """A CancelRequest, while the ledger is asked whether it may begin."""
        self._give_back()
        self.end(Stored.CANCELLED)
        _refuse(self.client, WaitCancelled("canceling statement due to user request"))

    def give_up(self) -> None:
        """The client is served no more. Before its session is taken from it: how does this end?"""
        server = self.client.server
        if self.phase is Phase.BEGINNING:
            self._give_back()
        if self.phase is not Phase.RUNNING or server is None or self._nothing_ran(server):
            self.end(Stored.CANCELLED)
        else:
            self.end(Stored.RELEASED, self.outcome_without(server))

    def _nothing_ran(self, server: ServerConn) -> bool:
        watch = self.watch
        return server.status == IDLE and not (watch.outcome or watch.ran or server.owed or server.unsynced)

    def outcome_without(self, server: ServerConn) -> Outcome:
        """What becomes of it if nothing more is heard of this session."""
        if self.watch.outcome and not (self.watch.keeps_last and (server.owed or server.status != IDLE)):
            return Outcome(self.watch.outcome)
        return Outcome.UNKNOWN if is_outcome_unknown(self.client, server) else Outcome.ROLLED_BACK

    def detached(self) -> None:
        """The session was taken back. Where nothing was executed yet, the name is still to be used."""
        if self.watch.outcome:
            self.end(Stored.RELEASED, Outcome(self.watch.outcome))
        else:
            self.phase = Phase.QUEUED

    def end(self, state: Stored, outcome: Outcome = Outcome.NONE) -> None:
        """It is over, and the ledger is told so; the name is used up if a transaction ran under it."""
        if state is Stored.RELEASED and self.client.ticket_id == self.id:
            self.client.name_is_used()
        self._ended_as = state
        if self._scope is not None:  # the answer, if it comes, says what to end
            self._scope.deadline = min(self._scope.deadline, trio.current_time() + ANSWER_SECONDS_MAX)
        self._tell_end(state, outcome)
        self.over()

    def over(self) -> None:
        """Its client is as any other again."""
        client = self.client
        self.phase = Phase.OVER
        self.names.waiting.pop(self.key, None)
        client.named = None
        client.__class__ = ClientConn
        client.ticket.granted, client.ticket.refused = client._granted, client._refused

    def _tell_end(self, state: Stored, outcome: Outcome = Outcome.NONE) -> None:
        if self.attempt:
            self.names.ledger.ticket_ended(self.db, self.id, self.attempt, str(state), str(outcome))

    def _refuse(self, error: Exception) -> None:
        """Neither this nor what it was is in the queue any more."""
        self.client.ticket.end(TicketState.REJECTED)
        self.end(Stored.REJECTED)
        _refuse(self.client, error)

    def _refused_by(self, answer: Args) -> Exception:
        if answer["refused"] == "finished":
            return TicketFinished(f'ticket "{self.id}" has ended: outcome={answer["outcome"]}')
        return TicketExecuting(
            f'ticket "{self.id}" is executing (worker {answer["owner"][:8]} on {answer["host"]}'
            + (", which is gone: its session is looked for)" if answer["state"] == Stored.UNKNOWN else ")"))


class NamedClient(ClientConn):
    """A client while a use of it is named. A ClientConn becomes one, and is one again after it."""

    __slots__ = ()
    named: Named

    def _ask(self, data: bytes) -> bytes:
        if self.named.id != self.ticket_id and data[0] not in _ALONE:
            self.named.end(Stored.CANCELLED)
        return ClientConn._ask(self, data)

    def _granted(self, server: ServerConn) -> None:
        self.pool.waited(monotonic() - self.requested_at)
        self.named.granted(server)

    def _refused(self, error: Exception) -> None:
        self.named.end(Stored(self.ticket.state.value))
        _refuse(self, error)

    def cancel_wait(self) -> None:
        """See ClientConn."""
        if self.named.phase is Phase.BEGINNING:
            self.named.cancel()
        else:
            ClientConn.cancel_wait(self)

    def deliver(self, data: bytes) -> None:
        """See ClientConn."""
        if self.named.phase is Phase.RUNNING:
            self.named.watch.feed(data)
        ClientConn.deliver(self, data)

    def detached(self, now: float) -> None:
        """See ClientConn."""
        ClientConn.detached(self, now)
        self.named.detached()

    def transaction_ended(self, now: float) -> None:
        """See ClientConn: in session pooling the name is for the session, else for the transaction."""
        named = self.named
        ClientConn.transaction_ended(self, now)
        if named.phase is Phase.RUNNING and named.watch.outcome and not self.pool.holds_session:
            named.end(Stored.RELEASED, Outcome(named.watch.outcome))

    def server_lost(self, server: ServerConn, fatal: bytes) -> None:
        """See ClientConn."""
        named = self.named
        if named.phase is Phase.BEGINNING:
            named.lose()
            return
        if self.fitting and not (self.holds and self.proven):  # it has seen nothing: another will do
            named.phase = Phase.QUEUED
        else:
            named.end(Stored.RELEASED, named.outcome_without(server))
        ClientConn.server_lost(self, server, fatal)

    def give_up_session(self) -> None:
        """See ClientConn."""
        self.named.give_up()
        ClientConn.give_up_session(self)


_ALONE: Final = frozenset(b"SXHdcf")


class Names:
    """The named uses of one worker's clients. Their tasks run in `nursery`."""

    def __init__(self, ledger: Ledger, nursery: trio.Nursery) -> None:
        self.ledger = ledger
        self.nursery = nursery
        self.waiting: dict[tuple[str, str, int], Named] = {}  # registered, and not over
        self._paid: OrderedDict[tuple[str, str, int], None] = OrderedDict()  # lost its place, and had paid

    def ask(self, client: ClientConn, data: bytes) -> bytes:
        """A client that has named what comes wants a session. → nothing: all waits."""
        client.buffer = data
        now = client.requested_at = monotonic()
        wait = min(client.pool.wait_timeout_seconds, client.deadline_seconds, WAIT_SECONDS_MAX)
        client.ticket.start(now, now + wait)
        client.pause(True)
        if client.named is not None:
            client.named.ask_for_session()
            return b""
        client.named = named = Named(self, client)
        client.__class__ = NamedClient
        client.ticket.granted, client.ticket.refused = client._granted, client._refused
        self.nursery.start_soon(named.register)
        return b""

    def moved(self, args: Args) -> None:
        """The coordinator says that a later registration took this one's place."""
        named = self.waiting.get((args["db"], args["id"], args["attempt"]))
        if named is not None and named.phase is Phase.QUEUED and named.client.ticket.waiting:
            if named.client.ticket.toll is None:
                self._paid[named.key] = None
                while len(self._paid) > PAID_MAX:
                    self._paid.popitem(last=False)
            named.moved()

    def has_paid(self, key: tuple[str, str, int]) -> bool:
        """Whether this try, whose place another takes, had its tokens from this worker. A try that stood in
        the ledger as waiting may have been refused, or wait for tokens."""
        if key in self._paid:
            del self._paid[key]
            return True
        first = self.waiting.get(key)
        return (first is not None and first.phase is Phase.QUEUED and first.client.ticket.waiting
                and first.client.ticket.toll is None)


def _refuse(client: Any, error: Exception) -> None:
    """Answer what waited, and what came behind it before it was answered: it is not to take the name."""
    data, client.buffer = client.buffer, b""
    client.pause(False)
    client._resume(refuse_waited(client, error, refuse_unsent(client, error, data)))
