"""A TLS socket behaves as a plain one: what blocks, what is pending, how sends are repeated, how it ends."""

from __future__ import annotations

import select
import socket
import ssl
import struct
import subprocess
from collections.abc import Callable
from random import Random
from typing import IO

import pytest

from pooler.net.stream import ended_in_order
from pooler.net.tls import RECORD_BYTES, TlsSocket, tls_text
from tests.net.tls_wires import SplittingRelay, authority, clients, servers, shake_hands, tls_pair
from tests.net.wires import tcp_pair

VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]
RECV_BYTES = 65_536


class Sender:
    """Sends as the relay does: keeps what was not taken, and only appends behind it."""

    def __init__(self, sock: TlsSocket) -> None:
        self._sock = sock
        self.out = bytearray()

    def send(self, data: bytes = b"") -> None:
        self.out += data
        if not self.out:
            return
        try:
            sent = self._sock.send(self.out)
        except BlockingIOError:
            return
        del self.out[:sent]


def receive(sock: TlsSocket) -> bytes | None:
    """None where a plain socket would block."""
    try:
        return sock.recv(RECV_BYTES)
    except BlockingIOError:
        return None


def wait_readable(sock: socket.socket) -> None:
    assert select.select([sock], [], [], 10)[0], "nothing came in 10 s"


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_sent_arrives_and_where_nothing_is_there_it_would_block(version: ssl.TLSVersion) -> None:
    with tls_pair(version) as (ours, theirs):
        assert receive(ours) is None
        assert theirs.send(b"hello") == 5
        wait_readable(ours)
        assert receive(ours) == b"hello"
        assert receive(ours) is None
        assert ours.send(b"") == 0
        assert tls_text(ours) == tls_text(theirs)
        assert tls_text(ours).startswith("TLSv1.3/TLS_" if version is VERSIONS[1] else "TLSv1.2/ECDHE-")
    with socket.socket() as plain:
        assert tls_text(plain) == ""


@pytest.mark.parametrize("size", [1, 8_191, 8_192, RECORD_BYTES - 1, RECORD_BYTES, RECORD_BYTES + 1, 65_536])
def test_nothing_stays_inside_that_an_epoll_would_not_see(size: int) -> None:
    """After each recv what is left of the data is in the kernel, which says so."""
    data = Random(size).randbytes(size)
    with tls_pair() as (ours, theirs):
        sender = Sender(theirs)
        sender.send(data * 3)
        got = b""
        while len(got) < 3 * size:
            wait_readable(ours)
            came = ours.recv(RECV_BYTES)
            assert len(came) <= RECV_BYTES
            assert ours.pending() == 0
            got += came
            sender.send()
        assert got == data * 3


def test_a_full_buffer_is_passed_on_in_few_calls() -> None:
    with tls_pair() as (ours, theirs):
        for _ in range(3):
            assert theirs.send(bytes(8_192)) == 8_192
        wait_readable(ours)
        assert len(ours.recv(RECV_BYTES)) == 3 * 8_192


@pytest.mark.parametrize("version", VERSIONS)
def test_a_send_that_would_block_is_taken_up_again_though_more_was_put_behind_it(
    version: ssl.TLSVersion,
) -> None:
    random = Random(1)
    with tls_pair(version, buffer_bytes=16_384) as (ours, theirs):
        sender, sent, got = Sender(ours), b"", bytearray()
        blocked = 0
        while len(sent) < 300_000 or sender.out:
            more = random.randbytes(random.choice((1, 5, 300, 8_192, 20_000, 70_000)))
            if len(sent) < 300_000 and len(sender.out) < 200_000:
                sent += more
                sender.send(more)
            else:
                sender.send()
            blocked += bool(sender.out)
            if random.random() < 0.5 and (came := receive(theirs)):
                got += came
        while len(got) < len(sent):
            wait_readable(theirs)
            got += receive(theirs) or b""
        assert blocked > 50
        assert got == sent


