"""A client's login, from its first byte to just before the greeting.

Decides who a client is and whether it may come in; it never touches a server, and tells a client nothing
about databases or servers before it has proved who it is. The caller bounds it in time, answers PoolerError
with `refuse`, and closes quietly on PeerGone. AuthenticationOk belongs to the greeting, which is sent once a
session could be had; only `trust` says it at once, so that a load balancer's check gets its first reply.
"""

from __future__ import annotations

import hmac
import secrets
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import trio

from pooler.errors import LoginRefused, PoolerError, ProtocolViolation
from pooler.net.proxy_protocol import PeerAddress, begins_like_header, read_proxy_header
from pooler.net.stream import Broken, PeerGone, RawSocket
from pooler.wire import auth, messages, scram, sqlstate
from pooler.wire.auth import AuthType, Method, Secret, ServerSecret
from pooler.wire.frames import AUTH_BYTES_MAX, FrameReader
from pooler.wire.startup import (
    MINOR_MAX,
    CancelAsked,
    Encryption,
    Replication,
    StartupAsked,
    read_first_packet,
)

FAREWELL_SECONDS = 2.0
FAREWELL_BYTES_MAX = 1_048_576
CONSOLE_DATABASES = frozenset({"pooler", "pgbouncer"})


class ProxyRule(StrEnum):
    """Whether a connection begins with a PROXY header."""

    FORBIDDEN = "forbidden"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Door:
    """What one listening socket lets in.

    `find_user` gives the stored secret of (user, database), None for a user that does not exist.
    `database_exists` is asked only about a client that has proved who it is. `mock_key` is a secret that all
    workers share, so that each gives an unknown user the same salt. `unknown_method`: see choose_method.
    """

    auth_type: AuthType
    find_user: Callable[[str, str], Awaitable[Secret | None]]
    database_exists: Callable[[str], bool]
    mock_key: bytes = field(repr=False)
    unknown_method: Method = Method.SCRAM
    console_users: frozenset[str] = frozenset()
    console_databases: frozenset[str] = CONSOLE_DATABASES
    proxy: ProxyRule = ProxyRule.FORBIDDEN
    auth_bytes_max: int = AUTH_BYTES_MAX
    derived: dict[str, tuple[Secret, scram.Verifier]] = field(default_factory=dict, repr=False)  # a memo


