"""A login against a scripted client: every question, every refusal, and nothing said too early."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pooler.errors import LoginRefused, PoolerError, ProtocolViolation
from pooler.net.gate import GateRules
from pooler.net.handshake import HandshakeFailed
from pooler.net.login import Door, LoggedIn, ProxyRule, Welcome, greet, login, refuse
from pooler.net.proxy_protocol import PeerAddress
from pooler.net.stream import PeerGone, RawSocket
from pooler.wire import messages, scram
from pooler.wire.auth import AuthType, Method, Secret, md5_answer, md5_secret
from pooler.wire.scram import ClientExchange, Keys, Verifier
from pooler.wire.startup import CancelAsked, Replication
from tests.net.wires import Peer, connected, tcp_pair

VERIFIER = Verifier.derive(b"pw", b"saltsaltsalt")
USERS = {
    "plain": Secret(plain=b"pw"),
    "md5": Secret(md5=md5_secret(b"pw", "md5")),
    "scram": Secret(scram=VERIFIER),
    "empty": Secret(plain=b""),
    "admin": Secret(plain=b"pw"),
}
HERE = PeerAddress("127.0.0.1", 1)


async def find_user(user: str, _database: str) -> Secret | None:
    return USERS.get(user)


DOOR = Door(
    gate=GateRules(auth_type=AuthType.SCRAM, find_user=find_user, mock_key=b"mock"),
    database_exists=lambda name: name == "db", console_users=frozenset({"admin"}))


def door_with(**rules: Any) -> Door:
    """DOOR with other rules of its gate."""
    return replace(DOOR, gate=replace(DOOR.gate, **rules))


class Verdict:
    """What a login came to."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = trio.Event()

    async def run(self, raw: RawSocket, door: Door) -> None:
        try:
            self.value = await login(raw, door, HERE)
        except (PoolerError, PeerGone, HandshakeFailed) as error:
            self.error = error
        self.done.set()

    async def logged_in(self) -> LoggedIn:
        await self.done.wait()
        assert self.error is None, self.error
        assert isinstance(self.value, LoggedIn)
        return self.value

    async def failed(self, kind: type[BaseException], code: str | None = None) -> BaseException:
        await self.done.wait()
        assert isinstance(self.error, kind), (self.value, self.error)
        assert code is None or getattr(self.error, "code", None) == code
        return self.error


@asynccontextmanager
async def client_at(door: Door) -> AsyncIterator[tuple[Peer, Verdict]]:
    verdict = Verdict()
    with connected() as (raw, peer):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(verdict.run, raw, door)
            yield peer, verdict
            nursery.cancel_scope.cancel()


def hello(user: str, database: str = "db", **more: str) -> bytes:
    return messages.startup({"user": user, "database": database, **more})


async def answer_scram(peer: Peer, password: bytes) -> None:
    assert await peer.frame() == (b"R", b"\0\0\0\x0aSCRAM-SHA-256\0\0")
    exchange = ClientExchange(nonce="clientnonce")
    await peer.send(messages.sasl_initial_response(scram.MECHANISM, exchange.first()))
    salt, rounds = exchange.challenge((await peer.frame()).body[4:])
    keys = Keys.from_salted(scram.salted_password(password, salt, rounds))
    await peer.send(messages.sasl_response(exchange.final(keys)))


async def answer_md5(peer: Peer, password: bytes, user: str = "md5") -> None:
    body = (await peer.frame()).body
    assert body[:4] == b"\0\0\0\x05"
    await peer.send(messages.password(md5_answer(md5_secret(password, user), body[4:])))


async def answer_cleartext(peer: Peer, password: bytes) -> None:
    assert await peer.frame() == (b"R", b"\0\0\0\x03")
    await peer.send(messages.password(password))


Answer = Callable[[Peer, bytes], Awaitable[None]]
WAYS: list[tuple[AuthType, str, Answer]] = [
    (AuthType.SCRAM, "scram", answer_scram),
    (AuthType.SCRAM, "plain", answer_scram),
    (AuthType.MD5, "scram", answer_scram),
    (AuthType.MD5, "md5", answer_md5),
    (AuthType.PASSWORD, "plain", answer_cleartext),
    (AuthType.PASSWORD, "md5", answer_cleartext),
    (AuthType.PASSWORD, "scram", answer_cleartext),
]


