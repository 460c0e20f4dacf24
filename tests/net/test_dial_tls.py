"""Logins to servers over TLS: libpq's six modes, what is verified, and what is known when it fails."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import trio

from coordinator.ledger.states import Proof
from pooler.demo.postgres import Server, temporary_directory
from pooler.net.certificate import certificates_in, read_certificate
from pooler.net.dial import DialFailed, Dialled, Outcome, Progress, Target, dial, hang_up
from pooler.net.stream import Broken
from pooler.net.tls_context import ServerTls
from tests.net.servers import GREETING, server_doing, trusting
from tests.net.tls_wires import authority, host, pem, servers
from tests.net.wires import Peer
from tests.support.certificates import TLS_VERSION, Authority, give_tls
from tests.support.postgres import create_server

MODES = ["disable", "allow", "prefer", "require", "verify-ca", "verify-full"]
HBA = [
    "hostnossl all clear_only 127.0.0.1/32 trust", "host all clear_only 127.0.0.1/32 reject",
    "hostssl all tls_only 127.0.0.1/32 trust", "host all tls_only 127.0.0.1/32 reject",
    "hostssl all bycert 127.0.0.1/32 cert", "host all either 127.0.0.1/32 trust",
]


@dataclass(frozen=True, slots=True)
class Place:
    """A server that encrypts."""

    server: Server

    def target(self, user: str, mode: str, **more: object) -> Target:
        target = Target("127.0.0.1", self.server.port, user, "postgres", "pooler:test:m1.1")
        return replace(target, tls=None if mode == "disable" else servers(mode, **more))

    def sessions(self) -> int:
        rows = self.server.execute(
            "SELECT 1 FROM pg_stat_activity WHERE application_name = 'pooler:test:m1.1'")
        return len(rows)


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    base = temporary_directory("tls")
    server = create_server(base / "s", TLS_VERSION, hba=HBA)
    for name in ("clear_only", "tls_only", "bycert", "either"):
        server.execute(f"CREATE ROLE {name} LOGIN")
    give_tls(server, host(), authority())
    yield Place(server)
    server.stop()
    shutil.rmtree(base)


async def opened(target: Target) -> Dialled:
    return await dial(target, connect_timeout_seconds=10)


async def refused(target: Target, progress: Progress | None = None) -> DialFailed:
    with pytest.raises(DialFailed) as failed:
        await dial(target, connect_timeout_seconds=10, progress=progress)
    return failed.value


async def closed(session: Dialled) -> None:
    assert await hang_up(session.sock, timeout_seconds=10) is Proof.EOF


@pytest.mark.postgres
@pytest.mark.parametrize("mode", MODES)
async def test_each_mode_encrypts_where_it_can_and_ends_in_order(place: Place, mode: str) -> None:
    session = await opened(place.target("either", mode))
    assert (session.sock.tls is not None) is (mode not in ("disable", "allow"))
    if session.sock.tls is not None:
        [der] = certificates_in(host().cert.read_text())
        assert session.sock.tls.server_end_point == read_certificate(der).end_point != b""
    await closed(session)


@pytest.mark.postgres
@pytest.mark.parametrize(("user", "mode", "encrypted"), [
    ("clear_only", "prefer", False), ("clear_only", "allow", False), ("clear_only", "disable", False),
    ("tls_only", "allow", True), ("tls_only", "prefer", True), ("tls_only", "require", True)])
async def test_allow_and_prefer_try_the_other_way_and_leave_one_session(
    place: Place, user: str, mode: str, encrypted: bool
) -> None:
    progress = Progress()
    session = await dial(place.target(user, mode), connect_timeout_seconds=10, progress=progress)
    assert progress.startup_sent
    assert (session.sock.tls is not None) is encrypted
    assert place.sessions() == 1
    await closed(session)


@pytest.mark.postgres
@pytest.mark.parametrize(("user", "mode"), [("clear_only", "require"), ("tls_only", "disable")])
async def test_the_other_modes_do_not(place: Place, user: str, mode: str) -> None:
    failed = await refused(place.target(user, mode))
    assert (failed.outcome, failed.code) == (Outcome.ENDED, "28000")
    assert "pg_hba.conf" in str(failed)


@pytest.mark.postgres
async def test_a_wrong_password_is_not_tried_twice(place: Place) -> None:
    place.server.execute("CREATE ROLE ann LOGIN PASSWORD 'right'")
    before = place.server.log.read_text().count('connection received: host=127.0.0.1')
    failed = await refused(place.target("ann", "prefer"))
    assert "nothing held of it" in str(failed)
    assert place.server.log.read_text().count('connection received: host=127.0.0.1') == before + 1


@pytest.mark.postgres
async def test_our_certificate_logs_us_in(place: Place) -> None:
    pair = authority().user("bycert")
    ours = {"cert_file": pem(pair.cert), "key_file": pem(pair.key)}
    await closed(await opened(place.target("bycert", "verify-full", **ours)))
    failed = await refused(place.target("bycert", "verify-full"))
    assert failed.code == "28000"


@pytest.mark.postgres
async def test_what_is_verified_is_what_the_mode_says(place: Place, tmp_path: Path) -> None:
    stranger = pem(Authority(tmp_path).file)
    for mode in ("allow", "prefer", "require"):
        await closed(await opened(place.target("either", mode, ca_file=stranger)))
    for mode in ("verify-ca", "verify-full"):
        failed = await refused(place.target("either", mode, ca_file=stranger))
        assert failed.outcome is Outcome.NEVER_STARTED
        assert "certificate refused" in str(failed)
    elsewhere = replace(place.target("either", "verify-ca"), host="localhost")  # not in the certificate
    await closed(await opened(elsewhere))
    failed = await refused(replace(elsewhere, tls=servers("verify-full")))
    assert failed.outcome is Outcome.NEVER_STARTED
    assert "Hostname mismatch" in str(failed)


@pytest.mark.postgres
async def test_a_session_that_the_server_ends_ends_in_order(place: Place) -> None:
    session = await opened(place.target("either", "require"))
    place.server.execute(f"SELECT pg_terminate_backend({session.pid})")
    words = await session.sock.recv()
    assert b"57P01" in words
    assert await session.sock.recv() == b""
    session.sock.close()


@pytest.mark.postgres
async def test_a_version_that_the_server_has_not_is_a_failed_handshake(place: Place) -> None:
    place.server.execute("ALTER SYSTEM SET ssl_max_protocol_version = 'TLSv1.2'")
    place.server.execute("SELECT pg_reload_conf()")
    try:
        session = await opened(place.target("either", "require"))
        assert session.sock.tls is not None
        assert session.sock.tls.version == "TLSv1.2"
        await closed(session)
        failed = await refused(place.target("either", "require", protocols="tlsv1.3"))
        assert (failed.outcome, "handshake failed" in str(failed)) == (Outcome.NEVER_STARTED, True)
        session = await opened(place.target("either", "prefer", protocols="tlsv1.3"))  # and then in clear
        assert session.sock.tls is None
        await closed(session)
    finally:
        place.server.execute("ALTER SYSTEM RESET ssl_max_protocol_version")
        place.server.execute("SELECT pg_reload_conf()")


# ---- scripted servers


async def declining(peer: Peer) -> None:
    assert (await peer.read_packet())[4:] == b"\x04\xd2\x16\x2f"
    await peer.send(b"N")
    await trusting(peer)


@pytest.mark.parametrize("mode", MODES[2:])
async def test_a_server_without_tls_serves_prefer_on_the_same_connection(mode: str) -> None:
    async with server_doing(declining) as plain:
        target = replace(plain, tls=servers(mode))
        if mode == "prefer":
            session = await opened(target)
            assert session.sock.tls is None
            session.sock.close()
        else:
            failed = await refused(target)
            assert failed.outcome is Outcome.NEVER_STARTED
            assert "does not support TLS" in str(failed)


@pytest.mark.parametrize("answer", [b"S" + b"\0" * 50, b"S" + GREETING, b"X", b"E\0\0\0\x08"])
async def test_words_in_clear_behind_the_answer_are_no_part_of_the_session(answer: bytes) -> None:
    """CVE-2021-23222, the client's half."""
    async def script(peer: Peer) -> None:
        await peer.read_packet()
        await peer.send(answer)
        await peer.stream.receive_some()

    async with server_doing(script) as target:
        failed = await refused(replace(target, tls=servers("require")))
        assert failed.outcome is Outcome.NEVER_STARTED


