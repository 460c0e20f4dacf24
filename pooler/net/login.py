"""A client's login, from its first byte to just before the greeting.

Decides who a client is and whether it may come in; it never touches a server, and tells a client nothing
about databases or servers before it has proved who it is. The caller bounds it in time, answers PoolerError
with `refuse`, and closes quietly on PeerGone. AuthenticationOk belongs to the greeting, which is sent once a
session could be had; only `trust` says it at once, so that a load balancer's check gets its first reply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import trio

from pooler.errors import LoginRefused, NotServing, PoolerError, ProtocolViolation
from pooler.net.gate import Gate, GateRules, Proven, refusal_message
from pooler.net.handshake import HANDSHAKE_RECORD, HandshakeFailed, accept_tls, has_alpn
from pooler.net.passwords import send
from pooler.net.proxy_protocol import PeerAddress, begins_like_header, read_proxy_header
from pooler.net.stream import Broken, PeerGone, RawSocket
from pooler.net.tls_context import ClientTls
from pooler.wire import messages, sqlstate
from pooler.wire.auth import ServerSecret
from pooler.wire.startup import (
    CancelAsked,
    Encryption,
    NoPacket,
    Replication,
    StartupAsked,
    read_first_packet,
)

FAREWELL_SECONDS = 2.0
FAREWELL_BYTES_MAX = 1_048_576
PEEK_BYTES = 1_024
CONSOLE_DATABASES = frozenset({"pooler", "pgbouncer"})


class ProxyRule(StrEnum):
    """Whether a connection begins with a PROXY header."""

    FORBIDDEN = "forbidden"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Door:
    """What one listening socket lets in: `gate` is about proof. `database_exists` is asked only about a
    client that has proved who it is. `tls` is None where encryption is declined. `shutting_down`: it is for
    the console alone, and others are told so before they prove anything, as PostgreSQL does."""

    gate: GateRules
    database_exists: Callable[[str], bool]
    console_users: frozenset[str] = frozenset()
    console_databases: frozenset[str] = CONSOLE_DATABASES
    proxy: ProxyRule = ProxyRule.FORBIDDEN
    tls: ClientTls | None = None
    shutting_down: bool = False


@dataclass(frozen=True, slots=True)
class LoggedIn:
    """A client that proved who it is and has not been answered yet.

    `parameters` are the startup parameters apart from user, database, options and replication; `options` is
    as it came. `owed` must be the first bytes of the greeting. `leftover` are bytes that came
    after the last login message. `console`: it wants the admin database and may have it; `is_owner`: as an
    administrator, whatever its name.
    """

    user: str
    database: str
    parameters: Mapping[str, str]
    options: str
    replication: Replication
    protocol_minor: int
    address: PeerAddress
    secret: ServerSecret
    console: bool
    is_owner: bool
    owed: bytes = field(repr=False)
    leftover: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a greeting says: `owed` of LoggedIn, the parameters, the cancel key (process id and secret), and a
    NOTICE where there is one."""

    owed: bytes = field(repr=False)
    parameters: Sequence[tuple[bytes, bytes]]
    key: bytes = field(repr=False)
    notice: str = ""


async def login(sock: RawSocket, door: Door, peer: PeerAddress) -> LoggedIn | CancelAsked:
    """Let a client in as far as the greeting. `peer` is the address its socket has.

    Raises LoginRefused and ProtocolViolation for `refuse`, PeerGone when the client left, HandshakeFailed
    when it cannot be told why. Leaves the socket open in every other case.
    """
    entrance = _Entrance(sock, None if sock.is_local else door.tls)
    address = await entrance.take_proxy_header(door.proxy) or peer
    await entrance.take_direct_tls()
    asked = await entrance.take_request()
    if isinstance(asked, CancelAsked):
        return asked
    if door.shutting_down and asked.database not in door.console_databases:
        raise NotServing("the pooler is shutting down")
    entrance.check_encrypted(asked, address)
    if asked.must_negotiate:
        await send(sock, messages.negotiate_protocol_version(asked.minor, asked.unknown_options))
    gate = Gate(sock, door.gate, asked, address, bytes(entrance.buffer))
    proven = await gate.prove()
    return LoggedIn(
        user=asked.user, database=asked.database, parameters=asked.parameters, options=asked.options,
        replication=asked.replication, protocol_minor=asked.minor, address=address, secret=proven.secret,
        console=_check_entry(door, asked, proven), is_owner=proven.is_owner or proven.is_anybody,
        owed=proven.owed, leftover=gate.leftover(),
    )


