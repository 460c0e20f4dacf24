"""Clients that encrypt: libpq in each of its modes, and what a client cannot do before it has."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
import trio

from pooler.net.login import LoggedIn, ProxyRule, login
from pooler.net.proxy_protocol import PeerAddress
from pooler.net.tls_context import ClientTls
from pooler.wire import messages
from pooler.wire.auth import AuthType
from pooler.wire.messages import CANCEL_CODE, GSSENC_CODE, SSL_CODE
from tests.net.test_login_real_clients import DOOR, Reception, connect_in_thread, reception
from tests.net.tls_wires import authority, clients, pem
from tests.net.wires import connected
from tests.support.certificates import Authority, Pair

SSL_REQUEST = (8).to_bytes(4, "big") + SSL_CODE.to_bytes(4, "big")
GSS_REQUEST = (8).to_bytes(4, "big") + GSSENC_CODE.to_bytes(4, "big")
CANCEL = (16).to_bytes(4, "big") + CANCEL_CODE.to_bytes(4, "big") + b"12345678"
STARTUP = messages.startup({"user": "plain", "database": "db"})


@asynccontextmanager
async def open_door(tls: ClientTls | None = None, **more: object) -> AsyncIterator[tuple[Reception, int]]:
    async with reception(replace(DOOR, tls=tls or clients(), **more)) as (host, port):  # type: ignore[arg-type]
        yield host, port


def trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority().file)
    return context


Secured = trio.SSLStream[trio.SocketStream]


async def tls_stream(port: int, *, first: bytes = b"", alpn: tuple[str, ...] = ()) -> Secured:
    """A TLS connection, after `first` was sent in clear and answered with one byte."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    if first:
        await stream.send_all(first)
        assert await stream.receive_some(1) == b"S"
    context = trusting()
    if alpn:
        context.set_alpn_protocols(alpn)
    secured = trio.SSLStream(stream, context, server_hostname="db.test", https_compatible=True)
    try:
        await secured.do_handshake()
    except trio.BrokenResourceError:
        await trio.aclose_forcefully(secured)
        raise
    return secured


async def direct_answer(port: int, alpn: tuple[str, ...]) -> bytes:
    """What a startup packet is answered with in direct TLS; nothing where it is not let in."""
    with trio.fail_after(10):
        try:
            secured = await tls_stream(port, alpn=alpn)
        except trio.BrokenResourceError:
            return b""
        try:
            await secured.send_all(STARTUP)
            return bytes(await secured.receive_some())
        except trio.BrokenResourceError:
            return b""
        finally:
            await trio.aclose_forcefully(secured)


async def answer_to(port: int, data: bytes) -> bytes:
    """All that comes back until the other side closes."""
    answer = b""
    with trio.fail_after(10):
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(data)
        try:
            while more := await stream.receive_some():
                answer += more
        except trio.BrokenResourceError:
            pass
        await stream.aclose()
    return answer


@pytest.mark.parametrize("mode", ["prefer", "require", "verify-ca", "verify-full"])
@pytest.mark.parametrize("negotiation", ["postgres", "direct"])
async def test_libpq_encrypts_in_its_modes(mode: str, negotiation: str) -> None:
    if negotiation == "direct" and mode == "prefer":
        return  # libpq: "weak sslmode may not be used with sslnegotiation=direct"
    async with open_door() as (host, port):
        await connect_in_thread(
            port, "scram", sslmode=mode, sslrootcert=str(authority().file), sslnegotiation=negotiation,
            channel_binding="disable")
        assert host.seen[0].user == "scram"
        assert host.encrypted[0] is not None
        assert host.encrypted[0].version == "TLSv1.3"
        assert host.encrypted[0].server_end_point == clients().end_point != b""
        assert host.encrypted[0].common_name == ""


@pytest.mark.parametrize("mode", ["disable", "allow"])
async def test_clear_text_is_served_where_encryption_is_not_required(mode: str) -> None:
    async with open_door(clients(sslmode="allow")) as (host, port):
        await connect_in_thread(port, "scram", sslmode=mode)
        assert host.encrypted == [None]