@pytest.mark.parametrize(("kind", "user", "answer"), WAYS)
async def test_the_right_password_logs_in_and_is_owed_its_ok(
    kind: AuthType, user: str, answer: Answer
) -> None:
    async with client_at(door_with(auth_type=kind)) as (peer, verdict):
        await peer.send(hello(user, application_name="app", options="-c a=b"))
        await answer(peer, b"pw")
        got = await verdict.logged_in()
        assert (got.user, got.database, got.address, got.console) == (user, "db", HERE, False)
        assert (got.parameters, got.options) == ({"application_name": "app"}, "-c a=b")
        assert got.owed.endswith(messages.AUTHENTICATION_OK)
        assert peer.reader.buffered == 0


@pytest.mark.parametrize(("kind", "user", "answer"), WAYS)
async def test_a_wrong_password_is_refused_by_name_only(kind: AuthType, user: str, answer: Answer) -> None:
    async with client_at(door_with(auth_type=kind)) as (peer, verdict):
        await peer.send(hello(user))
        await answer(peer, b"wrong")
        error = await verdict.failed(LoginRefused, "28P01")
        assert str(error) == f'password authentication failed for user "{user}"'


@pytest.mark.parametrize(("door", "answer"), [
    (DOOR, answer_scram),
    (door_with(auth_type=AuthType.MD5, unknown_method=Method.MD5), answer_md5),
    (door_with(auth_type=AuthType.PASSWORD), answer_cleartext),
])
@pytest.mark.parametrize("user", ["nobody", "empty"])
async def test_a_user_that_does_not_exist_fails_as_a_wrong_password_does(
    door: Door, answer: Answer, user: str
) -> None:
    async with client_at(door) as (peer, verdict):
        await peer.send(hello(user, "no such database"))
        await answer(peer, b"")
        error = await verdict.failed(LoginRefused, "28P01")
        assert str(error) == f'password authentication failed for user "{user}"'


@pytest.mark.parametrize(("kind", "user", "answer"), [
    *WAYS, (AuthType.SCRAM, "nobody", answer_scram), (AuthType.PASSWORD, "nobody", answer_cleartext),
    (AuthType.SCRAM, "md5", answer_scram)])
