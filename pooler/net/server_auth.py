"""Our half of an authentication by a server: trust, cleartext password, MD5, SCRAM-SHA-256 and -PLUS.

Decides nothing about sessions: it answers until AuthenticationOk, or says that it cannot. A cleartext
password is sent only where the plain password is held. Keys and passwords are in no error.
"""

from __future__ import annotations

import secrets
from base64 import b64encode
from collections.abc import Awaitable, Callable

import trio

from pooler.errors import ProtocolViolation
from pooler.net.stream import RawSocket
from pooler.wire import auth, messages, scram
from pooler.wire.auth import ServerSecret
from pooler.wire.frames import Frame

NO_ANSWER = "cannot answer that"  # in each text of CannotAnswer for want of a fitting secret
NextFrame = Callable[[RawSocket], Awaitable[Frame]]


class CannotAnswer(Exception):
    """The server asks for a proof that no stored secret gives, or in a way that is not served."""


async def authenticate(sock: RawSocket, next_frame: NextFrame, *, user: str, secret: ServerSecret) -> None:
    """Answer the server's requests until it says AuthenticationOk.

    Raises CannotAnswer while the server still waits for us, ProtocolViolation, and what `next_frame` raises.
    """
    answers = _Answers(sock, next_frame, user, secret)
    code, extra = await answers.next_request()
    if code != 0:
        await answers.give(code, extra)
        code, _ = await answers.next_request()
    if code != 0:
        raise ProtocolViolation("server asked for another authentication after it had one")


class _Answers:
    """The answers to one server."""

    def __init__(self, sock: RawSocket, next_frame: NextFrame, user: str, secret: ServerSecret) -> None:
        self._sock = sock
        self._next_frame = next_frame
        self._user = user
        self._secret = secret

    async def next_request(self) -> tuple[int, bytes]:
        """The next authentication request: its code and what follows it."""
        while True:
            frame = await self._next_frame(self._sock)
            if frame.kind == b"R" and len(frame.body) >= 4:
                return int.from_bytes(frame.body[:4], "big"), frame.body[4:]
            if frame.kind not in b"vS":
                raise ProtocolViolation(f"server sent message type {frame.kind!r} during authentication")

    async def give(self, code: int, extra: bytes) -> None:
        """Answer one request."""
        if code == 3:
            await self._sock.send_all(messages.password(self._held(self._secret.plain, "the password")))
        elif code == 5 and len(extra) == 4:
            answer = auth.answer_md5(self._secret, self._user, extra)
            await self._sock.send_all(messages.password(self._held(answer, "an MD5 password")))
        elif code == 10:
            await self._scram(extra)
        else:
            raise CannotAnswer(f"server asks for authentication method {code}, which is not served")

    def _held(self, answer: bytes | None, what: str) -> bytes:
        if answer is None:
            raise CannotAnswer(f'server asks for {what} of user "{self._user}": {_why_not(self._secret)}')
        return answer

    async def _scram(self, offered: bytes) -> None:
        if self._secret.keys is None:
            self._held(self._secret.plain, "a SCRAM-SHA-256 proof")
        mechanism, exchange = self._chosen(offered.split(b"\0"))
        await self._sock.send_all(messages.sasl_initial_response(mechanism, exchange.first()))
        salt, iterations = exchange.challenge(await self._sasl_step(11))
        keys = await self._keys(salt, iterations)
        await self._sock.send_all(messages.sasl_response(exchange.final(keys)))
        exchange.finish(await self._sasl_step(12))

    def _chosen(self, offered: list[bytes]) -> tuple[str, scram.ClientExchange]:
        """Bound to the connection where that can be. Where it could be and the server does not offer it, the
        exchange says so: then a server that did offer it notices that somebody between took that away."""
        tls = self._sock.tls
        end_point = b"" if tls is None else tls.server_end_point
        nonce = b64encode(secrets.token_bytes(18)).decode()
        if end_point and scram.MECHANISM_PLUS.encode() in offered:
            return scram.MECHANISM_PLUS, scram.ClientExchange(nonce=nonce, end_point=end_point)
        if scram.MECHANISM.encode() not in offered:
            raise CannotAnswer("server offers no SASL mechanism that is served")
        return scram.MECHANISM, scram.ClientExchange(nonce=nonce, could_bind=bool(end_point))

    async def _keys(self, salt: bytes, iterations: int) -> scram.Keys:
        plain = self._secret.plain
        if plain is None:
            assert self._secret.keys is not None  # _scram looked
            return self._secret.keys
        salted = await trio.to_thread.run_sync(
            scram.salted_password, plain, salt, iterations, abandon_on_cancel=True)
        return scram.Keys.from_salted(salted)

    async def _sasl_step(self, expected: int) -> bytes:
        code, data = await self.next_request()
        if code != expected:
            raise ProtocolViolation("server left the SASL exchange")
        return data


def _why_not(held: ServerSecret) -> str:
    """What is known of the user, why that is no answer, and what would be one."""
    if held.md5 is not None:
        return (f"the md5 secret held of it {NO_ANSWER}; store its plain password instead, or, for a server "
                "that asks for SCRAM-SHA-256, the very SCRAM secret that the server has in pg_authid")
    if held.keys is not None:
        return f"the SCRAM keys held of it {NO_ANSWER}; store its plain password instead"
    return (f"nothing held of it {NO_ANSWER}; store its plain password, or let its clients log in by "
            "SCRAM-SHA-256 with the very secret that the server has in pg_authid")
