"""Our half of a server's authentication: bound to an encrypted connection, or saying that it could be."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
import trio

from pooler.errors import LoginRefused
from pooler.net.gate import Gate, GateRules, Proven
from pooler.net.proxy_protocol import PeerAddress
from pooler.net.server_auth import NO_ANSWER, CannotAnswer, authenticate
from pooler.net.stream import RawSocket
from pooler.net.tls import TlsFacts
from pooler.wire.auth import AuthType, Secret, ServerSecret, md5_secret
from pooler.wire.frames import Frame, FrameReader
from pooler.wire.scram import Keys, Verifier, salted_password
from pooler.wire.startup import Replication, StartupAsked

SALT = b"saltsaltsalt"
SECRETS = {
    AuthType.PASSWORD: Secret(plain=b"pw"),
    AuthType.MD5: Secret(md5=md5_secret(b"pw", "ann")),
    AuthType.SCRAM: Secret(scram=Verifier.derive(b"pw", SALT)),
}
PLAIN = ServerSecret(plain=b"pw")
HASHED = ServerSecret(md5=md5_secret(b"pw", "ann"))
KEYS = ServerSecret(keys=Keys.from_salted(salted_password(b"pw", SALT, 4096)))
FACTS = TlsFacts("", "", bytes(32), "TLSv1.3", "x")


def facts(end_point: bytes) -> TlsFacts:
    return replace(FACTS, server_end_point=end_point)


async def log_in(
    secret: ServerSecret, kind: AuthType, server: TlsFacts | None = None, ours: TlsFacts | None = None
) -> tuple[Proven | None, Exception | None]:
    """What a server of that kind says, and what our half raised."""
    async def find(*_: str) -> Secret | None:
        return SECRETS[kind]

    one, other = socket.socketpair()
    theirs, mine = RawSocket(one), RawSocket(other)
    theirs.tls, mine.tls = server, ours
    asked = StartupAsked("ann", "db", 0, {}, "", Replication.NONE, (), False)
    gate = Gate(theirs, GateRules(kind, find, b"mock"), asked, PeerAddress("unix", 0), b"")
    reader, proven = FrameReader(), None
    failure: Exception | None = None

    async def next_frame(sock: RawSocket) -> Frame:
        while (frame := reader.next()) is None:
            reader.feed(await sock.recv_some())
        return frame

    async def answer() -> None:
        nonlocal failure
        try:
            await authenticate(mine, next_frame, user="ann", secret=secret)
        except CannotAnswer as fault:
            failure = fault
            nursery.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            proven = await gate.prove()
            await theirs.send_all(proven.owed)
    except* LoginRefused as refused:
        failure = refused.exceptions[0]
    finally:
        theirs.close()
        mine.close()
    return proven, failure


@pytest.mark.parametrize(("kind", "secret"), [
    (AuthType.PASSWORD, PLAIN), (AuthType.MD5, PLAIN), (AuthType.MD5, HASHED),
    (AuthType.SCRAM, PLAIN), (AuthType.SCRAM, KEYS)])
async def test_what_is_held_logs_in_wherever_it_can(kind: AuthType, secret: ServerSecret) -> None:
    proven, failure = await log_in(secret, kind)
    assert failure is None
    assert proven is not None


@pytest.mark.parametrize(("kind", "secret", "what", "held", "cure"), [
    (AuthType.PASSWORD, HASHED, "the password", "the md5 secret", "store its plain password"),
    (AuthType.PASSWORD, KEYS, "the password", "the SCRAM keys", "store its plain password"),
    (AuthType.MD5, KEYS, "an MD5 password", "the SCRAM keys", "store its plain password"),
    (AuthType.SCRAM, HASHED, "a SCRAM-SHA-256 proof", "the md5 secret", "the very SCRAM secret"),
    (AuthType.SCRAM, ServerSecret(), "a SCRAM-SHA-256 proof", "nothing", "store its plain password")])
async def test_what_is_not_held_is_said_with_the_reason_and_the_cure_and_no_password_is_guessed(
    kind: AuthType, secret: ServerSecret, what: str, held: str, cure: str
) -> None:
    _, failure = await log_in(secret, kind)
    assert isinstance(failure, CannotAnswer)
    assert f'server asks for {what} of user "ann": {held} held of it {NO_ANSWER}; ' in str(failure)
    assert cure in str(failure)


@pytest.mark.parametrize("secret", [PLAIN, KEYS])
async def test_over_one_encrypted_connection_the_proof_is_bound_to_it(secret: ServerSecret) -> None:
    proven, failure = await log_in(secret, AuthType.SCRAM, FACTS, FACTS)
    assert failure is None
    assert proven is not None


async def test_a_proof_for_another_connection_is_refused() -> None:
    _, failure = await log_in(PLAIN, AuthType.SCRAM, facts(b"\1" * 32), FACTS)
    assert isinstance(failure, LoginRefused)
    assert "channel binding check failed" in str(failure)


async def test_a_server_that_cannot_bind_is_told_that_we_could_and_lets_us_in() -> None:
    proven, failure = await log_in(PLAIN, AuthType.SCRAM, None, FACTS)
    assert failure is None
    assert proven is not None
