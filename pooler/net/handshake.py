"""The TLS handshake of a connection, awaited, with its calculations in threads.

A handshake costs a processor a millisecond or more, and many may come at once. OpenSSL lets go of the
interpreter while it calculates: in a few threads the clients that are served do not notice. The caller bounds
it in time.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl
from functools import partial
from typing import Any

import trio

from pooler.net.certificate import read_certificate
from pooler.net.stream import Broken, RawSocket
from pooler.net.tls import TlsFacts, TlsSocket
from pooler.net.tls_context import ClientTls, ServerTls
from pooler.wire.messages import SSL_CODE

HANDSHAKE_RECORD = 0x16  # the first byte of a ClientHello (RFC 8446, 5.1)
THREADS = 2
_SSL_REQUEST = (8).to_bytes(4, "big") + SSL_CODE.to_bytes(4, "big")
# RFC 2253, 2.3, as OpenSSL writes it (XN_FLAG_RFC2253)
_SHORT_NAMES = {
    "commonName": "CN", "countryName": "C", "stateOrProvinceName": "ST", "localityName": "L",
    "organizationName": "O", "organizationalUnitName": "OU", "domainComponent": "DC", "userId": "UID",
    "streetAddress": "street", "surname": "SN", "givenName": "GN",
}

_threads = trio.lowlevel.RunVar[trio.CapacityLimiter]("handshake threads")


class HandshakeFailed(Broken):
    """There is no TLS connection: the peer left, did not speak TLS, or one of us refused the other."""


class HandshakeLeft(HandshakeFailed):
    """The peer went away before its end, without a word of why: a probe, or a client that gave up."""


async def accept_tls(raw: RawSocket, tls: ClientTls) -> None:
    """Be the server of a handshake that the client begins; `raw.tls` is set then. Raises HandshakeFailed."""
    await trio.lowlevel.wait_readable(raw.plain)
    raw.tls = await _handshake(raw, partial(_wrap, tls.context, server_side=True), tls.end_point)


async def request_tls(raw: RawSocket, tls: ServerTls, host: str) -> bool:
    """Ask a server for TLS and do the handshake; False if it has none and the mode goes on in clear.

    `host` is the name or address dialled: it is told to the server (SNI) if it is a name, and it is what a
    certificate must be for under verify-full. Raises HandshakeFailed, Broken.
    """
    await raw.send_all(_SSL_REQUEST)
    answer = await raw.recv(1)  # not a byte more: what came behind it in clear is no part of the handshake's
    if answer == b"N":
        if tls.is_required:
            raise HandshakeFailed("the server does not support TLS, but sslmode is " + tls.mode)
        return False
    if answer != b"S":
        raise HandshakeFailed("the server did not understand the request for TLS")
    name = host if tls.context.check_hostname or not _is_address(host) else None
    raw.tls = await _handshake(raw, partial(_wrap, tls.context, server_side=False, server_hostname=name))
    return True


def has_alpn(sock: socket.socket) -> bool:
    """Whether the protocol was agreed on by name."""
    return isinstance(sock, TlsSocket) and sock.selected_alpn_protocol() is not None


def _facts_of(tls: TlsSocket, end_point: bytes | None) -> TlsFacts:
    if end_point is None:
        der = tls.getpeercert(binary_form=True)
        end_point = read_certificate(der).end_point if der else b""
    cipher = tls.cipher()
    certificate: Any = tls.getpeercert() or {}
    subject: tuple[tuple[tuple[str, str], ...], ...] = certificate.get("subject", ())
    names = [pair for part in subject for pair in part]
    common = [value for name, value in names if name == "commonName"]
    return TlsFacts(
        common_name=common[-1] if common and "\0" not in common[-1] else "",
        distinguished_name=",".join("+".join(map(_named, part)) for part in reversed(subject)),
        server_end_point=end_point, version=tls.version() or "", cipher=cipher[0] if cipher else "")


def _named(pair: tuple[str, str]) -> str:
    name, value = pair
    escaped = "".join(f"\\{each}" if each in ',+"\\<>;' else each for each in value)
    if escaped[:1] in (" ", "#"):
        escaped = "\\" + escaped
    if escaped.endswith(" ") and len(escaped) > 1:
        escaped = escaped[:-1] + "\\ "
    return f"{_SHORT_NAMES.get(name, name)}={escaped}"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _wrap(
    context: ssl.SSLContext, sock: socket.socket, *, server_side: bool, server_hostname: str | None = None
) -> TlsSocket:
    try:
        sock.getpeername()  # a connection that was reset has no peer, and is not to be wrapped
        return TlsSocket.over(sock, context, server_side=server_side, server_hostname=server_hostname)
    except (OSError, ValueError) as fault:
        sock.close()
        raise _failure(fault)(f"TLS could not begin: {_reason(fault)}") from fault


async def _handshake(
    raw: RawSocket, wrap: partial[TlsSocket], end_point: bytes | None = None
) -> TlsFacts:
    """Whatever costs time is done by few at once, so that the loop has its turns between them."""
    async with _limiter():
        sock = raw.encrypt(lambda plain: wrap(sock=plain))
    while True:
        try:
            async with _limiter():
                await trio.to_thread.run_sync(sock.do_handshake)
                return _facts_of(sock, end_point)
        except ssl.SSLWantReadError:
            await trio.lowlevel.wait_readable(sock)
        except ssl.SSLWantWriteError:
            await trio.lowlevel.wait_writable(sock)
        except (OSError, ValueError) as fault:
            raise _failure(fault)(f"TLS handshake failed: {_reason(fault)}") from fault


def _limiter() -> trio.CapacityLimiter:
    try:
        return _threads.get()
    except LookupError:
        limiter = trio.CapacityLimiter(THREADS)
        _threads.set(limiter)
        return limiter


def _failure(fault: OSError | ValueError) -> type[HandshakeFailed]:
    has_left = isinstance(fault, ConnectionError | ssl.SSLEOFError | ssl.SSLZeroReturnError) or (
        isinstance(fault, OSError) and fault.errno == errno.ENOTCONN)
    return HandshakeLeft if has_left else HandshakeFailed


def _reason(fault: OSError | ValueError) -> str:
    if isinstance(fault, ssl.SSLCertVerificationError):
        return f"certificate refused: {fault.verify_message}"
    if isinstance(fault, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return "the connection was closed"
    if isinstance(fault, ssl.SSLError):
        return (fault.reason or str(fault)).replace("_", " ").lower()
    return (getattr(fault, "strerror", None) or str(fault) or type(fault).__name__).lower()
