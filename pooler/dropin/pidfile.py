"""The pidfile and the old process, as PgBouncer handles them."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from pooler.errors import PoolerError


class CannotStart(PoolerError):
    """What PgBouncer ends with at its start, in its words."""


def check_pidfile(path: Path) -> None:
    """Remove one that a dead process left. Raises CannotStart if its process lives, or nobody can tell."""
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        return
    except OSError as fault:
        raise CannotStart(f"could not open pidfile '{path}': {fault.strerror}") from None
    try:
        os.kill(int(text.split()[0]), 0)
    except ProcessLookupError:
        path.unlink()
        return
    except (ValueError, IndexError, OSError, OverflowError):
        pass
    raise CannotStart(f"pidfile '{path}' exists, another instance running?")


def write_pidfile(path: Path) -> None:
    """Raises CannotStart if it exists or cannot be written."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except OSError as fault:
        raise CannotStart(f"could not open pidfile '{path}': {fault.strerror}") from None
    with os.fdopen(handle, "w") as file:
        file.write(f"{os.getpid()}\n")


def remove_pidfile(path: Path) -> None:
    """Only our own: one that took over may have written its."""
    with contextlib.suppress(OSError, ValueError):
        if int(path.read_text(encoding="ascii")) == os.getpid():
            path.unlink()


def is_answered(unix_socket: Path) -> bool:
    """Whether a process accepts there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(unix_socket)) == 0