async def test_every_failure_costs_one_derivation_of_a_key(
    kind: AuthType, user: str, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent: list[str] = []
    real = Keys.derive

    def counted(password: bytes, salt: bytes, iterations: int) -> Keys:
        spent.append("derived")
        return real(password, salt, iterations)

    monkeypatch.setattr(Keys, "derive", counted)
    door = door_with(auth_type=kind, derived={})
    for _ in range(2):  # a plain password's key is remembered: the second failure must cost the same
        spent.clear()
        async with client_at(door) as (peer, verdict):
            await peer.send(hello(user))
            await answer(peer, b"wrong")
            await verdict.failed(LoginRefused, "28P01")
        assert spent == ["derived"]


async def test_an_unknown_user_sees_the_same_salt_every_time_and_another_nonce() -> None:
    seen = []
    for _ in range(2):
        async with client_at(DOOR) as (peer, _):
            await peer.send(hello("nobody"))
            await peer.frame()
            await peer.send(messages.sasl_initial_response("SCRAM-SHA-256", b"n,,n=,r=abc"))
            nonce, salt, rounds = (await peer.frame()).body[4:].split(b",")
            seen.append((nonce, salt, rounds))
    assert seen[0][1:] == seen[1][1:]
    assert seen[0][0] != seen[1][0]


async def test_a_clients_proof_gives_what_logs_in_to_the_server() -> None:
    async with client_at(DOOR) as (peer, verdict):
        await peer.send(hello("scram"))
        await answer_scram(peer, b"pw")
        secret = (await verdict.logged_in()).secret
        assert secret.keys is not None
        assert hashlib.sha256(secret.keys.client_key).digest() == VERIFIER.stored_key
        assert secret.plain is None
    async with client_at(door_with(auth_type=AuthType.PASSWORD)) as (peer, verdict):
        await peer.send(hello("scram"))
        await answer_cleartext(peer, b"pw")
        got = await verdict.logged_in()
        assert got.secret.plain == b"pw"
        assert "pw" not in repr(got)


@pytest.mark.parametrize("size", [1, 999, 1024, 4097, 16_000, 60_000])
async def test_long_passwords_log_in(size: int) -> None:
    password = b"x" * size

    async def find(_user: str, _database: str) -> Secret | None:
        return Secret(plain=password)

    for kind, answer in ((AuthType.PASSWORD, answer_cleartext), (AuthType.SCRAM, answer_scram)):
        async with client_at(door_with(auth_type=kind, find_user=find, derived={})) as (peer, verdict):
            await peer.send(hello("token"))
            await answer(peer, password)
            await verdict.logged_in()


async def test_a_database_is_missing_only_for_who_is_let_in() -> None:
    async with client_at(DOOR) as (peer, verdict):
        await peer.send(hello("scram", "gone"))
        await answer_scram(peer, b"pw")
        await verdict.failed(LoginRefused, "3D000")


@pytest.mark.parametrize(("user", "allowed"), [("admin", True), ("plain", False)])
async def test_the_console_is_for_its_users(user: str, allowed: bool) -> None:
    async with client_at(DOOR) as (peer, verdict):
        await peer.send(hello(user, "pgbouncer"))
        await answer_scram(peer, b"pw")
        if allowed:
            assert (await verdict.logged_in()).console
        else:
            await verdict.failed(LoginRefused, "28000")


async def test_trust_says_ok_at_once_and_still_wants_a_known_user() -> None:
    door = door_with(auth_type=AuthType.TRUST)
    for user in ("plain", "nobody"):
        async with client_at(door) as (peer, verdict):
            await peer.send(hello(user))
            assert await peer.frame() == (b"R", bytes(4))
            if user == "plain":
                assert (await verdict.logged_in()).owed == b""
            else:
                await verdict.failed(LoginRefused, "28000")


async def test_one_byte_at_a_time_and_what_follows_is_kept() -> None:
    async with client_at(door_with(auth_type=AuthType.PASSWORD)) as (peer, verdict):
        for packet, reply in ((messages.GSSENC_REQUEST, b"N"), (messages.SSL_REQUEST, b"N"),
                              (hello("plain", replication="database"), messages.AUTHENTICATION_CLEARTEXT)):
            for byte in packet:
                await peer.send(bytes([byte]))
                await trio.testing.wait_all_tasks_blocked()
            assert await peer.read(len(reply)) == reply
        await peer.send(messages.password(b"pw") + messages.query("SELECT 1"))
        got = await verdict.logged_in()
        assert got.leftover == messages.query("SELECT 1")
        assert got.replication is Replication.LOGICAL


@pytest.mark.parametrize("packet", [messages.SSL_REQUEST, messages.GSSENC_REQUEST])
async def test_bytes_stuffed_behind_an_encryption_request_are_refused(packet: bytes) -> None:
    async with client_at(DOOR) as (peer, verdict):
        await peer.send(packet + hello("plain"))
        await verdict.failed(ProtocolViolation)
    async with client_at(DOOR) as (peer, verdict):
        await peer.send(packet)
        assert await peer.read(1) == b"N"
        await peer.send(packet)
        await verdict.failed(ProtocolViolation)


@pytest.mark.parametrize("more", [b"", b"X", b"noise" * 200])
async def test_a_cancel_is_taken_whatever_follows_it(more: bytes) -> None:
    async with client_at(DOOR) as (peer, verdict):
        await peer.send(messages.cancel_request(b"12345678") + more)
        await verdict.done.wait()
        assert verdict.value == CancelAsked(b"12345678")


@pytest.mark.parametrize("minor", [3, 9999])
async def test_a_newer_protocol_is_negotiated_before_the_login(minor: int) -> None:
    async with client_at(door_with(auth_type=AuthType.PASSWORD)) as (peer, verdict):
        await peer.send(messages.startup({"user": "plain", "database": "db", "_pq_.foo": "1"}, minor=minor))
        assert await peer.frame() == (b"v", b"\0\x03\0\x02\0\0\0\x01_pq_.foo\0")
        await answer_cleartext(peer, b"pw")
        assert (await verdict.logged_in()).protocol_minor == 2


@pytest.mark.parametrize("data", [
    b"", messages.SSL_REQUEST, messages.SSL_REQUEST[:3], hello("scram"), hello("scram") + b"p\0\0",
    hello("scram") + messages.TERMINATE])
async def test_who_leaves_before_saying_a_password_is_no_fault(data: bytes) -> None:
    async with client_at(DOOR) as (peer, verdict):
        await peer.send(data)
        await wait_all_tasks_blocked()
        if not data.endswith(messages.TERMINATE):
            await peer.stream.send_eof()
        await verdict.failed(PeerGone)


SASL = b"SCRAM-SHA-256\0"


@pytest.mark.parametrize("data", [
    messages.query("SELECT 1"),
    b"p\0\x01\x10\0",
    b"p\0\0\0\x03",
    messages.message(b"p", b""),
    messages.message(b"p", SASL),
    messages.message(b"p", SASL + b"\xff\xff\xff\xff"),
    messages.message(b"p", SASL + b"\x7f\xff\xff\xffn,,n=,r=a"),
    messages.message(b"p", SASL + b"\0\0\0\x02n,,n=,r=a"),
    messages.message(b"p", b"\0\0\0\0\0"),
    messages.message(b"p", b"SCRAM-SHA-256-PLUS\0\0\0\0\x0an,,n=,r=a"),
    messages.sasl_initial_response("SCRAM-SHA-256", b"n,,n=,r=" + b"a" * 65_000),
])
async def test_a_malformed_answer_is_a_violation(data: bytes) -> None:
    async with client_at(DOOR) as (peer, verdict):
        await peer.send(hello("scram"))
        await peer.frame()
        await peer.send(data)
        await verdict.failed(ProtocolViolation)


@pytest.mark.parametrize("body", [b"pw", b"pw\0x", b"p\0w\0", b""])
async def test_a_password_packet_of_the_wrong_size_is_a_violation(body: bytes) -> None:
    async with client_at(door_with(auth_type=AuthType.PASSWORD)) as (peer, verdict):
        await peer.send(hello("plain"))
        await peer.frame()
        await peer.send(messages.message(b"p", body))
        await verdict.failed(ProtocolViolation)


async def test_a_proxy_header_gives_the_address_where_it_is_required() -> None:
    door = replace(door_with(auth_type=AuthType.TRUST), proxy=ProxyRule.REQUIRED)
    for header, address in ((b"PROXY TCP4 192.0.2.1 192.0.2.2 77 88\r\n", PeerAddress("192.0.2.1", 77)),
                            (b"PROXY UNKNOWN\r\n", HERE)):
        async with client_at(door) as (peer, verdict):
            await peer.send(header + hello("plain"))
            assert (await verdict.logged_in()).address == address
    async with client_at(door) as (peer, verdict):
        await peer.send(hello("plain"))
        assert "is expected" in str(await verdict.failed(ProtocolViolation))


async def test_a_proxy_header_is_refused_where_nobody_may_send_one() -> None:
    async with client_at(DOOR) as (peer, verdict):
        await peer.send(b"PROXY TCP4 192.0.2.1 192.0.2.2 77 88\r\n" + hello("plain"))
        assert "is not expected" in str(await verdict.failed(ProtocolViolation))


async def test_the_greeting_is_whole_and_in_order() -> None:
    with connected() as (raw, peer):
        await greet(raw, Welcome(messages.AUTHENTICATION_OK, [(b"a", b"1"), (b"b", b"2")], b"12345678"))
        raw.close()
        frames = [await peer.frame() for _ in range(5)]
        assert [frame.kind for frame in frames] == [b"R", b"S", b"S", b"K", b"Z"]
        assert (frames[1].body, frames[3].body, frames[4].body) == (b"a\x001\0", b"12345678", b"I")
        assert await peer.at_end()


@pytest.mark.parametrize(("error", "code"), [
    (LoginRefused("no", "3D000"), "3D000"), (ProtocolViolation("bad"), "08P01")])
async def test_a_refusal_is_heard_by_who_still_sends(error: PoolerError, code: str) -> None:
    with connected(tcp_pair) as (raw, peer):
        await peer.send(b"unread" * 100)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refuse, raw, error)
            fault = messages.read_fault((await peer.frame()).body)
            assert (fault.severity, fault.code, fault.message) == ("FATAL", code, str(error))
            assert await peer.at_end()
            peer.stream.socket.close()
        with pytest.raises(trio.ClosedResourceError):
            raw.release()


async def test_who_does_not_hang_up_after_a_refusal_is_closed(autojump_clock: trio.testing.MockClock) -> None:
    with connected() as (raw, _):
        await refuse(raw, ProtocolViolation("bad"))
        with pytest.raises(trio.ClosedResourceError):
            raw.release()
