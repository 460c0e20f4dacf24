"""The run directory of a fleet: private, and of one fleet at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self

from pooler.errors import PoolerError
from pooler.supervise.files import replace_file

STANDING_FILE = "standing.json"  # what is paused and disabled, for workers that start later


class RunDirRefused(PoolerError):
    """The run directory cannot be used: not ours, not private, or another fleet's."""


class RunDir:
    """A run directory, held by this process until it ends (the kernel drops the lock even at kill -9)."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def take(cls, path: Path, fleet: str) -> Self:
        """Make it if needed, lock it and write the pid. Raises RunDirRefused in one line."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = path.lstat()
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise RunDirRefused(f"fleet.run_dir {path} must be this user's and writable by no other")
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as fault:
            raise RunDirRefused(f"fleet.run_dir {path} cannot be used: {fault.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise RunDirRefused(_taken_by(path)) from None
        (path / STANDING_FILE).unlink(missing_ok=True)
        replace_file(path / "pooler.pid", f"{os.getpid()}\n{fleet}\n".encode())
        return cls(path, lock)

    def close(self) -> None:
        """Give it back."""
        (self.path / "pooler.pid").unlink(missing_ok=True)
        os.close(self._lock)


def _taken_by(path: Path) -> str:
    try:
        pid, fleet = (path / "pooler.pid").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        pid, fleet = "?", "?"
    return f"fleet.run_dir {path} is in use by fleet {fleet} (pid {pid}): stop it, or set another run_dir"
