"""One logged-in client in the reactor: gets a session when it asks for something, passes its messages on,
and gives the session back when the transaction is over.
"""

from __future__ import annotations

import re
import socket
from struct import Struct
from time import monotonic
from typing import TYPE_CHECKING

from pooler.admission.ticket import Ticket, TicketState
from pooler.errors import BackendLost, OutcomeUnknown, PoolerError, ProtocolViolation
from pooler.relay import owed as o
from pooler.relay.extended import extended_message
from pooler.relay.reactor import QUIET, READ, WRITE, Reactor
from pooler.wire.messages import Fault, error_response
from pooler.wire.parameters import ParameterSet
from pooler.wire.prepared import ClientStatements

if TYPE_CHECKING:
    from pooler.pool.pool import Pool
    from pooler.relay.server import ServerConn

RECV_BYTES = 65_536
WHOLE_BYTES_MAX = 16 << 20  # a Parse or Describe is taken whole; Query, Bind and COPY data pass in pieces
_length_at = Struct(">I").unpack_from

QUERY, SYNC, PARSE, BIND, DESCRIBE, EXECUTE, CLOSE = 0x51, 0x53, 0x50, 0x42, 0x44, 0x45, 0x43
FLUSH, TERMINATE, COPY_DATA, COPY_DONE, COPY_FAIL, FUNCTION = 0x48, 0x58, 0x64, 0x63, 0x66, 0x46
SYNC_MESSAGE = b"S\x00\x00\x00\x04"
READY_IDLE = b"Z\x00\x00\x00\x05I"
IDLE = 0x49
COMMITS = re.compile(rb"\b(commit|end|prepare\s+transaction)\b", re.IGNORECASE)


