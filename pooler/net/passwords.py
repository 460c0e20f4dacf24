"""A client's proof that it knows a password: cleartext, MD5, SCRAM-SHA-256 with and without channel binding.

Every failure costs exactly one key derivation, whatever the reason for it, so that time does not tell an
unknown user from a wrong password. Derivations run in threads.
"""

from __future__ import annotations

import hmac
import os
import secrets
from base64 import b64encode
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from pooler.errors import ProtocolViolation
from pooler.net.stream import Broken, PeerGone, RawSocket
from pooler.net.turns import LOGIN_TURNS
from pooler.wire import auth, messages, scram
from pooler.wire.auth import Method, Secret, ServerSecret
from pooler.wire.frames import FrameReader

DERIVATIONS_AT_ONCE = trio.CapacityLimiter(os.cpu_count() or 1)  # more would only slow each other down


@dataclass(frozen=True, slots=True)
class Proof:
    """A proof that fitted: what is owed to the client before AuthenticationOk, and what it lets us say to a
    server."""

    last_words: bytes = field(default=b"", repr=False)
    secret: ServerSecret = field(default_factory=ServerSecret)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of users' secrets.

    `mock_key` is a secret that all workers share, so that each gives an unknown user the same salt;
    `iterations` are those of a SCRAM exchange for whom no SCRAM secret is stored.
    `ask_again` gives a secret that is newer than the one just found wrong, None if there is none.
    """

    mock_key: bytes = field(repr=False)
    ask_again: Callable[[], Awaitable[Secret | None]]
    derived: dict[str, tuple[Secret, scram.Verifier]] = field(repr=False)
    iterations: int = scram.ITERATIONS_DEFAULT


async def send(sock: RawSocket, data: bytes) -> None:
    """Send to a client. Raises PeerGone where it has left."""
    try:
        await sock.send_all(data)
    except Broken as broken:
        raise PeerGone(str(broken)) from broken


class PasswordDialogue:
    """The questions to one client, and its answers."""

    def __init__(
        self, sock: RawSocket, reader: FrameReader, user: str, known: Known, end_point: bytes
    ) -> None:
        self._sock = sock
        self._reader = reader
        self._user = user
        self._known = known
        self._end_point = end_point
        self._has_derived = False

    async def prove(self, method: Method, secret: Secret | None) -> Proof | None:
        """Ask by this method; None: the proof does not fit. Raises ProtocolViolation, LoginRefused (SCRAM),
        PeerGone."""
        asks = {Method.CLEARTEXT: self._cleartext, Method.MD5: self._md5, Method.SCRAM: self._scram}
        proof = await asks[method](secret)
        if proof is None and not self._has_derived:
            await self._derive(b"", scram.mock_salt(self._known.mock_key, self._user))
        return proof

    async def password(self) -> bytes:
        """A password in clear, for somebody else to judge."""
        await send(self._sock, messages.AUTHENTICATION_CLEARTEXT)
        return await self._take_string()

    async def _cleartext(self, secret: Secret | None) -> Proof | None:
        password = await self.password()
        shown = await self._shown(secret, password)
        if shown is None:
            newer = await self._known.ask_again()
            shown = None if newer is None else await self._shown(newer, password)
        return None if shown is None else Proof(secret=shown)

    async def _shown(self, secret: Secret | None, password: bytes) -> ServerSecret | None:
        """What a cleartext password lets us say, None if it does not fit. Its keys go with it: by them a
        later SCRAM login is known to be by the same password."""
        if secret is None or secret.scram is None:
            fits = auth.check_cleartext(secret, self._user, password)
            return ServerSecret(plain=password) if fits else None
        held = secret.scram
        keys = await self._derive_keys(password, held.salt, held.iterations)
        fits = bool(password) and hmac.compare_digest(keys.stored_key, held.stored_key)
        return ServerSecret(plain=password, keys=keys) if fits else None

    async def _md5(self, secret: Secret | None) -> Proof | None:
        salt = secrets.token_bytes(4)
        await send(self._sock, messages.authentication_md5(salt))
        answer = await self._take_string()
        if auth.check_md5(secret, self._user, salt, answer):
            return Proof(secret=ServerSecret.of(secret))
        newer = await self._known.ask_again()
        if newer is not None and auth.check_md5(newer, self._user, salt, answer):
            return Proof(secret=ServerSecret.of(newer))
        return None

    async def _scram(self, secret: Secret | None) -> Proof | None:
        offered = [scram.MECHANISM_PLUS, scram.MECHANISM] if self._end_point else [scram.MECHANISM]
        await send(self._sock, messages.authentication_sasl(offered))
        shown = scram.mock_verifier(self._known.mock_key, self._user, self._known.iterations)
        if secret is not None and secret.scram is not None:
            shown = secret.scram
        mechanism, client_first = read_sasl_initial(await self._take_body(), offered)
        exchange = scram.ServerExchange(
            nonce=b64encode(secrets.token_bytes(18)).decode(), salt=shown.salt, iterations=shown.iterations,
            end_point=self._end_point, binds=mechanism == scram.MECHANISM_PLUS)
        challenge = exchange.first(client_first)
        await send(self._sock, messages.authentication_sasl_continue(challenge))
        final = await self._take_body()
        verifier = shown
        if secret is not None and secret.plain:
            verifier = await self._verifier_of(secret, secret.plain, shown.salt)
        proven = exchange.final(final, verifier)
        if proven is None:
            await self._known.ask_again()  # for the next login: the salt of this one is spent
            return None
        last_words, keys = proven
        plain = None if secret is None else secret.plain
        return Proof(messages.authentication_sasl_final(last_words), ServerSecret(plain=plain, keys=keys))

    async def _verifier_of(self, secret: Secret, plain: bytes, salt: bytes) -> scram.Verifier:
        known = self._known.derived.get(self._user)
        if known is not None and known[0] == secret:
            return known[1]
        verifier = await self._derive(plain, salt)
        self._known.derived[self._user] = (secret, verifier)
        return verifier

    async def _derive(self, password: bytes, salt: bytes, iterations: int = 0) -> scram.Verifier:
        iterations = iterations or self._known.iterations
        keys = await self._derive_keys(password, salt, iterations)
        return scram.Verifier(salt, iterations, keys.stored_key, keys.server_key)

    async def _derive_keys(self, password: bytes, salt: bytes, iterations: int) -> scram.Keys:
        self._has_derived = True
        return await trio.to_thread.run_sync(
            scram.Keys.derive, password, salt, iterations, abandon_on_cancel=True,
            limiter=DERIVATIONS_AT_ONCE)

    async def _take_body(self) -> bytes:
        while (frame := self._reader.next()) is None:
            self._reader.feed(await self._sock.recv_some())
            await LOGIN_TURNS.take()
        if frame.kind == b"X":
            raise PeerGone("terminated")
        return frame.body

    async def _take_string(self) -> bytes:
        body = await self._take_body()
        if not body or body.find(b"\0") != len(body) - 1:
            raise ProtocolViolation("invalid password packet size")
        return body[:-1]


def read_sasl_initial(body: bytes, offered: list[str]) -> tuple[str, bytes]:
    """The mechanism that a client chose and its first message. Raises ProtocolViolation."""
    mechanism, at = messages.split_cstring(body)
    if mechanism not in [each.encode() for each in offered]:
        raise ProtocolViolation("client selected an invalid SASL authentication mechanism")
    data = body[at + 4 :]
    if len(body) < at + 4 or int.from_bytes(body[at : at + 4], "big") != len(data):
        raise ProtocolViolation("malformed SASL initial response")
    return mechanism.decode(), data
