"""A task as a client of a session: what `async with pool.checkout()` gives.

It stands where a ClientConn stands, so that the session's reader needs no other path.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

import trio

from pooler.admission.ticket import Ticket, TicketState
from pooler.errors import BackendLost, PoolerError, ProtocolViolation
from pooler.relay import owed as o
from pooler.wire.frames import FrameReader
from pooler.wire.messages import SYNC, bind, execute, parse, query, read_data_row, read_fault
from pooler.wire.parameters import ParameterSet
from pooler.wire.prepared import ClientStatements, Statement

if TYPE_CHECKING:
    from pooler.pool.pool import Pool
    from pooler.relay.server import ServerConn


ANSWER_BYTES_MAX = 4 << 20  # of the rows of one answer


class QueryFailed(PoolerError):
    """The server answered with an error; `code` is its SQLSTATE, `fields` its ErrorResponse if kept."""

    def __init__(self, code: str, message: str, fields: bytes = b"") -> None:
        super().__init__(message)
        self.code = code
        self.fields = fields


class TaskClient:
    """One task's use of one session."""

    forgets: bytes | None = None
    last_word = b""
    statements: ClientStatements | None = None

    def __init__(self, pool: Pool) -> None:
        self.holds = True  # the session stays until the block ends, whatever ReadyForQuery says
        self.skip = 0
        self.proven, self.fitting, self.last_sent = True, False, b""
        self.pool = pool
        self.ticket = Ticket(self.bind, self._refuse, self)
        self.parameters: Any = None
        self.server: ServerConn | None = None
        self._error: Exception | None = None
        self._changed = trio.Event()
        self._answer = FrameReader()

    async def bound(self) -> None:
        """Wait for the session. Raises what the ticket was refused with."""
        if self.server is None and self._error is None:
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    async def fit(self, wanted: ParameterSet) -> ParameterSet:
        """Set these on the session, for as long as this task has it. → they as the server has them.

        One round-trip at most. Raises QueryFailed with the server's own error, BackendLost.
        """
        server = self._session()
        self.parameters, self.proven, self.fitting = wanted, False, True
        server.fit(self)
        while not self.proven:
            await self._more()
        self.fitting = False
        fitted: ParameterSet = self.parameters
        return fitted

    async def query(self, sql: str) -> list[list[bytes | None]]:
        """The rows of one simple query. Raises QueryFailed, BackendLost, ProtocolViolation."""
        server = self._session()
        server.residue |= self.pool.look(sql.encode())
        return await self._exchange(query(sql), [o.QUERY])

    async def ask(
        self, settings: str, sql: str, values: Sequence[bytes], rows_max: int
    ) -> list[list[bytes | None]]:
        """The first rows of one statement with parameters, in a transaction of its own that begins with
        `settings` (SET LOCAL …). One round-trip. Raises QueryFailed, BackendLost."""
        self._session().statements.unnamed = None
        said = b"".join((query(f"BEGIN; {settings}"), parse("", sql), bind("", "", values),
                         execute("", rows_max), SYNC, query("COMMIT")))
        parsed = o.Parsed(Statement(b"", b""), b"", forward=True, named=False)
        return await self._exchange(said, [o.QUERY, parsed, o.BIND, o.EXECUTE, o.SYNC, o.QUERY])

    def _session(self) -> ServerConn:
        if self.server is None:
            raise BackendLost("the session is gone")
        return self.server

    async def _exchange(self, said: bytes, owed: Sequence[Any]) -> list[list[bytes | None]]:
        """Send, and read up to the last ReadyForQuery: the rows, or the first error. Raises ProtocolViolation
        where that is malformed or too much, besides what its callers say."""
        server = self._session()
        server.owed.extend(owed)
        server.write(said)
        readies = o.readies_owed(server.owed)
        rows: list[list[bytes | None]] = []
        rows_bytes = 0
        failure: QueryFailed | None = None
        while True:
            for frame in self._answer:
                if frame.kind == b"D":
                    rows_bytes += len(frame.body)
                    if rows_bytes > ANSWER_BYTES_MAX:
                        raise ProtocolViolation("server said too much in answer to a query")
                    rows.append(read_data_row(frame.body))
                elif frame.kind == b"E" and failure is None:
                    fault = read_fault(frame.body)
                    failure = QueryFailed(fault.code, fault.message)
                elif frame.kind == b"Z":
                    readies -= 1
            if not readies:
                if failure is not None:
                    raise failure
                return rows
            await self._more()

    async def _more(self) -> None:
        self._changed = trio.Event()
        if self.server is not None:
            await self._changed.wait()
        if self.server is None:
            raise self._error or BackendLost("the server went away")

    def leaves_nothing(self) -> None:
        """All that it did to the session is what `fit` set, which the session knows of."""
        self.holds = False

    def give_back(self) -> None:
        """The block is over."""
        server, self.server = self.server, None
        if self.ticket.state is not TicketState.IN_TRANSACTION:
            return
        self.ticket.release()
        if server is not None:
            self.pool.client_left(server, self)

    # ---- what a session calls

    def bind(self, server: ServerConn) -> None:
        """The ticket was granted."""
        self.server = server
        self.parameters = server.parameters
        server.client = self
        server.started_at = monotonic()
        if server.row is not None:
            server.row.idle()  # no ticket of a client's has it
        self._changed.set()

    def _refuse(self, error: Exception) -> None:
        self._error = error
        self._changed.set()

    def deliver(self, data: bytes) -> None:
        """An answer."""
        self._answer.feed(data)
        self._changed.set()

    def pause(self, paused: bool) -> None:
        """Nothing to stop: a task sends one query at a time."""

    def transaction_ended(self, now: float) -> None:
        """Kept until the block ends."""

    def detached(self, now: float) -> None:
        """Not before the block ends."""

    def break_off(self, sqlstate: str, text: str) -> None:
        """A limit of the pool ends the use of the session."""
        server, self.server = self.server, None
        said = server.own_error[5:] if server is not None and self.fitting else b""
        self._error = QueryFailed(sqlstate, text, said)
        if server is not None:
            self.ticket.release()
            self.pool.client_left(server, self)
        self._changed.set()

    def server_lost(self, server: ServerConn, fatal: bytes) -> None:
        """The session went away."""
        self.server = None
        self.ticket.release()
        self._changed.set()

    def fitted(self) -> None:
        """What `fit` asked for is set."""
        self._changed.set()

    def did_not_happen(self, entry: o.Entry) -> None:
        """A task prepares nothing."""

    def reset_asked(self) -> None:
        """A task says nothing of who asks."""

    def go_on(self) -> None:
        """A task prepares nothing."""