@dataclass(frozen=True, slots=True)
class LoggedIn:
    """A client that proved who it is and has not been answered yet.

    `parameters` are the startup parameters apart from user, database, options and replication; `options` are
    the settings in `options`. `owed` must be the first bytes of the greeting. `leftover` are bytes that came
    after the last login message. `console`: it wants the admin database and may have it.
    """

    user: str
    database: str
    parameters: Mapping[str, str]
    options: Mapping[str, str]
    replication: Replication
    protocol_minor: int
    address: PeerAddress
    secret: ServerSecret
    console: bool
    owed: bytes = field(repr=False)
    leftover: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a greeting says: `owed` of LoggedIn, the parameters, the cancel key (process id and secret)."""

    owed: bytes = field(repr=False)
    parameters: Sequence[tuple[bytes, bytes]]
    key: bytes = field(repr=False)


async def login(sock: RawSocket, door: Door, peer: PeerAddress) -> LoggedIn | CancelAsked:
    """Let a client in as far as the greeting. `peer` is the address its socket has.

    Raises LoginRefused and ProtocolViolation for `refuse`, PeerGone when the client left. Leaves the socket
    open in every case.
    """
    entrance = _Entrance(sock)
    address = await entrance.take_proxy_header(door.proxy) or peer
    asked = await entrance.take_request()
    if isinstance(asked, CancelAsked):
        return asked
    if asked.must_negotiate:
        await _send(sock, messages.negotiate_protocol_version(MINOR_MAX, asked.unknown_options))
    reader = FrameReader(limit_bytes=door.auth_bytes_max, allowed=b"pX")
    reader.feed(bytes(entrance.buffer))
    gate = _Gate(sock, reader, door, asked)
    secret = await door.find_user(asked.user, asked.database)
    owed, server_secret = await gate.prove(secret)
    return LoggedIn(
        user=asked.user, database=asked.database, parameters=asked.parameters, options=asked.options,
        replication=asked.replication, protocol_minor=asked.minor, address=address, secret=server_secret,
        console=_check_entry(door, asked), owed=owed, leftover=reader.take_rest(),
    )


async def greet(sock: RawSocket, welcome: Welcome) -> None:
    """Everything from AuthenticationOk to ReadyForQuery in one write. Raises Broken."""
    parts = [welcome.owed]
    parts += [messages.parameter_status(name, value) for name, value in welcome.parameters]
    parts += [messages.backend_key_data(welcome.key), messages.ready_for_query()]
    await sock.send_all(b"".join(parts))


async def refuse(sock: RawSocket, error: PoolerError) -> None:
    """Tell a client why it cannot come in and close. Waits a little for it to hang up, so that the text is
    not lost to a reset; never raises but Cancelled."""
    code = error.code if isinstance(error, LoginRefused) else error.sqlstate
    fault = messages.Fault("FATAL", code, str(error))
    try:
        with trio.move_on_after(FAREWELL_SECONDS):
            await sock.send_all(messages.error_response(fault))
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


async def _send(sock: RawSocket, data: bytes) -> None:
    try:
        await sock.send_all(data)
    except Broken as broken:
        raise PeerGone(str(broken)) from broken


def _check_entry(door: Door, asked: StartupAsked) -> bool:
    if asked.database in door.console_databases:
        if asked.user not in door.console_users:
            raise LoginRefused(f'user "{asked.user}" may not use the admin console')
        return True
    if not door.database_exists(asked.database):
        raise LoginRefused(f'database "{asked.database}" does not exist', sqlstate.INVALID_CATALOG_NAME)
    return False


class _Entrance:
    """The bytes before the first typed message."""

    def __init__(self, sock: RawSocket) -> None:
        self._sock = sock
        self.buffer = bytearray()

    async def take_proxy_header(self, rule: ProxyRule) -> PeerAddress | None:
        """The client's address as a PROXY header has it, or None where there is none to be had."""
        if rule is ProxyRule.FORBIDDEN:
            return None
        while (header := read_proxy_header(self.buffer)) is None:
            self.buffer += await self._sock.recv_some()
        del self.buffer[: header.size]
        return header.source

    async def take_request(self) -> CancelAsked | StartupAsked:
        """The first request that is not about encryption. Each kind of encryption is declined once."""
        declined: set[Encryption] = set()
        while True:
            asked = await self._take_packet()
            if not isinstance(asked, Encryption):
                return asked
            if asked in declined:
                raise ProtocolViolation(f"repeated {asked} request")
            if self.buffer:
                raise ProtocolViolation(f"received unencrypted data after {asked} request")
            declined.add(asked)
            await _send(self._sock, b"N")

    async def _take_packet(self) -> Encryption | CancelAsked | StartupAsked:
        while True:
            if begins_like_header(self.buffer):
                raise ProtocolViolation("a PROXY header is not expected from this address")
            found = read_first_packet(self.buffer)
            if found is not None:
                del self.buffer[: found[1]]
                return found[0]
            self.buffer += await self._sock.recv_some()


