"""The run directory of a drop-in: made for this process, gone with it; what killed ones left is cleared."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

PREFIX = "pooler-pgbouncer-"


def make_run_dir() -> Path:
    """A new one, private, under $XDG_RUNTIME_DIR or the system's place for temporary files."""
    clear_left_overs(_base())
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=_base()))


def run_dirs() -> list[Path]:
    """Those of this user that there are."""
    return [path for path in _base().glob(f"{PREFIX}*") if path.lstat().st_uid == os.geteuid()]


def _base() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())


def clear_left_overs(base: Path) -> None:
    """Remove those of ours whose process is gone, which is when nobody holds their lock."""
    for path in base.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if path.lstat().st_uid == os.geteuid() and _is_free(path / "lock"):
                shutil.rmtree(path)


def _is_free(lock: Path) -> bool:
    with open(lock, "rb") as file:  # one without a lock is just being made
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def free_ports(counts: tuple[int, ...]) -> tuple[int, ...]:
    """For each count the first of so many free ports of loopback in a row."""
    found = []
    with ExitStack() as held:
        for count in counts:
            found.append(_run_of(count, held))
    return tuple(found)


def _run_of(count: int, held: ExitStack) -> int:
    for _ in range(100):
        with ExitStack() as tried:
            first = tried.enter_context(_bound(0))
            base = first.getsockname()[1]
            with suppress(OSError, OverflowError):
                for port in range(base + 1, base + count):
                    tried.enter_context(_bound(port))
                held.push(tried.pop_all())
                return int(base)
    raise OSError("no free ports on 127.0.0.1")


def _bound(port: int) -> socket.socket:
    sock = socket.socket()
    try:
        sock.bind(("127.0.0.1", port))
    except BaseException:
        sock.close()
        raise
    return sock