async def test_a_handshake_that_does_not_end_is_bounded() -> None:
    async def script(peer: Peer) -> None:
        await peer.read_packet()
        await peer.send(b"S")
        await trio.sleep_forever()

    async with server_doing(script) as target:
        with pytest.raises(DialFailed, match=r"no answer within 0.2 s") as failed:
            await dial(replace(target, tls=servers("require")), connect_timeout_seconds=0.2)
        assert failed.value.outcome is Outcome.NEVER_STARTED


@pytest.mark.parametrize(("name", "told"), [("localhost", "localhost"), ("127.0.0.1", None)])
async def test_a_name_is_told_to_the_server_and_an_address_is_not(name: str, told: str | None) -> None:
    heard: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(host().cert, host().key)
    context.sni_callback = lambda _, server_name, __: heard.append(server_name)

    async def script(peer: Peer) -> None:
        await peer.read_packet()
        await peer.send(b"S")
        secured = trio.SSLStream(peer.stream, context, server_side=True, https_compatible=True)
        size = await secured.receive_some(1_000)
        assert size
        await secured.send_all(GREETING)
        await secured.receive_some()

    async with server_doing(script) as target:
        session = await opened(replace(target, host=name, tls=servers("require")))
        assert session.sock.tls is not None
        assert session.pid == 256
        session.sock.abort()
    assert heard == [told]


async def test_a_server_that_leaves_in_the_middle_of_a_message_is_broken_off_unproven() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(host().cert, host().key)

    async def script(peer: Peer) -> None:
        await peer.read_packet()
        await peer.send(b"S")
        secured = trio.SSLStream(peer.stream, context, server_side=True, https_compatible=True)
        await secured.receive_some(1_000)
        await secured.send_all(GREETING[:30])
        await secured.aclose()

    tls: ServerTls = servers("prefer")
    async with server_doing(script) as target:
        failed = await refused(replace(target, tls=tls))
        assert failed.outcome is Outcome.SILENT  # no second attempt: a session may exist
        assert isinstance(failed.__cause__, Broken)