async def test_clear_text_is_refused_in_postgresqls_words_where_encryption_is_required() -> None:
    async with open_door() as (host, port):
        with pytest.raises(psycopg.OperationalError) as refused:
            await connect_in_thread(port, "scram", sslmode="disable")
        words = 'no pg_hba.conf entry for host "127.0.0.1", user "scram", database "db", no encryption'
        assert f"FATAL:  {words}" in str(refused.value)
        assert b"C28000\0" in await answer_to(port, STARTUP)
        await connect_in_thread(port, "scram", sslmode="allow")  # libpq tries again, encrypted
        assert [each is not None for each in host.encrypted] == [True]


async def test_a_unix_socket_needs_no_encryption_and_is_offered_none() -> None:
    """R78."""
    door = replace(DOOR, tls=clients(), gate=replace(DOOR.gate, auth_type=AuthType.TRUST))
    with connected() as (raw, peer):
        got: list[object] = []

        async def let_in() -> None:
            got.append(await login(raw, door, PeerAddress("unix", 0)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(let_in)
            await peer.send(SSL_REQUEST)
            assert await peer.read(1) == b"N"
            await peer.send(STARTUP)
        assert isinstance(got[0], LoggedIn)
        assert raw.tls is None


async def test_encryption_is_declined_where_it_is_off() -> None:
    """R26."""
    async with reception(DOOR) as (host, port):
        await connect_in_thread(port, "scram", sslmode="prefer")
        with pytest.raises(psycopg.OperationalError, match="server does not support SSL"):
            await connect_in_thread(port, "scram", sslmode="require")
        assert host.encrypted == [None]


def shown(pair: Pair) -> dict[str, str]:
    return {"sslcert": str(pair.cert), "sslkey": str(pair.key)}


@pytest.mark.parametrize("mode", ["verify-ca", "verify-full"])
async def test_only_clients_with_a_certificate_of_the_authority_come_in(mode: str, tmp_path: Path) -> None:
    ours, stranger = authority().user("ann"), Authority(tmp_path / "other").user("ann")
    tls = clients(sslmode=mode, ca_file=pem(authority().file))
    async with open_door(tls) as (host, port):
        await connect_in_thread(port, "scram", sslmode="require", **shown(ours))
        facts = host.encrypted[0]
        assert facts is not None
        assert facts.common_name == "ann"
        assert facts.distinguished_name.startswith("CN=ann,")
        for given in ({"sslcert": "/nowhere"}, shown(stranger)):
            with pytest.raises(psycopg.OperationalError, match=r"certificate required|unknown ca"):
                await connect_in_thread(port, "scram", sslmode="require", **given)
        assert len(host.seen) == 1


async def test_a_certificate_may_be_shown_where_an_authority_is_named_but_need_not() -> None:
    ours = authority().user("bob")
    async with open_door(clients(ca_file=pem(authority().file))) as (host, port):
        await connect_in_thread(port, "scram", sslmode="require", **shown(ours))
        await connect_in_thread(port, "scram", sslmode="require", sslcert="/nowhere")
        assert [each and each.common_name for each in host.encrypted] == ["bob", ""]


async def test_gss_is_declined_and_then_tls_and_the_startup_go_on() -> None:
    """R26."""
    async with open_door() as (host, port):
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(GSS_REQUEST)
        assert await stream.receive_some(1) == b"N"
        await stream.send_all(SSL_REQUEST)
        assert await stream.receive_some(1) == b"S"
        secured = trio.SSLStream(stream, trusting(), server_hostname="db.test", https_compatible=True)
        await secured.send_all(STARTUP)
        assert (await secured.receive_some())[:1] == b"R"
        await secured.aclose()
        assert not host.seen


@pytest.mark.parametrize("alpn", [(), ("http/1.1",), ("h2", "http/1.1")])
async def test_direct_tls_must_name_the_protocol(alpn: tuple[str, ...]) -> None:
    """R26."""
    async with open_door() as (host, port):
        assert await direct_answer(port, alpn) == b""
        assert (await direct_answer(port, ("h2", "postgresql")))[:1] == b"R"
        assert not host.seen


async def test_direct_tls_where_encryption_is_off_is_refused() -> None:
    """R26."""
    async with reception(DOOR) as (host, port):
        assert await direct_answer(port, ("postgresql",)) == b""
        assert not host.seen


@pytest.mark.parametrize("behind", [STARTUP, STARTUP + messages.query("select 1"), b"x", CANCEL])
async def test_clear_text_stuffed_behind_the_request_is_no_part_of_the_session(behind: bytes) -> None:
    """R80: CVE-2021-23222."""
    async with open_door() as (host, port):
        answer = await answer_to(port, SSL_REQUEST + behind)
        assert answer.startswith(b"E")
        assert b"C08P01\0" in answer
        assert b"received unencrypted data after SSL request" in answer
        assert not host.seen
        assert not host.cancels


async def test_clear_text_that_comes_late_behind_the_request_fails_the_handshake() -> None:
    """R80."""
    async with open_door() as (host, port):
        with trio.fail_after(10):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await stream.send_all(SSL_REQUEST)
            assert await stream.receive_some(1) == b"S"
            await stream.send_all(STARTUP)
            answer = b""
            try:
                while more := await stream.receive_some():
                    answer += more
            except trio.BrokenResourceError:
                pass
            await stream.aclose()
        assert answer[:1] in (b"", b"\x15")  # nothing, or an alert
        assert not host.seen


async def test_a_cancel_request_is_taken_in_clear_and_in_tls_though_encryption_is_required() -> None:
    async with open_door() as (host, port):
        assert await answer_to(port, CANCEL) == b""
        assert await answer_to(port, CANCEL + b"X" * 1_000) == b""
        for first, alpn, behind in ((SSL_REQUEST, (), b""), (b"", ("postgresql",), b"X" * 1_000)):
            secured = await tls_stream(port, first=first, alpn=alpn)
            await secured.send_all(CANCEL + behind)
            with trio.fail_after(10):
                assert await secured.receive_some() == b""
            await secured.aclose()
        assert host.cancels == [b"12345678"] * 4


RUBBISH = [b"GET / HTTP/1.0\r\n\r\n", bytes(8), b"\x16\x03\x01\x02\x00" + bytes(600)]


@pytest.mark.parametrize("rubbish", RUBBISH)
async def test_rubbish_is_closed(rubbish: bytes) -> None:
    """R26."""
    async with open_door() as (host, port):
        assert (await answer_to(port, rubbish))[:1] in (b"", b"E", b"\x15")
        assert not host.seen


async def test_tls_comes_behind_a_proxy_header_in_one_segment_or_byte_by_byte() -> None:
    header = b"PROXY TCP4 192.0.2.7 127.0.0.1 5555 6432\r\n"
    async with open_door(proxy=ProxyRule.REQUIRED) as (host, port):
        for pieces in ([header + SSL_REQUEST], [bytes([each]) for each in header + SSL_REQUEST]):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            for piece in pieces:
                await stream.send_all(piece)
            assert await stream.receive_some(1) == b"S"
            secured = trio.SSLStream(stream, trusting(), server_hostname="db.test", https_compatible=True)
            await secured.send_all(CANCEL)
            assert await secured.receive_some() == b""
            await secured.aclose()
        assert len(host.cancels) == 2


async def test_a_handshake_that_is_not_finished_ends_with_its_client() -> None:
    async with open_door() as (host, port):
        for sent in (SSL_REQUEST, SSL_REQUEST[:3], b"\x16\x03\x01"):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(sent)
        with trio.fail_after(10):
            while host.gone < 3:
                host.changed = trio.Event()
                await host.changed.wait()
