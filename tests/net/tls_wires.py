"""Two ends of a TLS connection, both ours to script, and the contexts for them."""

from __future__ import annotations

import atexit
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from pooler.net.tls import TlsSocket
from pooler.net.tls_context import ClientTls, ServerTls, client_tls, server_tls
from pooler.settings_tls import ClientTlsSettings, PemFile, ServerTlsSettings
from tests.net.wires import tcp_pair
from tests.support.certificates import Authority, Pair


def pem(path: Path) -> PemFile:
    return PemFile(path, path.read_text())


@cache
def authority() -> Authority:
    """One for the whole test process."""
    folder = mkdtemp(prefix="tls")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Authority(Path(folder))


@cache
def host() -> Pair:
    return authority().host("db.test", "127.0.0.1")


def clients(**more: object) -> ClientTls:
    """What our side offers clients."""
    settings = {"sslmode": "require", "cert_file": pem(host().cert), "key_file": pem(host().key), **more}
    made = client_tls(ClientTlsSettings.model_validate(settings))
    assert made is not None
    return made


def servers(mode: str = "verify-full", **more: object) -> ServerTls:
    """What our side asks of servers."""
    made = server_tls(ServerTlsSettings.model_validate(
        {"sslmode": mode, "ca_file": pem(authority().file), **more}))
    assert made is not None
    return made


def shake_hands(one: TlsSocket, other: TlsSocket) -> None:
    """Both ends of one connection, in turn."""
    waiting = [one, other]
    while waiting:
        sock = waiting.pop(0)
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            waiting.append(sock)


@contextmanager
def tls_pair(
    version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3, buffer_bytes: int | None = None
) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    """(our server's end, our client's end), after the handshake, non-blocking."""
    client, server = tcp_pair()
    for sock in (client, server):
        sock.setblocking(False)
        if buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    offered, asked = clients().context, servers().context
    asked.maximum_version = version
    ours = TlsSocket.over(server, offered, server_side=True)
    theirs = TlsSocket.over(client, asked, server_side=False, server_hostname="db.test")
    try:
        shake_hands(theirs, ours)
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


class SplittingRelay:
    """Passes bytes between two sockets `step` bytes at a time, in a thread of its own for each way."""

    def __init__(self, one: socket.socket, other: socket.socket, step: int) -> None:
        self._sockets = (one, other)
        self._threads = [threading.Thread(target=self._pass, args=(*pair, step))
                         for pair in ((one, other), (other, one))]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()

    @staticmethod
    def _pass(source: socket.socket, sink: socket.socket, step: int) -> None:
        source.setblocking(True)
        sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while data := source.recv(step):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return
