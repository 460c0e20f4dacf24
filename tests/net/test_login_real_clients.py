"""Real clients at our door: libpq by every method, and HAProxy with its health check and PROXY header."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
import pytest
import trio

from pooler.demo.process import free_ports
from pooler.errors import PoolerError
from pooler.net.gate import GateRules
from pooler.net.handshake import HandshakeFailed
from pooler.net.listener import Acceptor
from pooler.net.login import Door, LoggedIn, ProxyRule, Welcome, greet, login, refuse
from pooler.net.proxy_protocol import PeerAddress
from pooler.net.stream import PeerGone, RawSocket
from pooler.net.tls import TlsFacts
from pooler.wire.auth import AuthType, Secret, md5_secret
from pooler.wire.cancel_keys import RANDOM_BYTES, make_key
from pooler.wire.scram import Verifier
from pooler.wire.startup import CancelAsked
from tests.support.proxies import RunHAProxy

USERS = {
    "plain": Secret(plain="pässword".encode()),
    "md5": Secret(md5=md5_secret("pässword".encode(), "md5")),
    "scram": Secret(scram=Verifier.derive("pässword".encode(), b"saltsaltsalt")),
}


async def find_user(user: str, _database: str) -> Secret | None:
    return USERS.get(user)


PARAMETERS = [(b"server_version", b"18.1"), (b"client_encoding", b"UTF8")]
DOOR = Door(GateRules(AuthType.SCRAM, find_user, b"mock"), lambda name: name == "db")


def door_with(**rules: Any) -> Door:
    """DOOR with other rules of its gate."""
    return replace(DOOR, gate=replace(DOOR.gate, **rules))



@dataclass
class Reception:
    """Lets clients in, says that there is no session when they ask for one, and remembers who came."""

    door: Door
    seen: list[LoggedIn] = field(default_factory=list)
    encrypted: list[TlsFacts | None] = field(default_factory=list)
    cancels: list[bytes] = field(default_factory=list)
    gone: int = 0
    changed: trio.Event = field(default_factory=trio.Event)

    async def handle(self, raw: RawSocket, peer: PeerAddress) -> None:
        try:
            await self._serve(raw, peer)
        except PoolerError as error:
            await refuse(raw, error)
        except (PeerGone, HandshakeFailed):
            self.gone += 1
        finally:
            raw.close()
            self.changed.set()

    async def _serve(self, raw: RawSocket, peer: PeerAddress) -> None:
        got = await login(raw, self.door, peer)
        if isinstance(got, CancelAsked):
            self.cancels.append(got.key)
            return
        self.encrypted.append(raw.tls)
        self.seen.append(got)
        key = make_key(3, bytes(RANDOM_BYTES), protocol_minor=got.protocol_minor)
        await greet(raw, Welcome(got.owed, PARAMETERS, key))
        await raw.recv_some()


@asynccontextmanager
async def reception(door: Door) -> AsyncIterator[tuple[Reception, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    host = Reception(door)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Acceptor([listener], host.handle, in_flight_max=100).run)
        yield host, listener.getsockname()[1]
        nursery.cancel_scope.cancel()


def connect(port: int, user: str, **more: str) -> tuple[int, str]:
    """The process id and the server version that libpq understood."""
    wanted = {"host": "127.0.0.1", "port": str(port), "user": user, "password": "pässword", "dbname": "db",
              "connect_timeout": "10", **more}
    with psycopg.connect(psycopg.conninfo.make_conninfo(**wanted)) as connection:
        return connection.info.backend_pid, connection.info.parameter_status("server_version") or ""


async def connect_in_thread(port: int, user: str, **more: str) -> tuple[int, str]:
    return await trio.to_thread.run_sync(lambda: connect(port, user, **more))


@pytest.mark.parametrize(("kind", "user"), [
    (AuthType.TRUST, "plain"), (AuthType.PASSWORD, "plain"), (AuthType.PASSWORD, "md5"),
    (AuthType.PASSWORD, "scram"), (AuthType.MD5, "plain"), (AuthType.MD5, "md5"), (AuthType.MD5, "scram"),
    (AuthType.SCRAM, "plain"), (AuthType.SCRAM, "scram")])
@pytest.mark.parametrize("encryption", ["disable", "prefer"])
async def test_libpq_logs_in_by_every_method(kind: AuthType, user: str, encryption: str) -> None:
    async with reception(door_with(auth_type=kind)) as (host, port):
        got = await connect_in_thread(port, user, sslmode=encryption, options="-c geqo=off")
        assert got == (1 << 30 | 3 << 15, "18.1")
        assert (host.seen[0].user, host.seen[0].options) == (user, "-c geqo=off")


@pytest.mark.parametrize("kind", [AuthType.PASSWORD, AuthType.MD5, AuthType.SCRAM])
@pytest.mark.parametrize("user", ["plain", "md5", "scram", "nobody"])
async def test_libpq_is_told_of_a_wrong_password(kind: AuthType, user: str) -> None:
    async with reception(door_with(auth_type=kind)) as (_, port):
        with pytest.raises(psycopg.OperationalError, match=f'authentication failed for user "{user}"'):
            await connect_in_thread(port, user, password="wrong")


async def test_libpq_is_told_of_a_missing_database_after_its_password() -> None:
    async with reception(DOOR) as (_, port):
        with pytest.raises(psycopg.OperationalError, match='database "gone" does not exist'):
            await connect_in_thread(port, "scram", dbname="gone")
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            await connect_in_thread(port, "scram", dbname="gone", password="wrong")


HAPROXY = """
global
    stats socket {socket}
defaults
    mode tcp
    timeout connect 2s
    timeout client 10s
    timeout server 10s
frontend in
    bind 127.0.0.1:{front}
    default_backend workers
backend workers
    option pgsql-check user checker
    server w 127.0.0.1:{back} check inter 50ms fall 1 rise 1 send-proxy-v2 check-send-proxy
"""


@pytest.mark.haproxy
@pytest.mark.parametrize("kind", [AuthType.TRUST, AuthType.PASSWORD, AuthType.MD5, AuthType.SCRAM])
async def test_haproxys_check_finds_us_up_quietly_and_clients_keep_their_address(
    kind: AuthType, run_haproxy: RunHAProxy, tmp_path: object
) -> None:
    users = {**USERS, "checker": Secret(plain=b"")}

    async def find(user: str, _database: str) -> Secret | None:
        return users.get(user)

    door = replace(door_with(auth_type=kind, find_user=find), proxy=ProxyRule.REQUIRED)
    if kind is AuthType.TRUST:
        door = replace(door, database_exists=lambda name: name in ("db", "checker"))
    async with reception(door) as (host, port):
        front = free_ports()
        configuration = HAPROXY.format(socket=f"{tmp_path}/s", front=front, back=port)
        run_haproxy(configuration, [front])
        with trio.fail_after(10):
            while host.gone < 3:
                host.changed = trio.Event()
                await host.changed.wait()
        await connect_in_thread(front, "plain")
        came = [got for got in host.seen if got.user == "plain"]
        assert came[0].address.host == "127.0.0.1"
        assert came[0].address.port != 0


