"""One open server session in the reactor: reads the server's answers, passes them on, and knows when the
session is free again.

A session is free when ReadyForQuery said `I`, nothing is owed, no message is half way, and what the
transaction left behind has been undone. Everything else keeps it, or closes it.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from pooler.errors import ProtocolViolation
from pooler.net.stream import ended_in_order
from pooler.relay import owed as o
from pooler.relay.answers import ERROR_HEAD_BYTES, IDLE, MALFORMED, pass_answers
from pooler.relay.leaving import CHANGED, end_transaction, free, leave
from pooler.relay.own_answers import own_answers
from pooler.relay.reactor import READ, WRITE, Reactor
from pooler.wire.messages import parameter_status, read_fault, read_parameter_status
from pooler.wire.parameters import ParameterSet
from pooler.wire.session_statements import SessionStatements

if TYPE_CHECKING:
    from pooler.pool.opener import OpenSession
    from pooler.pool.pool import Pool
    from pooler.relay.served import Served

RECV_BYTES = 65_536
RETIRED = "its time is over, or others wait for its permit"

class ServerConn:
    """A session: socket, permit, and what is known of its state."""

    __slots__ = (
        "_paused",
        "altered",
        "answered",
        "backend_start_us",
        "cancels",
        "client",
        "closing",
        "commits",
        "connected_at",
        "copy_in",
        "cut",
        "doubtful",
        "epoch",
        "expires_at",
        "fatal",
        "fd",
        "fresh",
        "generation",
        "held",
        "idle_since",
        "last_used",
        "leaver",
        "opened",
        "out",
        "owed",
        "own",
        "own_answered",
        "own_at",
        "own_bytes",
        "own_done",
        "own_error",
        "own_rows",
        "parameters",
        "permit",
        "pid",
        "pool",
        "promised",
        "query_at",
        "reactor",
        "recv",
        "refused",
        "residue",
        "retire",
        "row",
        "secret_key",
        "send",
        "skip",
        "skipping",
        "sock",
        "started_at",
        "statements",
        "status",
        "syncs_ignored",
        "unsynced",
    )

    def __init__(self, reactor: Reactor, pool: Pool, opened: OpenSession, parameters: ParameterSet) -> None:
        self.reactor, self.pool, self.opened = reactor, pool, opened
        self.sock: socket.socket = opened.sock
        self.fd = self.sock.fileno()
        self.recv, self.send = self.sock.recv, self.sock.send
        self.permit, self.epoch, self.pid = opened.permit, opened.epoch, opened.pid
        self.secret_key, self.backend_start_us = opened.secret_key, opened.backend_start_us
        self.parameters = self.fresh = parameters
        self.statements = SessionStatements(pool.statements_max)
        self.altered = False  # tables or types, by what may not be committed yet
        self.row: Any = None
        self.client: Served | None = None
        self.owed: o.Owed = deque()
        self.status = IDLE
        self.answered = False  # something of the answer that the next ReadyForQuery ends has come
        self.unsynced = False  # something was sent that only a Sync will end
        self.skipping = False  # after an error: what is sent before the next Sync is ignored
        self.commits = False  # what is unanswered may end a transaction
        self.copy_in = False
        self.syncs_ignored = 0  # in COPY IN
        # an error may have come before those Syncs, and then they are answered after all; or a query ended a
        # group without a Sync, behind which PostgreSQL 18 may refuse the first command of whoever comes next
        self.doubtful = False
        self.cut = False  # it has been sent the beginning of a message whose end will never come
        self.skip = 0
        self.held = b""
        self.out = bytearray()
        self.own, self.own_at = 0, 0.0  # queries of the pooler's own that are unanswered, since when
        self.own_answered = False
        self.own_bytes = 0  # of the rows in answer to them
        self.own_error = b""
        self.own_done: Any = None
        self.own_rows: list[list[bytes | None]] | None = None  # kept if a list
        self.leaver: Any = None  # a client that waits for what is set on this session
        self.residue = 0
        self.refused: list[tuple[str, ...] | bytes] = []  # what was not sent: why
        self.cancels = 0
        self.retire = ""
        self.closing = self._paused = False
        self.fatal = b""
        self.generation = 0
        self.promised = False  # to a client that was told of it
        self.connected_at = self.idle_since = self.last_used = self.started_at = self.query_at = monotonic()
        self.expires_at = float("inf")

    # ---- towards the server

    def write(self, data: bytes) -> None:
        """Send, or keep what the server cannot take yet and stop reading its client."""
        if self.out:
            self.out += data
            if self.client is not None:
                self.client.pause(True)
            return
        try:
            sent = self.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.reactor.at_end(self._take_last_word)
            return
        if sent < len(data):
            self.out += memoryview(data)[sent:]
            self._watch()
            if self.client is not None:
                self.client.pause(True)

    def pause(self, paused: bool) -> None:
        """The client cannot take more (or can again)."""
        if paused is not self._paused:
            self._paused = paused
            self._watch()

    def _watch(self) -> None:
        if not self.closing:
            self.reactor.change(self.fd, (0 if self._paused else READ) | (WRITE if self.out else 0))

    def _flush(self) -> None:
        try:
            sent = self.send(self.out)
        except BlockingIOError:
            return
        except OSError:
            self.reactor.at_end(self._take_last_word)
            return
        del self.out[:sent]
        if not self.out:
            self._watch()
            if self.client is None:
                if not self.own:
                    free(self, monotonic())
            elif not self.own:
                self.client.pause(False)

    def fit(self, client: Served) -> bool:
        """Give the session the parameters that this client has, in front of whatever it sends next.

        True: that may be sent at once. Values that no server has taken yet may be refused, and some (a role)
        at any time; nothing must run without them: then `client.fitted()` says when.
        """
        wanted = client.parameters
        sql = self.parameters.difference(wanted)
        if sql is None:
            self.parameters = client.parameters = self.parameters.adopt(wanted)
            client.proven = True
            return True
        self.write(self.run_own([sql], self._fitted))
        return client.proven and not wanted.may_be_refused

    def _fitted(self, ok: bool) -> None:
        client = self.client
        if client is None:
            return
        if ok:
            self.parameters = client.parameters = self.parameters.adopt(client.parameters)
            client.proven = True
            client.fitted()
            if not self.owed and not self.unsynced:  # all that came behind was the beginning of a message
                self.unasked(client)
        elif not client.fitting:  # its messages went out behind
            self.give_up("a client's parameters could not be set")
        else:
            fault = read_fault(self.own_error[5:])
            client.break_off(fault.code, fault.message)

    def run_own(self, queries: Sequence[bytes], done: Callable[[bool], None] | None = None) -> bytes:
        """The pooler's own simple queries: their answers stay here; `done(ok)` follows the last one.

        Returns the bytes to send, so that a client's message can go out behind them in the same send.
        """
        self.own += len(queries)
        self.own_at = monotonic()
        self.own_done = done
        self.statements.unnamed = None
        return b"".join(b"Q" + (len(q) + 5).to_bytes(4, "big") + q + b"\0" for q in queries)

    def _take_last_word(self) -> None:
        """It takes no more; but what it said before it went, a FATAL maybe, may be there still."""
        if not self.closing and not self._paused:
            self.on_event(READ)
        self.lost(orderly=False)

    # ---- from the server

    def on_event(self, mask: int) -> None:
        """The reactor's call."""
        if self.out and mask & WRITE:
            self._flush()
            if self.closing:
                return
        if self._paused:
            if mask & ~WRITE:
                self.lost(orderly=False)
            return
        try:
            data = self.recv(RECV_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.lost(orderly=False)
            return
        if not data:
            self.lost(orderly=ended_in_order(self.sock))  # a reset may have been told to somebody else
            return
        self.pool.sent_bytes += len(data)
        if self.held:
            data = self.held + data
            self.held = b""
        client = self.client
        try:
            if client is None or self.own:
                data = data[own_answers(self, data) :]
                client = self.client
                if client is None or self.closing or not data:
                    return
            pass_answers(self, data, client)
        except (IndexError, ProtocolViolation):
            self.give_up(MALFORMED)

    def own_fault(self) -> str:
        """What a query of the pooler's own was refused with."""
        return read_fault(self.own_error[5:]).message if self.own_error else ""

    def note_fatal(self, message: bytes) -> None:
        """Remember the last word of a server that ends the session."""
        head = message[:ERROR_HEAD_BYTES]
        if b"VFATAL\0" in head or b"VPANIC\0" in head:
            self.fatal = message

    def reported(self, body: bytes) -> bool:
        """A ParameterStatus. True: not for the client, a RESET has brought the pooler's name back."""
        name, value = read_parameter_status(body)
        self.parameters = self.parameters.with_status(name, value)
        if name == b"application_name" and value and value == self.fresh.get(name):
            return True
        if self.client is not None and not self.own:
            self.client.parameters = self.client.parameters.with_status(name, value)
        elif self.leaver is not None:  # a query of the pooler's own had the server undo what it had set
            self.leaver.parameters = self.leaver.parameters.with_status(name, value)
            self.leaver.deliver(parameter_status(name, value))
        return False

    # ---- the end of a transaction

    def next_query(self) -> None:
        """One query is answered and another was sent behind it: each has its own time."""
        now = monotonic()
        self.pool.query_seconds += now - self.query_at
        self.query_at = now

    def ready(self, client: Served) -> None:
        """ReadyForQuery, and nothing owed: is the transaction over, and may the session go on?"""
        if self.closing or self.client is not client:
            return
        now = monotonic()
        self.last_used = now
        self.commits = self.skipping = False
        self.syncs_ignored = 0
        pool = self.pool
        pool.query_seconds += now - self.query_at
        if self.altered and self.status == IDLE:
            self.altered = False
            pool.statements.outdate_all()
        if self.status == IDLE and not client.skip:
            if client.holds:
                if self.retire == CHANGED:
                    client.break_off("57P01", CHANGED)
                else:
                    client.transaction_ended(now)
            elif self.residue or self.retire or self.cancels or self.out or self._paused or self.doubtful:
                end_transaction(self, client, now)
            else:
                self.client = None
                client.detached(now)
                given = pool.core.give(self, now)
                if self.client is None and self.row is not None:  # else it says already whose it is now
                    self.row.idle()
                if not given:
                    pool.retire(self, RETIRED)
        elif pool.is_statement_mode and not client.skip:
            client.break_off("08P01", "transaction blocks not allowed in statement pooling mode")

    def unasked(self, client: Served) -> None:
        """What the client sent asks for no answer (the rest of a COPY that failed), and nothing is owed."""
        if self.client is client and self.status == IDLE and not client.skip and not client.holds:
            leave(self, client, monotonic())

    # ---- the end of the session

    def lost(self, *, orderly: bool) -> None:
        """The server closed (`orderly`: an EOF; else the connection broke)."""
        if not self.closing:
            self.close_down()
            client, self.client = self.client, None
            if client is not None:
                client.server_lost(self, self.fatal)
            self.pool.session_ended(self, orderly)

    def give_up(self, reason: str) -> None:
        """Close this session: it cannot be shown to be clean."""
        if not self.closing:
            self.close_down()
            client, self.client = self.client, None
            if self.out or (client is not None and client.skip):
                self.cut = True
            if client is not None:
                client.server_lost(self, b"")
            self.pool.retire(self, reason)

    def fault(self) -> None:
        """The reactor found a bug of ours in this connection: what was answered is not known."""
        client, self.client = self.client, None
        self.closing = False
        self.give_up("internal error")
        if client is not None:
            client.break_off("XX000", "internal error in the pooler")

    def close_down(self) -> None:
        """Out of the reactor: from here on the socket is its closer's."""
        self.closing = True
        self.reactor.remove(self.fd)
        leaver, self.leaver = self.leaver, None
        if leaver is not None and not leaver.closing:
            leaver.break_off("08006", "the server went away before it had told what is set on the session")

