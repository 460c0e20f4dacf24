"""A TLS connection with the face of a plain non-blocking socket, and what is known of its peer.

What OpenSSL wants becomes BlockingIOError; a record is taken whole, so that nothing stays where an epoll
would not see it; a send that would block is to be repeated with the same bytes in front. An end is what it is
on a plain socket: the end of the connection, in order or by an error.
"""

from __future__ import annotations

import errno
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

RECORD_BYTES = 16_384  # the most that one record holds (RFC 8446, 5.1)
# PostgreSQL writes out its 8 KiB buffer when it is full: behind a record as big as that there will be more
_FULL_BYTES = 8_192


@dataclass(frozen=True, slots=True)
class TlsFacts:
    """What a finished handshake says.

    `common_name` and `distinguished_name` (RFC 2253) are those of the peer's certificate; "" unless that was
    verified. `server_end_point` is the hash of the server's certificate (RFC 5929), whichever side that is;
    b"" where the certificate's signature has none.
    """

    common_name: str
    distinguished_name: str
    server_end_point: bytes = field(repr=False)
    version: str
    cipher: str


class TlsSocket(ssl.SSLSocket):
    """A connected, non-blocking socket; `TlsSocket.over` makes it."""

    _fault: OSError | None = None  # met behind data that was given out first
    _is_silent = False

    @classmethod
    def over(
        cls, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool,
        server_hostname: str | None = None,
    ) -> Self:
        """Takes `sock` over; the handshake is still to be done. `context` is one of tls_context's. Raises
        OSError, ValueError; the socket may be closed then."""
        made = context.wrap_socket(
            sock, server_side=server_side, do_handshake_on_connect=False, server_hostname=server_hostname,
            suppress_ragged_eofs=False)  # what Python calls a ragged end is a reset: ends are seen to before
        assert isinstance(made, cls)
        return made

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """As of a plain socket, at most `buflen` bytes; with less than a record's size the rest of a record
        stays inside. Raises BlockingIOError, OSError."""
        try:
            data: bytes = self.read(buflen)
        except ssl.SSLWantReadError:
            raise BlockingIOError(errno.EAGAIN, "nothing has arrived") from None
        except ssl.SSLWantWriteError:  # no epoll that waits for words would wait for this
            raise ConnectionAbortedError(
                errno.ECONNABORTED, "the peer wants an answer to new keys and does not read") from None
        except (ssl.SSLZeroReturnError, ValueError):  # TLS was ended on both sides
            return self._end(buflen)
        except OSError as fault:
            raise self._fault or fault from None
        if len(data) < _FULL_BYTES:
            return data or self._end(buflen)
        return self._read_on(data, buflen)

    def _read_on(self, data: bytes, most: int) -> bytes:
        """Further records that are there already: one by one they would cost a turn of the epoll each."""
        parts = [data]
        size = len(data)
        while len(data) >= _FULL_BYTES and size + RECORD_BYTES <= most:
            try:
                data = self.read(RECORD_BYTES)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLZeroReturnError:
                data = b""
            except OSError as fault:
                self._fault = fault
                data = b""
            if not data:  # for the next call to tell: and the epoll must say that there is one to make
                if self._fault is not None or self.server_side:
                    with suppress(OSError):
                        socket.socket.shutdown(self, socket.SHUT_RD)
                break
            parts.append(data)
            size += len(data)
        return b"".join(parts)

    def _end(self, buflen: int) -> bytes:
        """No more will come. A server's close_notify alone says nothing of its process: its FIN does."""
        if self._fault is not None:
            raise self._fault
        if not self.server_side:
            while socket.socket.recv(self, buflen):
                pass
        return b""

    def send(self, data: Any, flags: int = 0) -> int:
        """As of a plain socket. After BlockingIOError, or less than all, the next call must begin with the
        bytes that were not sent; it may have more behind them."""
        try:
            if len(data) <= RECORD_BYTES:
                return self.write(data)
            return self._send_records(memoryview(data))
        except ssl.SSLWantWriteError:
            raise BlockingIOError(errno.EAGAIN, "nothing can be sent now") from None
        except ValueError:  # TLS was ended on both sides
            raise BrokenPipeError(errno.EPIPE, "the connection has ended") from None

    def _send_records(self, data: memoryview) -> int:
        sent = 0
        while sent < len(data):
            try:
                sent += self.write(data[sent : sent + RECORD_BYTES])
            except ssl.SSLWantWriteError:
                if not sent:
                    raise
                break
        return sent

    def has_ended(self) -> bool:
        """Whether the end is here with nothing unread before it; what is unread is lost."""
        try:
            return not self.recv(RECORD_BYTES)
        except OSError:
            return False

    def shutdown(self, how: int) -> None:
        """As of a plain socket, with a close_notify in front where sending ends."""
        if how != socket.SHUT_RD:
            self._say_goodbye()
        socket.socket.shutdown(self, how)

    def close(self) -> None:
        """Close, with a close_notify if the kernel takes one now: a peer is not left to think that the end
        was cut off."""
        if not self._is_silent:
            self._say_goodbye()
        super().close()

    def close_silently(self) -> None:
        """Close without a word."""
        self._is_silent = True
        self.close()

    def _say_goodbye(self) -> None:
        with suppress(OSError, ValueError):
            self.unwrap()


def tls_text(sock: socket.socket) -> str:
    """Version and cipher of a connection as a SHOW has them; "" without TLS."""
    if not isinstance(sock, TlsSocket):
        return ""
    cipher = sock.cipher()
    return "/".join(filter(None, (sock.version(), cipher[0] if cipher else None)))
