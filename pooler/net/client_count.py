"""How many clients the workers of this host have, counted together without asking anybody.

A shared file has one counter for each worker process; a process owns its counter by a lock on that part of
the file, which the kernel lets go when the process ends, however it ends. Adding first and looking at the sum
afterwards keeps the limit: two that meet at the last place may both be refused, never both be let in.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from pathlib import Path

SLOTS = 64
_COUNT = struct.Struct("=q")
_BYTES = SLOTS * _COUNT.size


class ClientCount:
    """This process's counter beside those of the others."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._fd, 0, _BYTES)
        self._map = mmap.mmap(self._fd, _BYTES)
        self._slot = next(slot for slot in range(SLOTS) if self._claim(slot))
        self._own = 0
        self._write(self._slot, 0)

    def enter(self, limit: int) -> bool:
        """Count one more client of this process; False (and not counted) if the limit is reached."""
        self._own += 1
        self._write(self._slot, self._own)
        if self.total() > limit:
            self._sweep()
            if self.total() > limit:
                self.leave()
                return False
        return True

    def enter_always(self) -> None:
        """Count one more, whatever the limit."""
        self._own += 1
        self._write(self._slot, self._own)

    def leave(self) -> None:
        """One client fewer."""
        self._own -= 1
        self._write(self._slot, self._own)

    def total(self) -> int:
        """Clients of all workers of this host."""
        return sum(struct.unpack_from(f"={SLOTS}q", self._map))

    def total_alive(self) -> int:
        """As total(), once the counters of processes that are gone are taken out."""
        self._sweep()
        return self.total()

    def close(self) -> None:
        """Give the counter back."""
        self._write(self._slot, 0)
        self._map.close()
        os.close(self._fd)

    def _sweep(self) -> None:
        """Counters of processes that are gone stand until somebody needs the room, or wants to know."""
        for slot in range(SLOTS):
            if slot != self._slot and self._read(slot) and self._claim(slot):
                self._write(slot, 0)
                fcntl.lockf(self._fd, fcntl.LOCK_UN, _COUNT.size, slot * _COUNT.size)

    def _claim(self, slot: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, _COUNT.size, slot * _COUNT.size)
        except OSError:
            return False
        return True

    def _read(self, slot: int) -> int:
        value: int = _COUNT.unpack_from(self._map, slot * _COUNT.size)[0]
        return value

    def _write(self, slot: int, value: int) -> None:
        _COUNT.pack_into(self._map, slot * _COUNT.size, value)