@pytest.mark.parametrize("version", VERSIONS)
def test_50_mb_cross_50_mb_through_small_buffers(version: ssl.TLSVersion) -> None:
    total = 50_000_000
    block = Random(2).randbytes(1_000_000)
    with tls_pair(version, buffer_bytes=65_536) as pair:
        senders = [Sender(sock) for sock in pair]
        left = [total, total]
        got = [0, 0]
        poll = select.epoll()
        for sock in pair:
            poll.register(sock.fileno(), select.EPOLLIN)
        while min(got) < total or max(got) > total:
            for which, sender in enumerate(senders):
                if left[which] and len(sender.out) < 1_000_000:
                    left[which] -= len(block)
                    sender.send(block)
                else:
                    sender.send()
            for fd, _ in poll.poll(0):
                which = 0 if fd == pair[0].fileno() else 1
                came = receive(pair[which])
                if came is not None:
                    at = got[which] % len(block)
                    assert came == (block * 2)[at : at + len(came)]
                    got[which] += len(came)
        poll.close()
        assert got == [total, total]


@pytest.mark.parametrize("step", [1, 7, 1_000])
def test_bytes_that_come_singly_make_the_same_records(step: int) -> None:
    (client, near), (far, server) = tcp_pair(), tcp_pair()
    relay = SplittingRelay(near, far, step)
    theirs = TlsSocket.over(client, servers().context, server_side=False, server_hostname="db.test")
    ours = TlsSocket.over(server, clients().context, server_side=True)
    for sock in (ours, theirs):
        sock.setblocking(False)
    shake_hands(theirs, ours)
    data = Random(step).randbytes(20 * step + 5_000)
    for source, sink in ((theirs, ours), (ours, theirs)):
        sender, got = Sender(source), b""
        sender.send(data)
        while len(got) < len(data):
            wait_readable(sink)
            got += receive(sink) or b""
            sender.send()
        assert got == data
    theirs.close()
    wait_readable(ours)
    while (came := receive(ours)) is None:
        wait_readable(ours)
    assert came == b""
    ours.close()
    relay.join()


def test_an_end_in_order_is_an_empty_read_on_either_side() -> None:
    for closer in (0, 1):
        with tls_pair() as pair:
            pair[closer].send(b"last")
            pair[closer].close()
            other = pair[1 - closer]
            wait_readable(other)
            assert receive(other) == b"last"
            wait_readable(other)
            assert receive(other) == b""
            assert receive(other) == b""
            assert ended_in_order(other)


def test_an_end_without_close_notify_is_what_it_is_without_tls() -> None:
    """A killed backend's kernel sends a FIN and nothing else: that is the end of its process."""
    with tls_pair() as (ours, theirs):
        ours.close_silently()
        wait_readable(theirs)
        assert receive(theirs) == b""
        assert ended_in_order(theirs)


def test_a_servers_close_notify_alone_is_no_end() -> None:
    with tls_pair() as (ours, theirs):
        with pytest.raises(ssl.SSLWantReadError):
            ours.unwrap()
        wait_readable(theirs)
        assert receive(theirs) is None
        assert not theirs.has_ended()
        ours.close_silently()
        wait_readable(theirs)
        assert theirs.has_ended()
        assert receive(theirs) == b""


def test_a_clients_close_notify_alone_is_its_leaving() -> None:
    with tls_pair() as (ours, theirs):
        with pytest.raises(ssl.SSLWantReadError):
            theirs.unwrap()
        wait_readable(ours)
        assert receive(ours) == b""


def test_a_reset_is_an_error() -> None:
    with tls_pair() as (ours, theirs):
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close_silently()
        wait_readable(ours)
        with pytest.raises(OSError, match=r"violation|reset"):
            ours.recv(RECV_BYTES)


