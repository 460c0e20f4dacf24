"""How a cancel request leaves for another host: marked, encrypted if that host can, so many times at most."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from pooler.errors import FleetUnreachable
from pooler.net.gate import GateRules
from pooler.net.login import Door, ProxyRule, login
from pooler.net.proxy_protocol import PeerAddress
from pooler.net.stream import RawSocket
from pooler.net.tls_context import ClientTls, client_tls
from pooler.serve.cancelling import HOPS_MAX, Cancelling
from pooler.settings import ClientTlsSettings, Settings
from pooler.settings_tls import PemFile
from pooler.wire.auth import AuthType
from pooler.wire.cancel_keys import forwarded, make_key, read_forwarded
from pooler.wire.startup import CancelAsked
from tests.support.certificates import Authority

POLICY = {"path": "p.yaml", "text": "", "database": "a/write"}
ELSEWHERE, HERE = 7, 3
KEY = make_key(ELSEWHERE, bytes(range(34)), protocol_minor=2)
SESSIONS = make_key(ELSEWHERE, bytes(range(34)), protocol_minor=0, process_id=4711)


async def _nobody(*_: Any) -> None:
    return None


class OtherHost:
    """Takes one kind of connection, as a worker's door does, and notes the keys and what was encrypted."""

    def __init__(self, tls: ClientTls | None, proxy: ProxyRule) -> None:
        self.door = Door(GateRules(AuthType.TRUST, _nobody, b"k" * 32), lambda _: False, proxy=proxy, tls=tls)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:{1}".format(*self.socket.getsockname())
        self.taken: list[tuple[bytes, bool]] = []

    async def serve(self) -> None:
        self.socket.setblocking(False)
        while True:
            await trio.lowlevel.wait_readable(self.socket)
            raw = RawSocket(self.socket.accept()[0])
            asked = await login(raw, self.door, PeerAddress("127.0.0.1", 1))
            assert isinstance(asked, CancelAsked)
            self.taken.append((asked.key, raw.tls is not None))
            raw.close()


class Permits:
    """A coordinator that knows where every worker is, or none."""

    ordinal = HERE

    def __init__(self, address: str | None) -> None:
        self.address, self.asked = address, 0

    async def forward_cancel(self, ordinal: int, key: bytes) -> str:
        assert (ordinal, key) == (ELSEWHERE, KEY)
        self.asked += 1
        if self.address is None:
            raise FleetUnreachable("no worker with ordinal 7 can be reached")
        return self.address

    async def offer_cancel(self, key: bytes, *, to_hosts: bool) -> list[str]:
        assert key == SESSIONS
        self.asked += 1
        if self.address is None:
            raise FleetUnreachable("away")
        return [self.address] if to_hosts else []


def settings(listen_proxy: bool = False, **tls: Any) -> Settings:
    made = Settings.from_wire({
        "fleet": {"name": "f", "run_dir": "/nowhere", "listen": ["10.0.0.5:6432"],
                  "listen_proxy": listen_proxy},
        "etcd": {"endpoints": ["127.0.0.1:2379"]},
        "databases": {"a": {"hosts": ["127.0.0.1:5432"], "policy": POLICY}}})
    return made.model_copy(update={"client_tls": ClientTlsSettings(**tls)})


def cancelling(found: Settings, permits: Permits, nursery: trio.Nursery) -> Cancelling:
    registry: Any = SimpleNamespace(settings=found, key_owner=HERE)
    holder: Any = SimpleNamespace(has=lambda key: False)
    stand_in: Any = permits
    return Cancelling(registry, holder, stand_in, nursery)


@pytest.fixture
def tls(tmp_path: Path) -> dict[str, Any]:
    """An encrypting door's settings."""
    pair = Authority(tmp_path / "tls").host("localhost")
    files = {"cert_file": pair.cert, "key_file": pair.key}
    return {"sslmode": "require", **{name: PemFile(path, path.read_text()) for name, path in files.items()}}


@pytest.fixture(params=["clear", "proxied", "encrypted"])
async def ground(
    request: pytest.FixtureRequest, tls: dict[str, Any], nursery: trio.Nursery
) -> AsyncIterator[tuple[OtherHost, Settings]]:
    """Two hosts of the same settings."""
    found = {"clear": settings(), "proxied": settings(listen_proxy=True), "encrypted": settings(**tls)}
    mine = found[request.param]
    proxy = ProxyRule.REQUIRED if mine.fleet.listen_proxy else ProxyRule.FORBIDDEN
    other = OtherHost(client_tls(mine.client_tls), proxy)
    nursery.start_soon(other.serve)
    yield other, mine
    nursery.cancel_scope.cancel()
    other.socket.close()


