"""One logged-in client in the reactor: gets a session when it asks for something, passes its messages on,
and gives the session back when the transaction is over.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from pooler.admission.ticket import Ticket, TicketState
from pooler.errors import PoolerError, WaitCancelled
from pooler.relay import owed as o
from pooler.relay import parting
from pooler.relay.asking import Asked, Asking
from pooler.relay.keeping import unpin
from pooler.relay.leaving import end_transaction
from pooler.relay.losing import session_lost
from pooler.relay.own_settings import LOOK_BYTES, answer_own
from pooler.relay.reactor import GONE, IN, QUIET, READ, WRITE, Reactor
from pooler.relay.refusal import WITHOUT_SESSION, answer_alone, drop, refuse_unsent, refuse_waited
from pooler.relay.regaining import RESETS, regain
from pooler.relay.requests import HELD_BACK, pass_requests
from pooler.relay.waiting import await_opening, why_refused
from pooler.wire.messages import Fault, error_response
from pooler.wire.own_parameters import MENTION
from pooler.wire.parameters import ParameterSet
from pooler.wire.prepared import ClientStatements

if TYPE_CHECKING:
    from pooler.pool.pool import Pool
    from pooler.relay.server import ServerConn

RECV_BYTES = 65_536
QUEUED, QUEUE_EXPIRED = TicketState.QUEUED, TicketState.QUEUE_EXPIRED


class ClientConn(Asking):
    """A client: its socket, what it has prepared and set, and the session that serves it now."""

    __slots__ = (
        "_paused", "application_name", "buffer", "cancel_key", "chunks", "closing", "connected_at",
        "dropping", "fd", "fitting", "forgets", "holds", "idle_since", "last_sent", "last_word", "missing",
        "out", "parameters", "parting_since", "pool", "proven", "reactor", "recv", "refits", "requested_at",
        "send", "server", "skip", "skip_to_sync", "sock", "started", "statements", "tail", "ticket", "unsent",
        "warned")

    def __init__(
        self, reactor: Reactor, pool: Pool, sock: socket.socket, address: str, cancel_key: bytes,
        parameters: ParameterSet, application_name: str, asked: Asked,
    ) -> None:
        self.reactor, self.pool, self.sock = reactor, pool, sock
        self.ticket = Ticket(self._granted, self._refused, self)
        super().__init__(address, asked)
        self.fd = sock.fileno()
        self.recv, self.send = sock.recv, sock.send
        self.cancel_key = cancel_key
        self.parameters = self.started = parameters
        self.warned: tuple[str, ...] = ()
        self.application_name = application_name
        self.statements: ClientStatements | None = None
        self.holds = pool.holds_session
        self.server: ServerConn | None = None
        self.buffer = b""
        self.chunks: list[bytes] | None = None  # of a message that is taken whole
        self.missing = self.refits = 0
        self.forgets: bytes | None = None  # prepared names, by what runs now: nothing is sent behind it
        self.skip = 0
        self.dropping = False  # something refused is still coming in
        self.skip_to_sync = False
        self.tail: bytes | None = None  # of a query that passes in pieces: what the next piece follows
        self.proven = False  # a server has taken its parameters
        self.fitting = False  # has a session that does not have its parameters yet: nothing was sent to it
        self.unsent = b""  # goes out at the end of the reactor's batch
        self.out: bytearray | None = None  # what the client could not take yet
        self.closing = False
        self.last_sent = b""
        self.last_word, self.parting_since = b"", 0.0  # see `part`
        self.connected_at = self.requested_at = self.idle_since = monotonic()
        self._paused = False

    def start(self, leftover: bytes) -> None:
        """Enter the reactor; `leftover` came in behind the login."""
        self.reactor.add(self.fd, self.on_event)
        if leftover:
            self._take(leftover)

    # ---- towards the client

    def deliver(self, data: bytes) -> None:
        """Send at the end of the reactor's batch.

        Sessions are given their next work first, and a process with many connections is woken once for all.
        """
        if self.unsent:
            self.unsent += data
        else:
            self.unsent = data
            self.reactor.at_end(self.send_unsent)

    def send_unsent(self) -> None:
        """Send, or keep what the client cannot take yet and stop reading its server."""
        data, self.unsent = self.unsent, b""
        if self.closing:
            return
        if self.out:
            self.out += data
            if self.server is not None:
                self.server.pause(True)
            return
        try:
            sent = self.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.left()
            return
        if sent < len(data):
            self.out = bytearray(memoryview(data)[sent:])
            self._watch()  # a client that does not read its answers is not asked for more
            if self.server is not None:
                self.server.pause(True)

    def pause(self, paused: bool) -> None:
        """The server cannot take more (or can again), or the client waits for a session. What is held back
        has no end but this: then no more of it is read, whoever else can go on."""
        if paused is not self._paused and (paused or (
                self.missing <= HELD_BACK // 2 and not self.parting_since)):
            self._paused = paused
            self._watch()

    def _watch(self) -> None:
        if not self.closing:
            quiet = self._paused or self.out
            self.reactor.change(self.fd, (QUIET if quiet else READ) | (WRITE if self.out else 0))

    def _flush(self) -> None:
        out = self.out
        assert out is not None
        try:
            sent = self.send(out)
        except BlockingIOError:
            return
        except OSError:
            self.left()
            return
        del out[:sent]
        if not out:
            self.out = None
            if self.closing:
                parting.end(self)
                return
            self._watch()
            if self.server is not None:
                self.server.pause(False)

    # ---- from the client

    def on_event(self, mask: int) -> None:
        """The reactor's call."""
        if mask != IN or self._paused or self.out or self.ticket.state is QUEUED:
            self._on_rarer(mask)
            return
        try:
            data = self.recv(RECV_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.left()
            return
        self._take(data) if data else self.left()

    def _on_rarer(self, mask: int) -> None:
        if mask & WRITE and self.out:
            self._flush()
        if self.closing:
            if self.fd >= 0:
                parting.on_event(self, mask)
            return
        if not mask & ~WRITE:
            return
        if mask & GONE and (self._paused or self.out or self.ticket.waiting):
            self.left()
        elif self.ticket.waiting:
            self.pause(True)  # it sends on while it waits; most do not, and are left in the epoll as they are
        elif not self._paused and not self.out:
            self.on_event(IN)

    def _take(self, data: bytes) -> None:
        self.pool.received_bytes += len(data)
        if self.missing or self.buffer or self.dropping:
            data = self._assemble(data)
            if not data:
                return
        if self.server is not None:
            self.requested_at = monotonic()
        while self.server is None:
            data = self._ask(data)
            if not data:
                return
        self._pass(data)

    def _assemble(self, data: bytes) -> bytes:
        """What had come before, with what came now. → what is to be served."""
        if self.missing:
            assert self.chunks is not None
            self.chunks.append(data)
            self.missing -= len(data)
            if self.missing > 0:
                return b""
            data = b"".join(self.chunks)
            self.chunks, self.missing = None, 0
        elif self.buffer:
            data = self.buffer + data
            self.buffer = b""
        return drop(self, data) if self.dropping else data

    def _pass(self, data: bytes) -> None:
        assert self.server is not None
        try:
            pass_requests(self, self.server, data)
        except PoolerError as broken:  # the protocol, or a limit
            self.break_off(broken.sqlstate, str(broken))

    def _ask(self, data: bytes) -> bytes:
        """Get a session for this. → what is to be passed on or asked for again; the rest waits or is done."""
        if len(data) < 5:
            self.buffer = data
            return b""
        if data[0] in WITHOUT_SESSION:
            return answer_alone(self, data)
        if (self.own is not None or MENTION in data[:LOOK_BYTES].lower()) and (
                rest := answer_own(self, data)) is not None:
            return rest
        if self.ticket_id and self.pool.parts.names is not None:
            return self.pool.parts.names.ask(self, data)
        now = self.requested_at = monotonic()
        ticket, wait = self.ticket, self.pool.wait_timeout_seconds
        ticket.start(now, now + (wait if wait <= self.deadline_seconds else self.deadline_seconds))
        server = self.pool.request(ticket)
        if server is not None:
            return self._bind(server, now, data)
        if ticket.waiting and (ticket.deadline > now or await_opening(self)):
            self.buffer = data
            return b""
        return refuse_unsent(self, why_refused(self), data)

    def _granted(self, server: ServerConn) -> None:
        """A waiting ticket got its session (called by whoever gave it back)."""
        now = monotonic()
        self.pool.waited(now - self.requested_at)
        if self._paused:
            self.pause(False)
        data, self.buffer = self.buffer, b""
        self._resume(self._bind(server, now, data))

    def _bind(self, server: ServerConn, now: float, data: bytes) -> bytes:
        """→ what may be sent now; else it waits in the buffer for `fitted`."""
        server.client = self
        server.started_at = now
        self.server = server
        if server.row is not None:
            server.row.busy(self.pool.next_ticket(), self.who, int(now * 1e6))
        if self.parameters is not server.parameters:
            self.fitting = True
            if not server.fit(self) and self.server is server:
                self.buffer = data
                self.pause(True)
                return b""
            self.fitting = False
        return data

    def fitted(self) -> None:
        """The session has this client's parameters."""
        self.pause(False)
        if self.fitting:
            self.fitting, self.refits = False, 0
            self.go_on()  # what it holds back for an answer that came before
            data, self.buffer = self.buffer, b""
            self._resume(data)

    def _resume(self, data: bytes) -> None:
        """Go on with what had to wait."""
        if not data or self.closing:
            return
        if self.server is not None:
            self._pass(data)
        else:
            self.pool.received_bytes -= len(data)  # it was counted when it came
            self._take(data)

    def _refused(self, error: Exception) -> None:
        """A waiting ticket will not be served: say so and stay connected."""
        data, self.buffer = self.buffer, b""
        self.pause(False)
        data = refuse_unsent(self, error, data)
        if self.ticket.state is QUEUE_EXPIRED:
            data = refuse_waited(self, error, data)
        self._resume(data)

    def prepared(self) -> ClientStatements:
        """What this client's statement names mean (made when first needed: most clients prepare nothing)."""
        if self.statements is None:
            self.statements = ClientStatements(self.pool.statements)
        return self.statements

    def go_on(self) -> None:
        """What was held back may be served: the answer is there, or will never be."""
        if self.missing > HELD_BACK // 2:
            self.forgets = None
            data, self.chunks, self.missing = b"".join(self.chunks or ()), None, 0
            self.pause(False)
            self._resume(data)

    def did_not_happen(self, entry: o.Entry) -> None:
        """The server skipped it after an error: a name that it would have made or closed stays as it was."""
        if self.statements is None or isinstance(entry, o.Closed) or entry.name is None:
            return
        again = entry.closed if isinstance(entry, o.Told) else entry.before
        if again is not None:
            with suppress(PoolerError):  # so many names at once: this one is lost, and a Bind will say so
                self.statements.restore(entry.name, again)
        elif isinstance(entry, o.Told) or entry.forward:
            self.statements.close(entry.name)

    # ---- how a use of a session ends

    def transaction_ended(self, now: float) -> None:
        """Session pooling, or it is pinned: count it, keep the session."""
        server = self.server
        assert server is not None
        if server.residue and not self.pool.holds_session:
            unpin(self)
            server.leaver = self  # what it left may be gone by now, or not
            end_transaction(server, self, now)
            return
        self.pool.transaction_counted(now - server.started_at)
        server.started_at = now
        if server.residue & RESETS:
            regain(server, self)

    def detached(self, now: float) -> None:
        """The session was taken back after a transaction."""
        server, self.server = self.server, None
        assert server is not None
        if now >= (klass := self.ticket.account.klass).sample_at:
            klass.executed(now - server.started_at, now)
        self.ticket.release()
        self.idle_since, self.last_sent = now, b""
        self.pool.transaction_counted(now - server.started_at)

    def server_lost(self, server: ServerConn, fatal: bytes) -> None:
        """The session went away under this client."""
        session_lost(self, server, fatal)

    def resume_elsewhere(self) -> None:
        """What was kept for a session that is gone needs another."""
        data, self.buffer = self.buffer, b""
        self._resume(data)

    def cancel_wait(self) -> None:
        """A CancelRequest for a client that waits for a session ends the wait."""
        if self.pool.withdraw(self.ticket):
            self._refused(WaitCancelled("canceling statement due to user request"))

    def break_off(self, sqlstate: str, text: str, hint: str = "") -> None:
        """FATAL to the client; whatever session it holds is closed."""
        parting.part(self, error_response(Fault("FATAL", sqlstate, text, hint=hint)))

    def left(self) -> None:
        """The client is gone (or is made to go)."""
        if not self.closing:
            self.give_up_session()
        self.close()

    def give_up_session(self) -> None:
        """It is to be served no more."""
        server, self.server = self.server, None
        if not self.pool.withdraw(self.ticket) and server is not None:
            self.ticket.release()
            self.pool.client_left(server, self)

    def close(self) -> None:
        """Forget the client, and close its socket with whatever it has not taken."""
        if self.unsent:
            self.send_unsent()
        if self.fd < 0:
            return
        self.closing = True
        self.reactor.remove(self.fd)
        self.fd = -1
        self.sock.close()
        if self.statements is not None:
            self.statements.clear()
        self.pool.client_closed(self)

    def fault(self) -> None:
        """The reactor found a bug of ours in this connection."""
        self.break_off("XX000", "internal error in the pooler")
