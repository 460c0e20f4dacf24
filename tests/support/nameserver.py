"""A name server of a test's own (RFC 1035, 4.1), and how a process is made to ask no other."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.support.need import missing

DNS_PORT = 53
_A, _FAILED, _NO_NAME = 1, 2, 3
_TTL_SECONDS = 1


class NameServer:
    """Knows `names` (name: IPv4 address). Answers come while it is `open`, and are failures if `fails`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.names: dict[str, str] = {}
        self.fails = False
        self.asked = 0
        self.open = threading.Event()
        self.open.set()
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sock.bind((address, DNS_PORT))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self.open.set()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._sock.close()

    def argv(self, directory: Path) -> list[str]:
        """Begins a command whose process, and what it starts, asks this server only."""
        resolv = directory / "resolv.conf"
        resolv.write_text(f"nameserver {self.address}\noptions timeout:20 attempts:1\n")
        mount = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", mount, str(resolv)]

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                question, peer = self._sock.recvfrom(1024)
                if len(question) < 12:
                    return
                self.asked += 1
                threading.Thread(target=self._answer, args=(question, peer), daemon=True).start()

    def _answer(self, question: bytes, peer: tuple[str, int]) -> None:
        self.open.wait()
        labels, at = [], 12
        while size := question[at]:
            labels.append(question[at + 1 : at + 1 + size].decode())
            at += size + 1
        (kind,) = struct.unpack_from("!H", question, at + 1)
        address = self.names.get(".".join(labels).lower())
        code = _FAILED if self.fails else _NO_NAME if address is None else 0
        records = b""
        if not code and kind == _A and address is not None:
            records = b"\xc0\x0c" + struct.pack("!HHIH", _A, 1, _TTL_SECONDS, 4) + socket.inet_aton(address)
        head = question[:2] + struct.pack("!HHHHH", 0x8180 | code, 1, bool(records), 0, 0)
        with suppress(OSError):  # it is closed
            self._sock.sendto(head + question[12 : at + 5] + records, peer)


@pytest.fixture
def name_server() -> Iterator[NameServer]:
    """On an address of this process's own; a port below 1024 and a mount are for root."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        missing("only root may answer at port 53 and mount a resolv.conf")
    pid = os.getpid()
    with ExitStack() as running:
        server = NameServer(f"127.53.{pid >> 8 & 255}.{max(1, pid & 255)}")
        running.callback(server.close)
        yield server