class ClientConn:
    """A client: its socket, what it has prepared and set, and the session that serves it now."""

    __slots__ = (
        "_paused", "address", "application_name", "buffer", "cancel_key", "chunks", "closing", "connected_at", "fd",
        "holds", "last_sent", "missing", "out", "parameters", "pool", "reactor", "recv", "requested_at", "send",
        "server", "skip", "skip_to_sync", "sock", "statements", "ticket", "who",
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
        if self.skip_to_sync:
            data = self._discard(data)
            if not data:
                return
        if self.server is None and not self._ask(data):
            return
        try:
            self._relay(data)
        except PoolerError as broken:  # of the protocol, or a limit
            self.break_off(broken.sqlstate, str(broken))

    def _ask(self, data: bytes) -> bool:
        """Something came in without a session: get one. False if the data waits in `buffer`, or is done with."""
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
            try:
                self._relay(data)
            except PoolerError as broken:
                self.break_off(broken.sqlstate, str(broken))

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
        self.fail(error, data)

    def _relay(self, data: bytes) -> None:
        """Walk the client's messages and send them on, rewritten where a name is the pooler's own."""
        server = self.server
        assert server is not None
        size = len(data)
        at = self.skip
        if at:
            if at > size:
                self.skip = at - size
                server.write(data)
                return
            self.skip = 0
        pool = self.pool
        server.query_at = self.requested_at
        owed = server.owed
        start = 0
        pieces: list[bytes] | None = None
        while size - at >= 5:
            kind = data[at]
            length = _length_at(data, at + 1)[0]
            end = at + 1 + length
            if length < 4:
                self.violate(f"message {chr(kind)!r} of length {length}")
                return
            if kind == QUERY:
                text = data[at + 5 : end]
                server.residue |= pool.look(text)
                owed.append(o.QUERY)
                server.statements.unnamed = None  # a simple query drops the unnamed statement
                self.last_sent = text
                at = end
            elif kind == SYNC:
                if not server.copy_in:
                    owed.append(o.SYNC)
                at = end
            elif kind == EXECUTE:
                if end > size:
                    break
                owed.append(o.EXECUTE)
                at = end
            elif kind == BIND or kind == PARSE or kind == DESCRIBE or kind == CLOSE:
                if end > size and not (kind == BIND and size - at >= 1024):
                    if length > WHOLE_BYTES_MAX:
                        self.break_off("54000", f"message {chr(kind)!r} of {length} bytes is too long to be pooled")
                        return
                    break
                message = extended_message(self, server, kind, data[at : min(end, size)])
                if message is not None:
                    pieces = [] if pieces is None else pieces
                    if at > start:
                        pieces.append(data[start:at])
                    pieces.append(message)
                    start = min(end, size)
                at = end
            elif kind == COPY_DATA or kind == FLUSH:
                at = end
            elif kind == COPY_DONE or kind == COPY_FAIL:
                server.copy_in = False
                at = end
            elif kind == FUNCTION:
                owed.append(o.FUNCTION)
                at = end
            elif kind == TERMINATE:
                self.left()
                return
            else:
                self.violate(f"unknown message type {kind}")
                return
        if at > size:
            self.skip = at - size
            at = size
        elif at < size:
            self._keep(data, at, size)
        if pieces is not None:
            pieces.append(data[start:at])
            data = b"".join(pieces)
        elif at != size:
            data = data[:at]
        if data:
            server.write(data)
        self._answer_own(owed)

    def _keep(self, data: bytes, at: int, size: int) -> None:
        """An incomplete message that is taken whole waits for the rest of it."""
        rest = data[at:]
        if size - at < 5:
            self.buffer = rest
        else:
            self.chunks = [rest]
            self.missing = 1 + _length_at(data, at + 1)[0] - (size - at)

    def _answer_own(self, owed: o.Owed) -> None:
        """Answers that the pooler gives itself and that nothing stands before."""
        while owed and type(owed[0]) is o.Told:
            self.deliver(owed.popleft().answer)

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
        elif type(entry) is o.Told or (entry.forward and entry.name):
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
            error = OutcomeUnknown("the server went away before it answered: the outcome is unknown, look it up")
        else:
            error = BackendLost("the server went away during the transaction, which is rolled back")
        self._fail_owed(error, server)

    def _fail_owed(self, error: PoolerError, server: ServerConn) -> None:
        owed = o.readies_owed(server.owed)
        self.skip_to_sync = owed == 0 or self.skip > 0
        self.buffer, self.chunks, self.missing = b"", None, 0
        answer = error_response(Fault("ERROR", error.sqlstate, str(error)))
        self.deliver(answer + READY_IDLE * owed)
        self._watch()

    def fail(self, error: Exception, unsent: bytes) -> None:
        """Answer `unsent` (nothing of it reached a server) with an error; the client stays connected."""
        sqlstate = error.sqlstate if isinstance(error, PoolerError) else "58000"
        sqlstate = getattr(error, "code", sqlstate)
        answer = error_response(Fault("ERROR", sqlstate, str(error), hint=getattr(error, "hint", "")))
        self.skip_to_sync = True
        if unsent[:1] in (b"Q", b"F"):
            self.skip_to_sync = False
            end = 1 + _length_at(unsent, 1)[0]
            self.skip = max(0, end - len(unsent))
            if self.skip:
                self.skip_to_sync = True  # the rest of that query is still to come
                self.deliver(answer)
                return
            self.deliver(answer + READY_IDLE)
            if unsent[end:]:
                self._take(unsent[end:])
            return
        self.deliver(answer)
        unsent = self._discard(unsent)
        if unsent:
            self._take(unsent)

    def _discard(self, data: bytes) -> bytes:
        """After an error, messages up to the next Sync (or the end of a half-sent query) are dropped."""
        if self.skip:
            if len(data) < self.skip:
                self.skip -= len(data)
                return b""
            data, self.skip = data[self.skip :], 0
        at, size = 0, len(data)
        while size - at >= 5:
            kind = data[at]
            end = at + 1 + _length_at(data, at + 1)[0]
            if kind == TERMINATE:
                self.left()
                return b""
            if kind == QUERY or kind == FUNCTION or kind == SYNC:
                self.skip_to_sync = False
                if kind != SYNC:
                    return data[at:]
                self.deliver(READY_IDLE)
                return data[end:]
            at = end
        if at > size:
            self.skip = at - size
        elif at < size:
            self.buffer = data[at:]
        return b""

    def violate(self, what: str) -> None:
        """The client broke the protocol: tell it and close; the session is closed too, with proof."""
        self.break_off(ProtocolViolation.sqlstate, f"protocol violation: {what}")

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
            self.pool.client_left(self, server)
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