def test_a_peer_that_changes_its_keys_is_understood_and_answered() -> None:
    """OpenSSL's own client asks for a KeyUpdate of both sides (RFC 8446, 4.6.3)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        at = "{}:{}".format(*listener.getsockname())
        command = ["openssl", "s_client", "-connect", at, "-tls1_3", "-CAfile", str(authority().file)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
        ) as peer:
            assert peer.stdin is not None
            assert peer.stdout is not None
            accepted, _ = listener.accept()
            accepted.setblocking(False)
            ours = TlsSocket.over(accepted, clients().context, server_side=True)
            finish_handshake(ours)
            for word in (b"one\n", b"K\n", b"two\n", b"k\n", b"three\n"):
                peer.stdin.write(word)
                if word in (b"K\n", b"k\n"):
                    read_until(peer.stdout, b"KEYUPDATE")
                else:
                    assert await_words(ours) == word
                    assert ours.send(b"answer\n") == 7
                    read_until(peer.stdout, b"answer")
            peer.stdin.close()
            peer.kill()
            ours.close()


def finish_handshake(sock: TlsSocket) -> None:
    while True:
        wait_readable(sock)
        try:
            sock.do_handshake()
            return
        except ssl.SSLWantReadError:
            continue


def await_words(sock: TlsSocket) -> bytes:
    while (came := receive(sock)) is None:
        wait_readable(sock)
    return came


def read_until(stream: IO[bytes], words: bytes) -> None:
    got = b""
    while words not in got:
        more = stream.read(4_096)
        assert more, got
        got += more


RUBBISH = b"\x17\x03\x03\x00\x20" + bytes(32)  # a record that does not decrypt


@pytest.mark.parametrize("before", [b"", bytes(100), bytes(8_192), bytes(60_000)])
def test_a_broken_record_is_an_error_after_what_came_before_it(before: bytes) -> None:
    """Whatever the calls are that take the data: the one behind it fails, and an epoll asks for that call."""
    with tls_pair() as (ours, theirs):
        if before:
            assert theirs.send(before) == len(before)
        socket.socket.send(theirs, RUBBISH)
        got = b""
        while len(got) < len(before):
            wait_readable(ours)
            got += ours.recv(RECV_BYTES)
        assert got == before
        wait_readable(ours)
        with pytest.raises(ssl.SSLError):
            ours.recv(RECV_BYTES)
        with pytest.raises(OSError, match=r".*"):
            ours.send(b"x")
        wait_readable(theirs)
        with pytest.raises(ssl.SSLError):  # the alert of the side that could not read the record
            theirs.recv(RECV_BYTES)


def test_an_end_that_is_met_behind_full_records_is_told_by_the_next_call() -> None:
    for closer in (0, 1):
        with tls_pair() as pair:
            assert pair[closer].send(bytes(8_192)) == 8_192
            pair[closer].close()
            other = pair[1 - closer]
            wait_readable(other)
            assert len(other.recv(RECV_BYTES)) == 8_192
            wait_readable(other)
            assert receive(other) == b""


def test_shutdown_sends_close_notify_and_the_other_way_stays_open() -> None:
    with tls_pair() as (ours, theirs):
        ours.shutdown(socket.SHUT_WR)
        wait_readable(theirs)
        assert receive(theirs) == b""
        assert theirs.send(b"still") == 5
        wait_readable(ours)
        assert receive(ours) == b"still"
        theirs.close()
        wait_readable(ours)
        assert receive(ours) == b""


@pytest.mark.parametrize("name", ["recv", "send"])
def test_what_waiting_for_the_other_way_would_not_end_is_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Else a loop would ask again and again: new keys that cannot be answered, a handshake not done."""
    def want(fault: type[OSError]) -> Callable[..., None]:
        def fail(*_: object) -> None:
            raise fault
        return fail

    with tls_pair() as (ours, _):
        monkeypatch.setattr(ours, "read", want(ssl.SSLWantWriteError))
        monkeypatch.setattr(ours, "write", want(ssl.SSLWantReadError))
        with pytest.raises((ConnectionAbortedError, ssl.SSLWantReadError)):
            ours.recv(100) if name == "recv" else ours.send(b"x")
        monkeypatch.undo()


def test_has_ended_tells_an_end_from_silence_and_from_words() -> None:
    with tls_pair() as (ours, theirs):
        assert not theirs.has_ended()
        ours.send(b"words")
        wait_readable(theirs)
        assert not theirs.has_ended()
        ours.close()
        wait_readable(theirs)
        assert theirs.has_ended()
