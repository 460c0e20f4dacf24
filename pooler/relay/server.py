"""One open server session in the reactor: reads the server's answers, passes them on, and knows when the
session is free again.

A session is free when ReadyForQuery said `I`, nothing is owed, no message is half way, and what the
transaction left behind has been undone. Everything else keeps it, or closes it.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence
from struct import Struct
from time import monotonic
from typing import TYPE_CHECKING, Any

from pooler.net.stream import ended_in_order
from pooler.relay import owed as o
from pooler.relay.answers import HELD_BYTES_MAX, pass_answers
from pooler.relay.reactor import QUIET, READ, WRITE, Reactor
from pooler.wire.parameters import ParameterSet
from pooler.wire.prepared import SessionStatements
from pooler.wire.session_state import FORGETTING_TAGS, Residue, is_undoable, residue_of_tag

if TYPE_CHECKING:
    from pooler.pool.opener import OpenSession
    from pooler.pool.pool import Pool
    from pooler.relay.served import Served

RECV_BYTES = 65_536
_length_at = Struct(">I").unpack_from

IDLE, IN_TRANSACTION, FAILED = 0x49, 0x54, 0x45  # ReadyForQuery's I, T, E
READY, ERROR, STATUS = 0x5A, 0x45, 0x53


class ServerConn:
    """A session: socket, permit, and what is known of its state."""

    __slots__ = (
        "_paused", "backend_start_us", "cancels", "client", "closing", "connected_at", "copy_in", "epoch",
        "expires_at", "fatal", "fd", "fresh", "generation", "held", "idle_since", "last_used", "opened",
        "out", "owed", "own", "own_done", "own_failed", "parameters", "permit", "pid", "pool", "query_at",
        "reactor", "recv", "residue", "retire", "row", "secret_key", "send", "skip", "sock", "started_at",
        "statements", "status",
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
        self.row: Any = None
        self.client: Served | None = None
        self.owed: o.Owed = deque()
        self.status = IDLE
        self.copy_in = False
        self.skip = 0
        self.held = b""
        self.out = bytearray()
        self.own = 0
        self.own_failed = False
        self.own_done: Any = None
        self.residue = 0
        self.cancels = 0
        self.retire = ""
        self.closing = False
        self.fatal = b""
        self.generation = 0
        self.connected_at = self.idle_since = self.last_used = self.started_at = self.query_at = monotonic()
        self.expires_at = float("inf")
        self._paused = False

    # ---- towards the server

    def write(self, data: bytes) -> None:
        """Send, or keep what the server cannot take yet and stop reading its client."""
        if self.out:
            self.out += data
            return
        try:
            sent = self.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.lost(orderly=False)
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
            self.reactor.change(self.fd, (QUIET if self._paused else READ) | (WRITE if self.out else 0))

    def _flush(self) -> None:
        try:
            sent = self.send(self.out)
        except BlockingIOError:
            return
        except OSError:
            self.lost(orderly=False)
            return
        del self.out[:sent]
        if not self.out:
            self._watch()
            if self.client is not None:
                self.client.pause(False)

    def fit(self, client: Served) -> None:
        """Give the session the parameters that this client has, in front of whatever it sends next."""
        wanted = client.parameters
        sql = self.parameters.difference(wanted)
        if sql is None:
            self.parameters = client.parameters = self.parameters.adopt(wanted)
        else:
            self.write(self.run_own([sql], self._fitted))

    def _fitted(self, ok: bool) -> None:
        client = self.client
        if ok and client is not None:
            self.parameters = client.parameters = self.parameters.adopt(client.parameters)

    def run_own(self, queries: Sequence[bytes], done: Callable[[bool], None] | None = None) -> bytes:
        """The pooler's own simple queries: their answers stay here; `done(ok)` follows the last one.

        Returns the bytes to send, so that a client's message can go out behind them in the same send.
        """
        self.own += len(queries)
        self.own_done = done
        self.statements.unnamed = None
        return b"".join(b"Q" + (len(q) + 5).to_bytes(4, "big") + q + b"\0" for q in queries)

    # ---- from the server

    def on_event(self, mask: int) -> None:
        """The reactor's call."""
        if mask & WRITE and self.out:
            self._flush()
            if self.closing:
                return
        if not self._paused:
            self._read()
        elif mask & ~(QUIET | WRITE):
            self.lost(orderly=False)

    def _read(self) -> None:
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
        if client is None or self.own:
            data = data[self._own_answers(data) :]
            client = self.client
            if client is None or self.closing or not data:
                return
        pass_answers(self, data, client)

    def _own_answers(self, data: bytes) -> int:
        """Answers to the pooler's own queries, or what an idle session says. → where they end."""
        at, size = 0, len(data)
        while size - at >= 5:
            end: int = at + 1 + _length_at(data, at + 1)[0]
            if end > size:
                break
            kind = data[at]
            if kind == STATUS:
                self.reported(data[at + 5 : end])
            elif kind == ERROR:
                self.own_failed = True
                self.fatal = data[at:end]
            elif kind == READY:
                self.status = data[at + 5]
                if self.own:
                    self.own -= 1
                    if not self.own:
                        self._own_ended()
                        if self.client is not None or self.closing:
                            return end
            at = end
        self.held = data[at:]
        if len(self.held) > HELD_BYTES_MAX:
            self.give_up("the server sent an over-long message")
        return size

    def _own_ended(self) -> None:
        done, self.own_done = self.own_done, None
        ok, self.own_failed = not self.own_failed, False
        if not ok:
            self.retire = self.retire or "one of the pooler's own queries failed"
        if done is not None:
            done(ok)

    def errored(self, message: bytes) -> None:
        """An ErrorResponse: what the server skips after it did not happen."""
        if self.owed:
            self.skipped(o.settle_error(self.owed))
        self.copy_in = False
        self.pool.errors += 1
        head = message[:128]
        if b"VFATAL\0" in head or b"VPANIC\0" in head:
            self.fatal = message

    def tagged(self, tag: bytes) -> None:
        """A command tag that is not one of the common ones."""
        self.residue |= residue_of_tag(tag)
        if tag in FORGETTING_TAGS:
            self.statements.clear()
            if self.client is not None:
                self.client.forget_statements()

    def skipped(self, failed: list[o.Parsed | o.Told]) -> None:
        """The server skipped these after an error."""
        for entry in failed:
            if type(entry) is o.Parsed:
                self.statements.remove(entry.statement)
            if self.client is not None:
                self.client.did_not_happen(entry)

    def reported(self, body: bytes) -> None:
        """A ParameterStatus."""
        name, _, value = body.partition(b"\0")
        value = value[:-1]
        self.parameters = self.parameters.with_status(name, value)
        if self.client is not None and not self.own:
            self.client.parameters = self.client.parameters.with_status(name, value)

    # ---- the end of a transaction

    def ready(self, client: Served) -> None:
        """ReadyForQuery, and nothing owed: is the transaction over, and may the session go on?"""
        if self.closing or self.client is not client:
            return
        now = monotonic()
        self.last_used = now
        pool = self.pool
        pool.query_seconds += now - self.query_at
        if self.status == IDLE and not client.skip:
            if client.holds:
                client.transaction_ended(now)
            else:
                self.leave(client, now)
        elif pool.is_statement_mode and not client.skip:
            client.break_off("08P01", "transaction blocks not allowed in statement pooling mode")

    def leave(self, client: Served, now: float) -> None:
        """The client's use of this session is over; it is in step and idle."""
        self.client = None
        client.detached(now)
        self.free(now)

    def free(self, now: float) -> None:
        """Nobody uses it: undo what was left behind, wait for cancels, then give it back."""
        if self.cancels or self.closing:
            return  # the last cancel to end calls again
        if self.row is not None:
            self.row.idle()
        if self.residue and not self.retire:
            if not is_undoable(self.residue):
                self.retire = "a client left something behind that nothing undoes"
            elif self._clean():
                return
        self.residue = 0
        self.pool.give(self, now)

    def _clean(self) -> bool:
        queries, forgets = self.pool.cleanup(self.residue)
        if not queries:
            return False
        if forgets:
            self.statements.clear()
        self.write(self.run_own(queries, self._cleaned))
        return True

    def _cleaned(self, ok: bool) -> None:
        if not ok or self.status != IDLE:
            self.give_up("clean-up failed")
            return
        if self.residue & (Residue.PARAMETERS | Residue.SUSPECT):
            self.parameters = self.parameters.after_reset(self.fresh)
        self.residue = 0
        self.free(monotonic())

    def rolled_back(self, ok: bool) -> None:
        """After the pooler's own ROLLBACK for a client that left."""
        if ok and self.status == IDLE:
            self.free(monotonic())
        else:
            self.give_up("rollback failed")

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
            if client is not None:
                client.server_lost(self, b"")
            self.pool.retire(self, reason)

    def abandon(self, reason: str) -> None:
        """As give_up, by the client itself: it already knows."""
        self.client = None
        self.give_up(reason)

    def fault(self) -> None:
        """The reactor found a bug of ours in this connection."""
        self.closing = False
        self.give_up("internal error")

    def close_down(self) -> None:
        """Out of the reactor: from here on the socket is its closer's."""
        self.closing = True
        self.reactor.remove(self.fd)

