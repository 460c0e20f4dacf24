"""What a new session is told about itself and its server, in one round trip.

The ledger records these values; they come from the server, never from our clock. Also asks the server to
notice by itself that we are gone while it runs a query (client_connection_check_interval, PostgreSQL 14+).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from ipaddress import ip_address

from coordinator.ledger.record import Backend
from pooler.errors import PoolerError, ProtocolViolation
from pooler.net.dial import Dialled
from pooler.net.stream import Broken
from pooler.wire import messages
from pooler.wire.frames import FrameReader
from pooler.wire.sqlstate import CONNECTION_FAILURE

CHECK_INTERVAL_MS = 1_000
# times as whole microseconds: extract() is exact from 14 on, and a float before that still holds them
_US = "pg_catalog.round(extract(epoch from {}) OPERATOR(pg_catalog.*) 1000000)::pg_catalog.int8"
# pg_control_checkpoint() lags after a promotion, the name of the WAL file being written does not
_TIMELINE = (
    "CASE WHEN pg_catalog.pg_is_in_recovery() "
    "THEN (SELECT timeline_id FROM pg_catalog.pg_control_checkpoint()) "
    "ELSE ('x' OPERATOR(pg_catalog.||) pg_catalog.substr("
    "pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8))"
    "::pg_catalog.bit(32)::pg_catalog.int4 END"
)
_FACTS = (
    "SELECT pg_catalog.pg_backend_pid(), "
    f"(SELECT {_US.format('backend_start')} "
    "FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid())), "
    "(SELECT system_identifier FROM pg_catalog.pg_control_system()), "
    f"{_TIMELINE}, {_US.format('pg_catalog.pg_postmaster_start_time()')}, pg_catalog.pg_is_in_recovery(), "
    "pg_catalog.host(pg_catalog.inet_client_addr()), pg_catalog.inet_client_port(), "
    "pg_catalog.host(pg_catalog.inet_server_addr()), pg_catalog.inet_server_port(), "
    "(SELECT pg_catalog.set_config(name, '{check_interval_ms}', false) FROM pg_catalog.pg_settings "
    "WHERE name OPERATOR(pg_catalog.=) 'client_connection_check_interval'"
    " AND '{check_interval_ms}' OPERATOR(pg_catalog.<>) '')"
)
_COLUMNS = 11
_PORT_MAX, _INT32_MAX, _INT64_MAX = (1 << 16) - 1, (1 << 31) - 1, (1 << 63) - 1
_ANSWER_BYTES_MAX = 1 << 20


class FactsRefused(PoolerError):
    """The server did not answer the question. The session is still open and the caller's to close."""

    sqlstate = CONNECTION_FAILURE

    def __init__(self, message: str, code: str = CONNECTION_FAILURE) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """A session as its server sees it. Addresses are "" and ports 0 over a unix socket; `parameters` are
    those the server reported meanwhile."""

    pid: int
    backend_start_us: int
    backend: Backend
    client_address: str
    client_port: int
    server_address: str
    server_port: int
    parameters: dict[bytes, bytes]


async def session_facts(
    session: Dialled, address: str, *, check_interval_ms: int | None = CHECK_INTERVAL_MS
) -> SessionFacts:
    """Ask a session that is idle; `address` is host:port as dialled. None leaves the check interval as it is.

    Raises FactsRefused with the server's error, Broken when the connection ended, ProtocolViolation.
    """
    interval = "" if check_interval_ms is None else str(check_interval_ms)
    answer = await _answer(session, _FACTS.format(check_interval_ms=interval), session.leftover)
    return _facts(answer, address)


async def facts_and_query(query: str, session: Dialled, address: str) -> SessionFacts:
    """As session_facts, and after it a query of the configuration's (connect_query): its rows are dropped,
    its error is FactsRefused."""
    facts = await session_facts(session, address)
    answer = await _answer(session, query)
    return replace(facts, parameters={**facts.parameters, **answer.parameters})


async def asked_row(session: Dialled, query: str) -> list[bytes | None]:
    """The last row of what a session that is idle answers to `query`. Raises as session_facts."""
    return (await _answer(session, query)).row


async def _answer(session: Dialled, query: str, leftover: bytes = b"") -> _Answer:
    """All that comes up to ReadyForQuery. Raises as session_facts."""
    reader = FrameReader()
    reader.feed(leftover)
    await session.sock.send_all(messages.query(query))
    answer, heard_bytes = _Answer(), 0
    while not answer.done:
        frame = reader.next()
        if frame is not None:
            answer.take(frame.kind, frame.body)
            continue
        data = await session.sock.recv()
        if not data:
            raise Broken("the server ended the session") if answer.error is None else answer.error
        heard_bytes += len(data)
        if heard_bytes > _ANSWER_BYTES_MAX:
            raise ProtocolViolation("server said too much in answer to a query")
        reader.feed(data)
    if answer.error is not None:
        raise answer.error
    if reader.buffered:
        raise ProtocolViolation("server went on after it was ready for a query")
    return answer


class _Answer:
    """What came back so far."""

    def __init__(self) -> None:
        self.row: list[bytes | None] = []
        self.parameters: dict[bytes, bytes] = {}
        self.error: FactsRefused | None = None
        self.done = False

    def take(self, kind: bytes, body: bytes) -> None:
        """One message of the server."""
        if kind == b"D":
            self.row = messages.read_data_row(body)
        elif kind == b"S":
            name, value = messages.read_parameter_status(body)
            self.parameters[name] = value
        elif kind == b"E":
            fault = messages.read_fault(body)
            self.error = FactsRefused(fault.message, fault.code)
        elif kind == b"Z":
            self.done = True
        elif kind not in b"TCNAI":
            raise ProtocolViolation(f"server sent message type {kind!r} in answer to a query")


def _facts(answer: _Answer, address: str) -> SessionFacts:
    if len(answer.row) != _COLUMNS:
        raise ProtocolViolation("server answered the question about itself without a row")
    words = [messages.shown(value) if value is not None else "" for value in answer.row]
    try:
        for end in (words[6], words[8]):
            ip_address(end.partition("%")[0] or "::")
        backend = Backend(address, system_identifier=words[2], timeline=_number(words[3], _INT32_MAX),
                          postmaster_start_us=_number(words[4], _INT64_MAX), in_recovery=words[5] == "t")
        return SessionFacts(
            _number(words[0], _INT32_MAX), _number(words[1], _INT64_MAX), backend, words[6],
            _number(words[7] or "0", _PORT_MAX), words[8], _number(words[9] or "0", _PORT_MAX),
            answer.parameters)
    except ValueError as fault:
        raise ProtocolViolation(f"server answered the question about itself with {fault}") from fault


def _number(word: str, most: int) -> int:
    """What no server counts beyond, and no ledger holds. Raises ValueError."""
    found = int(word)
    if not 0 <= found <= most:
        raise ValueError(f"the number {found}")
    return found
