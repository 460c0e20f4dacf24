"""What Patroni's REST interface says of its cluster: `GET /cluster`, of any member that answers.

https://patroni.readthedocs.io/en/latest/rest_api.html. An answer is a peer's word: its size, its time and its
form are limited, and what is none of it is as if nothing had been said.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11
import trio

from coordinator.topology import Cluster

ANSWER_SECONDS_MAX = 2.0  # of one member
BODY_BYTES_MAX = 256 * 1024
MEMBERS_MAX = 1_000
NAME_CHARACTERS_MAX = 255
CHUNK_BYTES = 16 * 1024
LEADER_ROLES = frozenset({"leader", "master", "primary"})  # a standby_leader takes no writes


class PatroniFailed(Exception):
    """No member said anything that can be used: which, and why; without anything of the answers."""


@dataclass(frozen=True, slots=True)
class Member:
    """Where one member's REST interface is."""

    host: str
    port: int
    is_tls: bool

    @classmethod
    def parse(cls, url: str) -> Member:
        """Of http(s)://host[:port]. Raises ValueError naming what is wrong, not what else the URL holds."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("not http://host:port or https://host:port")
        if parts.username is not None or parts.path not in ("", "/") or parts.query or parts.fragment:
            raise ValueError("only http(s)://host:port is taken: no login, no path")
        is_tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if is_tls else 8008), is_tls)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Patroni:
    """Asks the members in turn, the one that answered last first."""

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._members = [Member.parse(url) for url in urls]
        self._clock = clock

    async def cluster(self) -> Cluster:
        """Who leads, as one member says. Raises PatroniFailed if none says anything that can be used."""
        faults = []
        for member in tuple(self._members):
            sent = self._clock()
            try:
                with trio.fail_after(ANSWER_SECONDS_MAX):
                    leader = leader_in(await _get_cluster(member))
            except trio.TooSlowError:
                faults.append(f"{member}: no answer within {ANSWER_SECONDS_MAX:g} s")
            except (OSError, trio.BrokenResourceError, h11.ProtocolError, ValueError) as fault:
                faults.append(f"{member}: {_said(fault)}")
            else:
                self._members.remove(member)
                self._members.insert(0, member)
                return Cluster(leader, sent)
        raise PatroniFailed("; ".join(faults) or "no member is configured")


def leader_in(body: bytes) -> str | None:
    """The leader's host:port out of a `/cluster` document; None where the cluster has none.

    Raises ValueError for what is no such document, also for one with two leaders.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("its answer is no JSON") from None
    members = document.get("members") if isinstance(document, dict) else None
    if not isinstance(members, list) or len(members) > MEMBERS_MAX:
        raise ValueError("its answer has no list of members")
    leaders = [each for each in members if isinstance(each, dict) and each.get("role") in LEADER_ROLES]
    if len(leaders) > 1:
        raise ValueError("its answer has more than one leader")
    return _address_of(leaders[0]) if leaders else None


def _address_of(member: Mapping[str, Any]) -> str:
    host, port = member.get("host"), member.get("port")
    if (not isinstance(host, str) or not 0 < len(host) <= NAME_CHARACTERS_MAX
            or not all(each.isalnum() or each in ".-_:" for each in host) or not host.isascii()):
        raise ValueError("its leader has no host name or address")
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 1 << 16:
        raise ValueError("its leader has no port")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _get_cluster(member: Member) -> bytes:
    """The body of a whole answer with status 200. Raises OSError, ValueError, h11.ProtocolError."""
    stream: trio.abc.Stream = await trio.open_tcp_stream(member.host, member.port)
    if member.is_tls:
        stream = trio.SSLStream(stream, ssl.create_default_context(), server_hostname=member.host,
                                https_compatible=True)
    connection = h11.Connection(h11.CLIENT)
    request = h11.Request(method="GET", target="/cluster", headers=[
        ("Host", str(member)), ("Accept", "application/json"), ("Connection", "close")])
    try:
        await stream.send_all(connection.send(request) + connection.send(h11.EndOfMessage()))
        return await _body_of(connection, stream)
    finally:
        await trio.aclose_forcefully(stream)  # what more it would say is not waited for


async def _body_of(connection: h11.Connection, stream: trio.abc.Stream) -> bytes:
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(bytes(await stream.receive_some(CHUNK_BYTES)))
        elif isinstance(event, h11.Response):
            if event.status_code != 200:
                raise ValueError(f"its answer has status {event.status_code}")
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > BODY_BYTES_MAX:
                raise ValueError(f"its answer is longer than {BODY_BYTES_MAX} bytes")
        elif isinstance(event, h11.EndOfMessage):
            return bytes(body)
        elif not isinstance(event, h11.InformationalResponse):
            raise ValueError("its answer ended early")


def _said(fault: Exception) -> str:
    """What went wrong, of ours only: the text of a protocol fault may be the peer's own."""
    if isinstance(fault, h11.ProtocolError):
        return "its answer is no HTTP"
    if isinstance(fault, trio.BrokenResourceError):
        return "the connection broke"
    return " ".join(str(fault).split()) or type(fault).__name__
