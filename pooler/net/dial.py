"""A login to a server, from connect() to its first ReadyForQuery.

Decides, whatever happens, whether a session may exist at the server: that is what the outcome of a failure
says, because a permit may only be given back on proof. Before the startup packet is written none can; after
it only an orderly end of file, after a FATAL of the server or a Terminate of ours, proves that there is none.
Every failure closes the socket. Holds no permit and retries nothing: that is the pool's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import trio

from coordinator.ledger.states import Proof
from pooler.errors import PoolerError, ProtocolViolation
from pooler.net.connect import connect
from pooler.net.handshake import HandshakeFailed, request_tls
from pooler.net.server_auth import CannotAnswer, authenticate
from pooler.net.stream import Broken, KeepAlive, RawSocket
from pooler.net.tls_context import ServerTls
from pooler.wire import messages
from pooler.wire.auth import ServerSecret
from pooler.wire.frames import Frame, FrameReader
from pooler.wire.sqlstate import (
    CONNECTION_FAILURE,
    INVALID_AUTHORIZATION,
    TOO_MANY_CONNECTIONS,
    is_permanent_login_fault,
)

LAST_WORDS_BYTES_MAX = 8_192
LOGIN_BYTES_MAX = 1 << 20  # of all that a server says up to its first ReadyForQuery
WITHDRAWAL_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where to log in and as whom. A `host` that begins with a slash is the directory of a unix socket.

    `application_name` is the permit's birth tag. `options` is the startup parameter of that name;
    `parameters` are further ones. `tls`: None for never; over a unix socket there is none.
    """

    host: str
    port: int
    user: str
    database: str
    application_name: str
    secret: ServerSecret = field(default_factory=ServerSecret)
    options: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    protocol_minor: int = 0
    keepalive: KeepAlive | None = None
    tls: ServerTls | None = None

    @property
    def address(self) -> str:
        """host:port as dialled."""
        return f"{self.host}:{self.port}"

    def startup_packet(self) -> bytes:
        """The packet that may make a session. Raises ValueError for a zero byte in a value."""
        wanted = {"user": self.user, "database": self.database, "application_name": self.application_name,
                  "options": self.options, **self.parameters}
        return messages.startup({k: v for k, v in wanted.items() if v}, minor=self.protocol_minor)


class Outcome(StrEnum):
    """What a failed dial says about a session at the server."""

    NEVER_STARTED = "never_started"  # the startup packet was not written: there is none
    ENDED = "ended"  # FATAL or Terminate, and an orderly end of file: there is none any more
    SILENT = "silent"  # anything else: there may be one


class DialFailed(PoolerError):
    """A login to a server failed.

    `outcome` says what is known of a session; `code` and the text are the server's own where it said
    something (`server_error` is then its ErrorResponse body, to pass on unchanged).
    """

    sqlstate = CONNECTION_FAILURE

    def __init__(
        self, outcome: Outcome, message: str, *, code: str = CONNECTION_FAILURE, server_error: bytes = b""
    ) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.code = code
        self.server_error = server_error

    @property
    def proof(self) -> Proof | None:
        """With what the permit may be released; None: it may not."""
        return {Outcome.NEVER_STARTED: Proof.UNUSED, Outcome.ENDED: Proof.EOF}.get(self.outcome)

    @property
    def is_permanent(self) -> bool:
        """Whether trying again soon is of no use."""
        return is_permanent_login_fault(self.code)


@dataclass(slots=True)
class Progress:
    """How far a dial came: what its caller knows when it was cancelled. With `startup_sent` false no session
    can come of it."""

    startup_sent: bool = False


@dataclass(frozen=True, slots=True)
class Dialled:
    """An open session. `leftover` are bytes after ReadyForQuery, which its next reader must get first."""

    sock: RawSocket
    pid: int
    secret_key: bytes = field(repr=False)
    parameters: dict[bytes, bytes]
    leftover: bytes = field(repr=False)

    @property
    def cancel_key(self) -> bytes:
        """As CancelRequest takes it."""
        return self.pid.to_bytes(4, "big", signed=True) + self.secret_key