async def greet(sock: RawSocket, welcome: Welcome) -> None:
    """Everything from AuthenticationOk to ReadyForQuery in one write. Raises Broken."""
    parts = [welcome.owed]
    parts += [messages.parameter_status(name, value) for name, value in welcome.parameters]
    parts.append(messages.backend_key_data(welcome.key))
    if welcome.notice:
        parts.append(messages.notice_response(messages.Fault("NOTICE", "00000", welcome.notice)))
    parts.append(messages.ready_for_query())
    await sock.send_all(b"".join(parts))


async def refuse(sock: RawSocket, error: PoolerError) -> None:
    """Tell a client why it cannot come in and close. Waits a little for it to hang up, so that the text is
    not lost to a reset; never raises but Cancelled."""
    if sock.is_shaking_hands:
        sock.close()
        return
    try:
        with trio.move_on_after(FAREWELL_SECONDS):
            await sock.send_all(refusal_message(error))
            sock.end_sending()
            await _drain(sock)
    except Broken:
        return
    finally:
        sock.close()


async def _drain(sock: RawSocket) -> None:
    total = 0
    while total < FAREWELL_BYTES_MAX and (data := await sock.recv()):
        total += len(data)


def _check_entry(door: Door, asked: StartupAsked, proven: Proven) -> bool:
    if asked.database in door.console_databases:
        if asked.user not in door.console_users and not (proven.is_owner or proven.is_anybody):
            raise LoginRefused(f'user "{asked.user}" may not use the admin console')
        return True
    if asked.replication is not Replication.PHYSICAL and not door.database_exists(asked.database):
        raise LoginRefused(f'database "{asked.database}" does not exist', sqlstate.INVALID_CATALOG_NAME)
    return False


class _Entrance:
    """The bytes before the first typed message. `tls` is None where encryption is declined."""

    def __init__(self, sock: RawSocket, tls: ClientTls | None) -> None:
        self._sock = sock
        self._tls = tls
        self.buffer = bytearray()

    async def take_proxy_header(self, rule: ProxyRule) -> PeerAddress | None:
        """The client's address as a PROXY header has it, or None where there is none to be had. What comes
        behind the header stays unread: it may be a handshake's."""
        if rule is ProxyRule.FORBIDDEN:
            return None
        came = bytearray()
        while True:
            seen = await self._peek()
            header = read_proxy_header(came + seen)
            size = len(came) + len(seen) if header is None else header.size
            while len(came) < size:
                came += await self._sock.recv_some(size - len(came))
            if header is not None:
                return header.source

    async def take_direct_tls(self) -> None:
        """Do the handshake that a client may begin without asking; it must name the protocol then, so that
        no other's can be passed off as ours."""
        if self._tls is None or (await self._peek(1))[0] != HANDSHAKE_RECORD:
            return
        await accept_tls(self._sock, self._tls)
        if not has_alpn(self._sock.plain):
            raise HandshakeFailed("direct TLS without the ALPN protocol postgresql")

    async def take_request(self) -> CancelAsked | StartupAsked:
        """The first request that is not about encryption. Each kind of encryption is answered once."""
        answered: set[Encryption] = set()
        while True:
            asked = await self._take_packet()
            if not isinstance(asked, Encryption):
                return asked
            if asked in answered or self._sock.tls is not None:
                raise ProtocolViolation(f"repeated {asked} request")
            if self.buffer:
                raise ProtocolViolation(f"received unencrypted data after {asked} request")
            answered.add(asked)
            if asked is Encryption.SSL and self._tls is not None:
                await send(self._sock, b"S")
                await accept_tls(self._sock, self._tls)
            else:
                await send(self._sock, b"N")

    def check_encrypted(self, asked: StartupAsked, address: PeerAddress) -> None:
        """Raises LoginRefused, in PostgreSQL's words, where encryption is required and was not asked for."""
        if self._tls is not None and self._tls.is_required and self._sock.tls is None:
            raise LoginRefused(
                f'no pg_hba.conf entry for host "{address.host}", user "{asked.user}", '
                f'database "{asked.database}", no encryption')

    async def _peek(self, bytes_max: int = PEEK_BYTES) -> bytes:
        try:
            seen = await self._sock.peek(bytes_max)
        except Broken as broken:
            raise PeerGone(str(broken)) from broken
        if not seen:
            raise PeerGone("end of file")
        return seen

    async def _take_packet(self) -> Encryption | CancelAsked | StartupAsked:
        while True:
            if begins_like_header(self.buffer):
                raise ProtocolViolation("a PROXY header is not expected from this address")
            try:
                found = read_first_packet(self.buffer)
            except NoPacket as fault:
                raise HandshakeFailed(str(fault)) from fault
            if found is not None:
                del self.buffer[: found[1]]
                return found[0]
            self.buffer += await self._sock.recv_some()