class _Gate:
    """One client's proof. Every failure costs exactly one key derivation, whatever the reason for it, so that
    time does not tell an unknown user from a wrong password."""

    def __init__(self, sock: RawSocket, reader: FrameReader, door: Door, asked: StartupAsked) -> None:
        self._sock = sock
        self._reader = reader
        self._door = door
        self._user = asked.user
        self._has_derived = False

    async def prove(self, secret: Secret | None) -> tuple[bytes, ServerSecret]:
        """What the client is owed at the greeting, and what its login lets us say to a server."""
        method = auth.choose_method(self._door.auth_type, secret, self._door.unknown_method)
        if method is Method.TRUST:
            await _send(self._sock, messages.AUTHENTICATION_OK)
            if secret is None:
                raise LoginRefused(f'role "{self._user}" does not exist')
            return b"", ServerSecret.of(secret)
        checks = {Method.CLEARTEXT: self._cleartext, Method.MD5: self._md5, Method.SCRAM: self._scram}
        proven = await checks[method](secret)
        if proven is None:
            if not self._has_derived:
                await self._derive(b"", scram.mock_salt(self._door.mock_key, self._user))
            raise LoginRefused(
                f'password authentication failed for user "{self._user}"', sqlstate.INVALID_PASSWORD)
        last_words, server_secret = proven
        return last_words + messages.AUTHENTICATION_OK, server_secret

    async def _cleartext(self, secret: Secret | None) -> tuple[bytes, ServerSecret] | None:
        await _send(self._sock, messages.AUTHENTICATION_CLEARTEXT)
        password = await self._take_string()
        if secret is not None and secret.scram is not None:
            held = secret.scram
            derived = await self._derive(password, held.salt, held.iterations)
            fits = bool(password) and hmac.compare_digest(derived.stored_key, held.stored_key)
        else:
            fits = auth.check_cleartext(secret, self._user, password)
        return (b"", ServerSecret(plain=password)) if fits else None

    async def _md5(self, secret: Secret | None) -> tuple[bytes, ServerSecret] | None:
        salt = secrets.token_bytes(4)
        await _send(self._sock, messages.authentication_md5(salt))
        answer = await self._take_string()
        fits = auth.check_md5(secret, self._user, salt, answer)
        return (b"", ServerSecret.of(secret)) if fits else None

    async def _scram(self, secret: Secret | None) -> tuple[bytes, ServerSecret] | None:
        await _send(self._sock, messages.authentication_sasl([scram.MECHANISM]))
        shown = scram.mock_verifier(self._door.mock_key, self._user)
        if secret is not None and secret.scram is not None:
            shown = secret.scram
        nonce = b64encode(secrets.token_bytes(18)).decode()
        exchange = scram.ServerExchange(nonce=nonce, salt=shown.salt, iterations=shown.iterations)
        challenge = exchange.first(_read_sasl_initial(await self._take_body()))
        await _send(self._sock, messages.authentication_sasl_continue(challenge))
        final = await self._take_body()
        verifier = shown
        if secret is not None and secret.plain:
            verifier = await self._verifier_of(secret, secret.plain, shown.salt)
        proven = exchange.final(final, verifier)
        if proven is None:
            return None
        last_words, keys = proven
        plain = None if secret is None else secret.plain
        return messages.authentication_sasl_final(last_words), ServerSecret(plain=plain, keys=keys)

    async def _verifier_of(self, secret: Secret, plain: bytes, salt: bytes) -> scram.Verifier:
        known = self._door.derived.get(self._user)
        if known is not None and known[0] == secret:
            return known[1]
        verifier = await self._derive(plain, salt)
        self._door.derived[self._user] = (secret, verifier)
        return verifier

    async def _derive(
        self, password: bytes, salt: bytes, iterations: int = scram.ITERATIONS_DEFAULT
    ) -> scram.Verifier:
        self._has_derived = True
        return await trio.to_thread.run_sync(
            scram.Verifier.derive, password, salt, iterations, abandon_on_cancel=True)

    async def _take_body(self) -> bytes:
        while (frame := self._reader.next()) is None:
            self._reader.feed(await self._sock.recv_some())
        if frame.kind == b"X":
            raise PeerGone("terminated")
        return frame.body

    async def _take_string(self) -> bytes:
        body = await self._take_body()
        if not body or body.find(b"\0") != len(body) - 1:
            raise ProtocolViolation("invalid password packet size")
        return body[:-1]


def _read_sasl_initial(body: bytes) -> bytes:
    mechanism, at = messages.split_cstring(body)
    if mechanism != scram.MECHANISM.encode():
        raise ProtocolViolation("client selected an invalid SASL authentication mechanism")
    data = body[at + 4 :]
    if len(body) < at + 4 or int.from_bytes(body[at : at + 4], "big") != len(data):
        raise ProtocolViolation("malformed SASL initial response")
    return data