async def dial(
    target: Target,
    *,
    connect_timeout_seconds: float,
    progress: Progress | None = None,
    on_startup_sent: Callable[[], None] | None = None,
) -> Dialled:
    """Connect, log in, and read up to the first ReadyForQuery, all within `connect_timeout_seconds`.

    Under sslmode allow and prefer a second attempt is made the other way where the first ended because of
    its encryption, or of the lack of it, and left nothing at the server. Raises DialFailed, and Cancelled;
    the socket is closed then, with a reset if a session may exist.
    `on_startup_sent` is called in the same step in which the kernel took the last byte of the packet.
    """
    progress = progress or Progress()
    attempts = [_Attempt(way, progress, on_startup_sent) for way in _ways(target)]
    attempt = attempts.pop(0)
    try:
        with trio.fail_after(connect_timeout_seconds):
            while True:
                try:
                    return await attempt.run()
                except (Broken, ProtocolViolation) as fault:
                    if not attempts or not attempt.calls_for_another(fault):
                        raise
                attempt.close_unless_done()
                progress.startup_sent = False  # what came of it has ended, and that was seen
                attempt = attempts.pop(0)
    except trio.TooSlowError:
        raise attempt.failure(f"no answer within {connect_timeout_seconds:g} s") from None
    except (Broken, ProtocolViolation) as fault:
        raise attempt.failure(str(fault)) from fault
    finally:
        attempt.close_unless_done()


def _ways(target: Target) -> list[Target]:
    """In which order TLS and clear text are tried (libpq's sslmode)."""
    clear = replace(target, tls=None)
    if target.tls is None or target.host.startswith("/"):
        return [clear]
    return {"allow": [clear, target], "prefer": [target, clear]}.get(target.tls.mode, [target])


async def hang_up(sock: RawSocket, *, timeout_seconds: float) -> Proof | None:
    """Send Terminate, wait for the server's orderly end of file, close. Proof.EOF if it came, else None and
    the socket was reset. Cancelled: reset. An end that is already there is taken before anything is sent,
    because sending would turn it into a reset."""
    proof = None
    try:
        with trio.move_on_after(timeout_seconds):
            if not sock.has_ended():
                await sock.send_all(messages.TERMINATE)
                while await sock.recv():
                    pass
            proof = Proof.EOF
    except Broken:
        return None
    finally:
        if proof is None:
            sock.abort()
        sock.close()
    return proof