async def test_it_is_sent_as_that_host_takes_it(
    ground: tuple[OtherHost, Settings], nursery: trio.Nursery
) -> None:
    other, mine = ground
    with trio.fail_after(10):
        await cancelling(mine, Permits(other.address), nursery).take(KEY)
    encrypts = mine.client_tls.sslmode != "disable"
    assert [(read_forwarded(key), tls) for key, tls in other.taken] == [((KEY, 1), encrypts)]


async def test_it_is_passed_on_so_many_times_at_most(
    ground: tuple[OtherHost, Settings], nursery: trio.Nursery
) -> None:
    other, mine = ground
    part = cancelling(mine, Permits(other.address), nursery)
    with trio.fail_after(10):
        for hops in range(HOPS_MAX + 3):
            await part.take(KEY if not hops else forwarded(KEY, hops))
    assert [read_forwarded(key)[1] for key, _ in other.taken] == list(range(1, HOPS_MAX + 1))


async def test_a_peer_is_asked_without_the_coordinator(
    ground: tuple[OtherHost, Settings], nursery: trio.Nursery
) -> None:
    other, mine = ground
    host, _, port = other.address.rpartition(":")
    peers = ((HERE, "127.0.0.1", 1, None), (ELSEWHERE, host, int(port), None))
    mine = mine.model_copy(update={
        "admin": mine.admin.model_copy(update={"show_peers": peers}),
        "fleet": mine.fleet.model_copy(update={"peer_id": HERE})})
    permits = Permits(None)
    with trio.fail_after(10):
        await cancelling(mine, permits, nursery).take(KEY)
    assert [read_forwarded(key) for key, _ in other.taken] == [(KEY, 1)]
    assert not permits.asked


@pytest.mark.parametrize("address", [None, "", "10.0.0.5:6432", "127.0.0.1:1", "nonsense"])
async def test_where_it_cannot_go_nobody_is_told_and_nothing_breaks(
    address: str | None, nursery: trio.Nursery
) -> None:
    permits = Permits(address)
    with trio.fail_after(10):
        await cancelling(settings(), permits, nursery).take(KEY)
    assert permits.asked == 1
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("key", [b"\xff" * 8, b"12345678"[:7], make_key(HERE, bytes(34), protocol_minor=0)])
async def test_a_key_that_no_other_worker_made_asks_nobody(key: bytes, nursery: trio.Nursery) -> None:
    permits = Permits(None)
    await cancelling(settings(), permits, nursery).take(key)
    assert permits.asked == 0


async def test_the_key_of_a_session_goes_to_all_hosts_once_and_from_there_to_none(
    ground: tuple[OtherHost, Settings], nursery: trio.Nursery
) -> None:
    other, mine = ground
    permits = Permits(other.address)
    part = cancelling(mine, permits, nursery)
    with trio.fail_after(10):
        for key in (SESSIONS, forwarded(SESSIONS, 1), forwarded(SESSIONS, 2)):
            await part.take(key)
    assert permits.asked == 3  # there, too, each worker of the host has a look
    assert [read_forwarded(key) for key, _ in other.taken] == [(SESSIONS, 1)]


async def test_the_key_of_a_session_is_offered_to_every_peer(
    ground: tuple[OtherHost, Settings], nursery: trio.Nursery
) -> None:
    other, mine = ground
    host, _, port = other.address.rpartition(":")
    peers = ((HERE, "127.0.0.1", 1, None), (5, host, int(port), None), (6, host, int(port), None))
    mine = mine.model_copy(update={
        "admin": mine.admin.model_copy(update={"show_peers": peers}),
        "fleet": mine.fleet.model_copy(update={"peer_id": HERE})})
    with trio.fail_after(10):
        await cancelling(mine, Permits(None), nursery).take(SESSIONS)
    assert [read_forwarded(key) for key, _ in other.taken] == [(SESSIONS, 1)] * 2


@pytest.mark.parametrize("address", [None, "10.0.0.5:6432", "127.0.0.1:1", "nonsense"])
async def test_a_host_that_cannot_be_reached_with_the_key_of_a_session_breaks_nothing(
    address: str | None, nursery: trio.Nursery
) -> None:
    permits = Permits(address)
    with trio.fail_after(10):
        await cancelling(settings(), permits, nursery).take(SESSIONS)
    assert permits.asked == 1
    nursery.cancel_scope.cancel()
