"""One logged-in client in the reactor: gets a session when it asks for something, passes its messages on,
and gives the session back when the transaction is over.
"""

from __future__ import annotations

import re
import socket
from time import monotonic
from typing import TYPE_CHECKING

from pooler.admission.ticket import Ticket, TicketState
from pooler.errors import BackendLost, OutcomeUnknown, PoolerError, WaitEnded
from pooler.relay import owed as o
from pooler.relay.reactor import QUIET, READ, WRITE, Reactor
from pooler.relay.refusal import READY_IDLE, drop, refuse_owed, refuse_unsent
from pooler.relay.requests import pass_requests
from pooler.wire.messages import Fault, error_response
from pooler.wire.parameters import ParameterSet
from pooler.wire.prepared import ClientStatements

if TYPE_CHECKING:
    from pooler.pool.pool import Pool
    from pooler.relay.server import ServerConn

RECV_BYTES = 65_536

TERMINATE = 0x58
SYNC_MESSAGE = b"S\x00\x00\x00\x04"
IDLE = 0x49
COMMITS = re.compile(rb"\b(commit|end|prepare\s+transaction)\b", re.IGNORECASE)


class ClientConn:
    """A client: its socket, what it has prepared and set, and the session that serves it now."""

    __slots__ = (
        "_paused", "address", "application_name", "buffer", "cancel_key", "chunks", "closing", "connected_at",
        "dropping", "fd", "holds", "last_sent", "missing", "out", "parameters", "pool", "reactor", "recv",
        "requested_at", "send", "server", "skip", "skip_to_sync", "sock", "statements", "ticket", "who",
    )

    def __init__(
        self, reactor: Reactor, pool: Pool, sock: socket.socket, address: str, cancel_key: bytes,
        parameters: ParameterSet, who: bytes, application_name: str,
    ) -> None:
        self.reactor, self.pool, self.sock, self.address = reactor, pool, sock, address
        self.fd = sock.fileno()
        self.recv, self.send = sock.recv, sock.send
        self.cancel_key = cancel_key
        self.parameters = parameters
        self.application_name = application_name
        self.statements: ClientStatements | None = None
        self.holds = pool.holds_session
        self.who = who
        self.server: ServerConn | None = None
        self.ticket = Ticket(self._granted, self._refused, self)
        self.buffer = b""
        self.chunks: list[bytes] | None = None  # of a message that is taken whole
        self.missing = 0
        self.skip = 0
        self.dropping = False  # something refused is still coming in
        self.skip_to_sync = False
        self.out: bytearray | None = None
        self.closing = False
        self.last_sent = b""
        self.connected_at = self.requested_at = monotonic()
        self._paused = False

    def start(self, leftover: bytes) -> None:
        """Enter the reactor; `leftover` came in behind the login."""
        self.reactor.add(self.fd, self.on_event)
        if leftover:
            self._take(leftover)

    # ---- towards the client

    def deliver(self, data: bytes) -> None:
        """Send, or keep what the client cannot take yet and stop reading its server."""
        if self.out:
            self.out += data
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
            self._watch()
            if self.server is not None:
                self.server.pause(True)

    def pause(self, paused: bool) -> None:
        """The server cannot take more (or can again), or the client waits for a session."""
        if paused is not self._paused:
            self._paused = paused
            self._watch()

    def _watch(self) -> None:
        if not self.closing:
            self.reactor.change(self.fd, (QUIET if self._paused else READ) | (WRITE if self.out else 0))

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
            self._watch()
            if self.server is not None:
                self.server.pause(False)

    # ---- from the client

    def on_event(self, mask: int) -> None:
        """The reactor's call."""
        if mask & WRITE and self.out:
            self._flush()
            if self.closing:
                return
        if not self._paused:
            if mask & ~WRITE:
                self._read()
        elif mask & ~WRITE:
            self.left()

    def _read(self) -> None:
        try:
            data = self.recv(RECV_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.left()
            return
        if not data:
            self.left()
            return
        self._take(data)

    def _take(self, data: bytes) -> None:
        self.pool.received_bytes += len(data)
        if self.missing:
            assert self.chunks is not None
            self.chunks.append(data)
            self.missing -= len(data)
            if self.missing > 0:
                return
            data = b"".join(self.chunks)
            self.chunks = None
            self.missing = 0
        elif self.buffer:
            data = self.buffer + data
            self.buffer = b""
        if self.dropping:
            data = drop(self, data)
            if not data:
                return
        if self.server is None and not self._ask(data):
            return
        self._pass(data)

    def _pass(self, data: bytes) -> None:
        assert self.server is not None
        try:
            pass_requests(self, self.server, data)
        except PoolerError as broken:  # the protocol, or a limit
            self.break_off(broken.sqlstate, str(broken))

    def _ask(self, data: bytes) -> bool:
        """Something came in without a session: get one. False if the data waits, or is done with."""
        kind = data[0]
        if len(data) < 5:
            self.buffer = data
            return False
        if kind == TERMINATE:
            self.left()
            return False
        if data == SYNC_MESSAGE:
            self.deliver(READY_IDLE)  # nothing is open: the answer is known here
            return False
        now = self.requested_at = monotonic()
        pool = self.pool
        ticket = self.ticket
        ticket.start(now, now + pool.wait_timeout_seconds)
        server = pool.request(ticket)
        if server is None:
            self.buffer = data
            if ticket.waiting:
                self.pause(True)
            return False
        self._bind(server, now)
        return True

    def _granted(self, server: ServerConn) -> None:
        """A waiting ticket got its session (called by whoever gave it back)."""
        now = monotonic()
        self.pool.waited(now - self.requested_at)
        self._bind(server, now)
        self.pause(False)
        data, self.buffer = self.buffer, b""
        if data:
            self._pass(data)

    def _bind(self, server: ServerConn, now: float) -> None:
        server.client = self
        server.started_at = now
        self.server = server
        if server.row is not None:
            server.row.busy(self.pool.next_ticket(), self.who, int(now * 1e6))
        if self.parameters is not server.parameters:
            server.fit(self)

    def _refused(self, error: Exception) -> None:
        """A waiting ticket will not be served: say so and stay connected."""
        data, self.buffer = self.buffer, b""
        self.pause(False)
        rest = refuse_unsent(self, error, data)
        if rest:
            self._take(rest)

    def prepared(self) -> ClientStatements:
        """What this client's statement names mean (made when first needed: most clients prepare nothing)."""
        if self.statements is None:
            self.statements = ClientStatements(self.pool.statements)
        return self.statements

    def forget_statements(self) -> None:
        """DEALLOCATE ALL or DISCARD ALL by the client."""
        if self.statements is not None:
            self.statements.clear()

    def did_not_happen(self, entry: o.Parsed | o.Told) -> None:
        """The server skipped it after an error: a name that it would have made or closed stays as it was."""
        if self.statements is None:
            return
        if type(entry) is o.Told and entry.closed is not None:
            self.statements.add(entry.name, entry.closed.body)
        elif isinstance(entry, o.Told) or (entry.forward and entry.name):
            self.statements.close(entry.name)

    # ---- how a use of a session ends

    def transaction_ended(self, now: float) -> None:
        """Session pooling: count it, keep the session."""
        assert self.server is not None
        self.pool.transaction_counted(now - self.server.started_at)
        self.server.started_at = now

    def detached(self, now: float) -> None:
        """The session was taken back after a transaction."""
        server, self.server = self.server, None
        assert server is not None
        self.ticket.release()
        self.pool.transaction_counted(now - server.started_at)

    def server_lost(self, server: ServerConn, fatal: bytes) -> None:
        """The session went away under this client."""
        self.server = None
        self.ticket.release()
        self._paused = False
        if fatal:  # the server's own last word was passed on: end as it would have ended
            self.close()
            return
        autocommit = server.status == IDLE and o.readies_owed(server.owed) > 0
        error: PoolerError
        if autocommit or (server.owed and COMMITS.search(self.last_sent)):
            error = OutcomeUnknown("the server went away before it answered: look the outcome up")
        else:
            error = BackendLost("the server went away during the transaction, which is rolled back")
        refuse_owed(self, error, server)
        self._watch()

    def cancel_wait(self) -> None:
        """A CancelRequest for a client that waits for a session ends the wait."""
        if self.ticket.end(TicketState.CANCELLED):
            self.pool.withdrawn(self.ticket)
            self._refused(WaitEnded("canceling statement due to user request"))

    def break_off(self, sqlstate: str, text: str) -> None:
        """FATAL to the client; whatever session it holds is closed."""
        self.deliver(error_response(Fault("FATAL", sqlstate, text)))
        self.left()

    def left(self) -> None:
        """The client is gone (or is made to go)."""
        if self.closing:
            return
        server, self.server = self.server, None
        if self.ticket.end(TicketState.CANCELLED):
            self.pool.withdrawn(self.ticket)
        elif server is not None:
            self.ticket.release()
            self.pool.client_left(server, self)
        self.close()

    def close(self) -> None:
        """Forget the client and close its socket."""
        if self.closing:
            return
        self.closing = True
        self.reactor.remove(self.fd)
        self.sock.close()
        self.forget_statements()
        self.pool.client_closed(self)

    def fault(self) -> None:
        """The reactor found a bug of ours in this connection."""
        self.break_off("XX000", "internal error in the pooler")

