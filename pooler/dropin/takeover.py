"""An online restart: a process gives its listening sockets to its successor, and then its clients.

The successor finds it by the unix socket: the kernel says who listens there. It gets the sockets at once,
starts its processes with them, and says so when all of them serve; only then does the old one let go. A
successor that dies before leaves everything as it was.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import structlog
import trio

from pooler.dropin.pidfile import CannotStart
from pooler.dropin.place import run_dirs
from pooler.observe.events import Event

TAKEOVER_NAME = "takeover.sock"
SOCKETS_MAX = 64
ANSWER_SECONDS = 10.0
SERVING_SECONDS_MAX = 120.0  # a successor that does not serve by then may ask again
_COUNTS = struct.Struct("!II")  # shared ones, unix ones
_PATH_BYTES_MAX = 4096

Shared = tuple[list[socket.socket], list[socket.socket]]

log = structlog.get_logger()


class Replaceable(Protocol):
    """A supervisor that can be taken over."""

    def shared_sockets(self) -> Shared:
        """The shared ones and the unix ones."""

    def replaced(self, run_dir: Path) -> None:
        """The successor serves."""


class Predecessor:
    """The process that is taken over from."""

    def __init__(self, stream: socket.socket, sockets: Shared) -> None:
        self._stream = stream
        self.sockets = sockets

    @classmethod
    def at(cls, unix_socket: Path) -> Predecessor:
        """The one that listens there, its sockets in our hands. Raises CannotStart."""
        run_dir = _run_dir_of(_listener_pid(unix_socket))
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.settimeout(ANSWER_SECONDS)
        try:
            stream.connect(str(run_dir / TAKEOVER_NAME))
            head, descriptors, _, _ = socket.recv_fds(stream, _COUNTS.size, SOCKETS_MAX)
            shared, unix = _COUNTS.unpack(head)
        except (OSError, struct.error) as fault:
            stream.close()
            raise CannotStart(f"the old process does not hand over: {fault}") from None
        found = [socket.socket(fileno=each) for each in descriptors]
        if len(found) != shared + unix:
            raise CannotStart("the old process handed over other sockets than it said")
        return cls(stream, (found[:shared], found[shared:]))

    def let_go(self, run_dir: Path) -> None:
        """We serve, at `run_dir`: it may end."""
        with suppress(OSError):
            self._stream.sendall(str(run_dir).encode())
        self._stream.close()


async def serve_takeovers(run_dir: Path, fleet: Replaceable) -> None:
    """Answer successors until cancelled. Only this user can reach the run directory."""
    path = run_dir / TAKEOVER_NAME
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    os.chmod(path, 0o600)
    listener.listen(1)
    accepting = trio.socket.from_stdlib_socket(listener)
    while True:
        stream, _ = await accepting.accept()
        with stream, suppress(OSError), trio.move_on_after(SERVING_SECONDS_MAX):
            await _hand_over(stream, fleet)


async def _hand_over(stream: trio.socket.SocketType, fleet: Replaceable) -> None:
    shared, unix = fleet.shared_sockets()
    descriptors = [each.fileno() for each in (*shared, *unix)]
    log.info(Event.TAKEOVER_ASKED, sockets=len(descriptors))
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))
    await stream.sendmsg([_COUNTS.pack(len(shared), len(unix))], [rights])
    path = await stream.recv(_PATH_BYTES_MAX)
    if path:
        fleet.replaced(Path(path.decode()))


def _listener_pid(unix_socket: Path) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(unix_socket))
        except OSError as fault:
            raise CannotStart(f"the old process does not answer at {unix_socket}: {fault.strerror}") from None
        raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[0])


def _run_dir_of(pid: int) -> Path:
    for path in run_dirs():
        with suppress(OSError, ValueError):
            if int((path / "pooler.pid").read_text(encoding="ascii").split()[0]) == pid:
                return path
    raise CannotStart(f"process {pid}, which listens there, is no `pooler pgbouncer` of this user: stop it")
