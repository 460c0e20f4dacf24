"""A client's proof of who it is.

Decides which proof is asked for and whether the one given fits; it says nothing about databases or servers,
and takes the same time and the same words for a user that does not exist as for a wrong password.
"""

from __future__ import annotations

import hmac
import secrets
from base64 import b64encode
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from pooler.errors import LoginRefused, ProtocolViolation
from pooler.net.proxy_protocol import PeerAddress
from pooler.net.stream import Broken, PeerGone, RawSocket
from pooler.wire import auth, messages, scram, sqlstate
from pooler.wire.auth import AuthType, Method, Secret, ServerSecret
from pooler.wire.frames import AUTH_BYTES_MAX, FrameReader
from pooler.wire.startup import StartupAsked


@dataclass(frozen=True, slots=True)
class GateRules:
    """What is asked of clients.

    `find_user` gives the stored secret of (user, database), None for a user that does not exist. `mock_key`
    is a secret that all workers share, so that each gives an unknown user the same salt. `unknown_method`:
    see choose_method.
    """

    auth_type: AuthType
    find_user: Callable[[str, str], Awaitable[Secret | None]]
    mock_key: bytes = field(repr=False)
    unknown_method: Method = Method.SCRAM
    auth_bytes_max: int = AUTH_BYTES_MAX
    derived: dict[str, tuple[Secret, scram.Verifier]] = field(default_factory=dict, repr=False)  # a memo


async def send(sock: RawSocket, data: bytes) -> None:
    """Send to a client. Raises PeerGone where it has left."""
    try:
        await sock.send_all(data)
    except Broken as broken:
        raise PeerGone(str(broken)) from broken


class Gate:
    """One client's proof. Every failure costs exactly one key derivation, whatever the reason for it, so that
    time does not tell an unknown user from a wrong password."""

    def __init__(
        self, sock: RawSocket, rules: GateRules, asked: StartupAsked, address: PeerAddress, received: bytes
    ) -> None:
        self._sock = sock
        self._reader = FrameReader(limit_bytes=rules.auth_bytes_max, allowed=b"pX")
        self._reader.feed(received)
        self._rules = rules
        self._asked = asked
        self._user = asked.user
        self._address = address
        self._has_derived = False

    def leftover(self) -> bytes:
        """What came after the last login message."""
        return self._reader.take_rest()

    async def prove(self) -> tuple[bytes, ServerSecret]:
        """What the client is owed at the greeting, and what its login lets us say to a server. Raises
        LoginRefused, ProtocolViolation, PeerGone."""
        secret = await self._rules.find_user(self._user, self._asked.database)
        method = auth.choose_method(self._rules.auth_type, secret, self._rules.unknown_method)
        if method is Method.TRUST:
            await send(self._sock, messages.AUTHENTICATION_OK)
            if secret is None:
                raise LoginRefused(f'role "{self._user}" does not exist')
            return b"", ServerSecret.of(secret)
        checks = {Method.CLEARTEXT: self._cleartext, Method.MD5: self._md5, Method.SCRAM: self._scram}
        proven = await checks[method](secret)
        if proven is None:
            if not self._has_derived:
                await self._derive(b"", scram.mock_salt(self._rules.mock_key, self._user))
            raise LoginRefused(
                f'password authentication failed for user "{self._user}"', sqlstate.INVALID_PASSWORD)
        last_words, server_secret = proven
        return last_words + messages.AUTHENTICATION_OK, server_secret

    async def _cleartext(self, secret: Secret | None) -> tuple[bytes, ServerSecret] | None:
        await send(self._sock, messages.AUTHENTICATION_CLEARTEXT)
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
        await send(self._sock, messages.authentication_md5(salt))
        answer = await self._take_string()
        fits = auth.check_md5(secret, self._user, salt, answer)
        return (b"", ServerSecret.of(secret)) if fits else None

    async def _scram(self, secret: Secret | None) -> tuple[bytes, ServerSecret] | None:
        await send(self._sock, messages.authentication_sasl([scram.MECHANISM]))
        shown = scram.mock_verifier(self._rules.mock_key, self._user)
        if secret is not None and secret.scram is not None:
            shown = secret.scram
        nonce = b64encode(secrets.token_bytes(18)).decode()
        exchange = scram.ServerExchange(nonce=nonce, salt=shown.salt, iterations=shown.iterations)
        challenge = exchange.first(_read_sasl_initial(await self._take_body()))
        await send(self._sock, messages.authentication_sasl_continue(challenge))
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
        known = self._rules.derived.get(self._user)
        if known is not None and known[0] == secret:
            return known[1]
        verifier = await self._derive(plain, salt)
        self._rules.derived[self._user] = (secret, verifier)
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
