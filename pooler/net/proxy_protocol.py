"""The PROXY header, versions 1 and 2, that a load balancer puts in front of a connection.

Source: HAProxy's doc/proxy-protocol.txt. Only a door that requires the header reads it, and only before
anything else. Decides which address the client has; extensions (TLVs) are skipped. Bounded: a header that is
longer than it may be is a violation, not a wait.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from ipaddress import ip_address, ip_network
from typing import NamedTuple

from pooler.errors import ProtocolViolation

SIGNATURE_V2 = b"\r\n\r\n\0\r\nQUIT\n"
V1_BYTES_MAX = 107
V2_BYTES_MAX = 4_096
_PREFIX_V1 = b"PROXY "
_V2_HEADER_BYTES = 16


class PeerAddress(NamedTuple):
    """Where a client is: host is "unix" and port 0 for a unix socket."""

    host: str
    port: int

    @property
    def is_unix(self) -> bool:
        return self.host == "unix"


class ProxyHeader(NamedTuple):
    """What a header says: `source` is None when it speaks for the load balancer itself (LOCAL, UNKNOWN)."""

    source: PeerAddress | None
    size: int


def requires_header(
    peer: PeerAddress, *, at_service: bool, listen_proxy: bool, networks: Sequence[str]
) -> bool:
    """Whether this peer must begin with a header: on a service's port who comes from one of `networks`, on
    the shared port everybody if `listen_proxy`, on a unix socket nobody: who connects is on this host."""
    if peer.is_unix:
        return False
    if not at_service:
        return listen_proxy
    return any(ip_address(peer.host) in ip_network(network) for network in networks)


def begins_like_header(data: bytes | bytearray) -> bool:
    """Whether these first bytes could be a PROXY header and cannot be a PostgreSQL packet."""
    return any(bytes(data[: len(mark)]) == mark for mark in (_PREFIX_V1, SIGNATURE_V2))


def read_proxy_header(buffer: bytes | bytearray) -> ProxyHeader | None:
    """The header at the start of `buffer`, or None when more bytes are needed. Raises ProtocolViolation."""
    start = bytes(buffer[: len(SIGNATURE_V2)])
    if start.startswith(_PREFIX_V1[: len(start)]):
        return _read_v1(bytes(buffer[: V1_BYTES_MAX + 1]))
    if not SIGNATURE_V2.startswith(start):
        raise ProtocolViolation("a PROXY header is expected from this address")
    return _read_v2(buffer)


def _read_v1(head: bytes) -> ProxyHeader | None:
    end = head.find(b"\r\n")
    if end < 0:
        if len(head) >= V1_BYTES_MAX:
            raise ProtocolViolation("a PROXY header without an end")
        return None
    words = head[:end].decode("ascii", "replace").split(" ")
    size = end + 2
    if words[1] == "UNKNOWN":
        return ProxyHeader(None, size)
    if len(words) != 6 or words[1] not in ("TCP4", "TCP6"):
        raise ProtocolViolation("a malformed PROXY header")
    try:
        source, destination = ip_address(words[2]), ip_address(words[3])
    except ValueError:
        raise ProtocolViolation("a PROXY header with a malformed address") from None
    if not source.version == destination.version == int(words[1][3]):
        raise ProtocolViolation("a PROXY header with an address of the wrong family")
    _port(words[5])
    return ProxyHeader(PeerAddress(str(source), _port(words[4])), size)


def _port(word: str) -> int:
    if not (word.isascii() and word.isdigit() and len(word) <= 5 and int(word) <= 65_535):
        raise ProtocolViolation("a PROXY header with a malformed port")
    return int(word)


def _read_v2(buffer: bytes | bytearray) -> ProxyHeader | None:
    if len(buffer) < _V2_HEADER_BYTES:
        return None
    version, family, length = struct.unpack_from("!BBH", buffer, len(SIGNATURE_V2))
    size = _V2_HEADER_BYTES + length
    if version not in (0x20, 0x21) or size > V2_BYTES_MAX:
        raise ProtocolViolation("a malformed PROXY header")
    if len(buffer) < size:
        return None
    if version == 0x20:
        return ProxyHeader(None, size)
    return ProxyHeader(_v2_source(family, bytes(buffer[_V2_HEADER_BYTES:size])), size)


def _v2_source(family: int, body: bytes) -> PeerAddress | None:
    known = {0x11: (4, 12), 0x21: (16, 36), 0x31: (108, 216)}  # stream over IPv4, IPv6, unix
    if family not in known:
        return None
    address_bytes, body_bytes = known[family]
    if len(body) < body_bytes:
        raise ProtocolViolation("a PROXY header that is cut short")
    if family == 0x31:
        return PeerAddress("unix", 0)
    host = socket.inet_ntop(socket.AF_INET if family == 0x11 else socket.AF_INET6, body[:address_bytes])
    (port,) = struct.unpack_from("!H", body, 2 * address_bytes)
    return PeerAddress(host, port)