class _Attempt:
    """One dial. `sock` is set while it is ours to close."""

    def __init__(
        self, target: Target, progress: Progress, on_startup_sent: Callable[[], None] | None
    ) -> None:
        self._target = target
        self._progress = progress
        self._on_startup_sent = on_startup_sent
        self._sock: RawSocket | None = None
        self._reader = FrameReader()
        self._heard_bytes = 0
        self._last_words: messages.Fault | None = None
        self._last_words_raw = b""
        self._ended = False
        self._code = CONNECTION_FAILURE  # of a failure of which the server said nothing

    async def run(self) -> Dialled:
        target = self._target
        sock = self._sock = RawSocket(await connect(target.host, target.port), keepalive=target.keepalive)
        if target.tls is not None:
            await request_tls(sock, target.tls, target.host)
        await self._send_startup(sock)
        try:
            await authenticate(sock, self._next_frame, user=target.user, secret=target.secret)
        except CannotAnswer as reason:
            self._code = INVALID_AUTHORIZATION  # the next attempt would have no more to say
            self._ended = await hang_up(sock, timeout_seconds=WITHDRAWAL_SECONDS) is not None
            raise Broken(str(reason)) from reason
        return await self._read_greeting(sock)

    def failure(self, reason: str) -> DialFailed:
        """What to raise, from what is known by now."""
        where = f"server {self._target.address}"
        if not self._progress.startup_sent:
            return DialFailed(Outcome.NEVER_STARTED, f"{where}: {reason}")
        outcome = Outcome.ENDED if self._ended else Outcome.SILENT
        said = self._last_words
        if said is None or not said.message:
            return DialFailed(outcome, f"{where}: {reason or 'it refused without a word'}", code=self._code)
        return DialFailed(outcome, said.message, code=said.code, server_error=self._last_words_raw)

    def calls_for_another(self, fault: Exception) -> bool:
        """Whether it failed by being encrypted, or by not being: nothing of it is left at the server."""
        if isinstance(fault, HandshakeFailed):
            return not self._progress.startup_sent
        is_as_meant = self._sock is not None and (self._sock.tls is None) is (self._target.tls is None)
        refused = self._last_words is not None and self._last_words.code == INVALID_AUTHORIZATION
        return refused and self._ended and is_as_meant

    def close_unless_done(self) -> None:
        """Close the socket if the session was not handed over; with a reset if one may exist."""
        if self._sock is None:
            return
        if self._progress.startup_sent and not self._ended:
            self._sock.abort()
        self._sock.close()

    async def _send_startup(self, sock: RawSocket) -> None:
        await trio.lowlevel.checkpoint()
        left = memoryview(self._target.startup_packet())
        while left:
            left = left[await sock.send_some(left) :]
        self._progress.startup_sent = True
        if self._on_startup_sent is not None:
            self._on_startup_sent()

    async def _next_frame(self, sock: RawSocket) -> Frame:
        """The next message that is not a notice. A FATAL is read to the end of the connection and raised."""
        while True:
            frame = self._reader.next()
            if frame is None:
                data = await sock.recv()
                if not data:
                    raise Broken("the server closed the connection during the login")
                self._heard_bytes += len(data)
                if self._heard_bytes > LOGIN_BYTES_MAX:
                    raise ProtocolViolation("the server said too much during the login")
                self._reader.feed(data)
                await self._hear_bare_refusal(sock)
            elif frame.kind == b"E":
                await self._hear_out(sock, frame.body)
            elif frame.kind != b"N":
                return frame

    async def _hear_out(self, sock: RawSocket, body: bytes) -> None:
        self._last_words, self._last_words_raw = messages.read_fault(body), body
        await self._await_end(sock)
        raise Broken(self._last_words.message)

    async def _hear_bare_refusal(self, sock: RawSocket) -> None:
        """A postmaster that cannot fork says so as a bare text after an E, without a length (fork_process
        failure, as libpq knows it)."""
        if not self._reader.looks_bare():
            return
        said = bytearray(self._reader.take_rest())
        await self._await_end(sock, said)
        words = messages.shown(bytes(said[1:])).strip("\0\n")
        self._last_words = messages.Fault("FATAL", TOO_MANY_CONNECTIONS, words)
        self._last_words_raw = messages.error_response(self._last_words)[5:]
        raise Broken(words)

    async def _await_end(self, sock: RawSocket, said: bytearray | None = None) -> None:
        total = 0
        while data := await sock.recv():
            total += len(data)
            if total > LAST_WORDS_BYTES_MAX:
                raise Broken("the server went on after a fatal error")
            if said is not None:
                said += data
        self._ended = True

    async def _read_greeting(self, sock: RawSocket) -> Dialled:
        parameters: dict[bytes, bytes] = {}
        pid, key = 0, b""
        while True:
            frame = await self._next_frame(sock)
            if frame.kind == b"S":
                name, value = messages.read_parameter_status(frame.body)
                parameters[name] = value
            elif frame.kind == b"K":
                pid, key = messages.read_backend_key_data(frame.body)
            elif frame.kind == b"Z":
                self._sock = None  # handed over: no checkpoint from here to the caller
                return Dialled(sock, pid, key, parameters, self._reader.take_rest())
            elif frame.kind != b"v":
                raise ProtocolViolation(f"server sent message type {frame.kind!r} in its greeting")
