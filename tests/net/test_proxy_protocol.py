"""PROXY headers of both versions, at every split, and rubbish in their place."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooler.errors import ProtocolViolation
from pooler.net.proxy_protocol import (
    SIGNATURE_V2,
    V2_BYTES_MAX,
    PeerAddress,
    begins_like_header,
    read_proxy_header,
    requires_header,
)
from pooler.wire import messages


def v2(command: int, family: int, body: bytes) -> bytes:
    return SIGNATURE_V2 + struct.pack("!BBH", command, family, len(body)) + body


V4_BODY = socket.inet_aton("192.0.2.1") + socket.inet_aton("192.0.2.9") + struct.pack("!HH", 5555, 6432)
V6_BODY = (socket.inet_pton(socket.AF_INET6, "2001:db8::1") + socket.inet_pton(socket.AF_INET6, "2001:db8::2")
           + struct.pack("!HH", 7777, 6432))

HEADERS = [
    (b"PROXY TCP4 192.0.2.1 192.0.2.9 5555 6432\r\n", PeerAddress("192.0.2.1", 5555)),
    (b"PROXY TCP6 2001:db8::1 2001:db8::2 7777 6432\r\n", PeerAddress("2001:db8::1", 7777)),
    (b"PROXY UNKNOWN\r\n", None),
    (b"PROXY UNKNOWN ffff::1 ffff::2 65535 65535\r\n", None),
    (v2(0x21, 0x11, V4_BODY), PeerAddress("192.0.2.1", 5555)),
    (v2(0x21, 0x11, V4_BODY + b"\x04\0\x02xx"), PeerAddress("192.0.2.1", 5555)),  # with a TLV
    (v2(0x21, 0x21, V6_BODY), PeerAddress("2001:db8::1", 7777)),
    (v2(0x21, 0x31, bytes(216)), PeerAddress("unix", 0)),
    (v2(0x21, 0x00, b""), None),
    (v2(0x20, 0x00, b""), None),  # a health check of the load balancer itself
]


@pytest.mark.parametrize(("header", "source"), HEADERS)
def test_a_header_is_read_at_its_last_byte_and_not_beyond(header: bytes, source: PeerAddress | None) -> None:
    for cut in range(len(header)):
        assert read_proxy_header(header[:cut]) is None
    assert read_proxy_header(header + messages.SSL_REQUEST) == (source, len(header))
    assert begins_like_header(header)


BAD = [
    b"GET / HTTP/1.1\r\n",
    messages.SSL_REQUEST,
    b"PROXY TCP4 192.0.2.1 192.0.2.9 5555 6432" + b" " * 80,
    b"PROXY TCP4 192.0.2.1 192.0.2.9 5555\r\n",
    b"PROXY TCP4 2001:db8::1 2001:db8::2 1 2\r\n",
    b"PROXY TCP6 192.0.2.1 192.0.2.9 1 2\r\n",
    b"PROXY TCP4 host 192.0.2.9 1 2\r\n",
    b"PROXY TCP4 192.0.2.1 192.0.2.9 65536 2\r\n",
    b"PROXY TCP4 192.0.2.1 192.0.2.9 1 -2\r\n",
    b"PROXY UDP4 192.0.2.1 192.0.2.9 1 2\r\n",
    b"PROXY \r\n",
    v2(0x11, 0x11, V4_BODY),
    v2(0x22, 0x11, V4_BODY),
    v2(0x21, 0x11, V4_BODY[:-1]),
    SIGNATURE_V2 + struct.pack("!BBH", 0x21, 0x11, V2_BYTES_MAX),
]


@pytest.mark.parametrize("header", BAD)
def test_a_bad_header_is_a_violation_and_not_a_wait(header: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        read_proxy_header(header)


@given(st.sampled_from([b"", b"PROXY ", b"PROXY TCP4 ", SIGNATURE_V2, SIGNATURE_V2 + b"\x21\x11"]),
       st.binary(max_size=120))
def test_garbage_is_a_header_more_or_a_violation(start: bytes, rest: bytes) -> None:
    try:
        header = read_proxy_header(start + rest)
    except ProtocolViolation:
        return
    assert header is None or header.size <= len(start + rest)


def test_a_postgresql_packet_is_not_taken_for_a_header() -> None:
    for packet in (messages.SSL_REQUEST, messages.startup({"user": "u"}), b"\0", b""):
        assert not begins_like_header(packet)


@pytest.mark.parametrize(("host", "at_service", "listen_proxy", "must"), [
    ("10.0.0.7", False, False, False), ("10.0.0.7", False, True, True),
    ("10.0.0.7", True, False, True), ("192.0.2.1", True, True, False),
    ("unix", False, True, False), ("unix", False, False, False), ("unix", True, True, False),
])
def test_who_must_begin_with_a_header(host: str, at_service: bool, listen_proxy: bool, must: bool) -> None:
    found = requires_header(
        PeerAddress(host, 0), at_service=at_service, listen_proxy=listen_proxy, networks=("10.0.0.0/8",))
    assert found == must
