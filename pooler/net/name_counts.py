"""How many clients of one name the workers of this host have: of a database, of a user.

As client_count, with a table instead of a number for each process: open addressing by a hash of the name,
which its owner writes and everybody reads. A name that finds no place there is counted by its own process
alone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from pooler.net.client_count import SLOTS

ENTRIES = 2048  # names of one process
PROBES_MAX = 64
_ENTRY = struct.Struct("=Qq")  # hash, clients; a hash stays where it is until another name takes its place
_SLOT_BYTES = ENTRIES * _ENTRY.size


class NameCounts:
    """This process's table beside those of the others. Without a path: this process alone."""

    def __init__(self, path: Path | None = None) -> None:
        self._own: dict[bytes, int] = {}
        self._map: mmap.mmap | None = None
        if path is None:
            return
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._fd, 0, SLOTS * _SLOT_BYTES)
        self._map = mmap.mmap(self._fd, SLOTS * _SLOT_BYTES)
        self._slot = next(slot for slot in range(SLOTS) if self._claim(slot))
        self._clear(self._slot)

    def enter(self, name: bytes, limit: int) -> bool:
        """Count one more client; False (and not counted) if there are `limit` already. 0: no limit."""
        self.enter_always(name)
        if limit and self.total(name) > limit:
            self._sweep()
            if self.total(name) > limit:
                self.leave(name)
                return False
        return True

    def enter_always(self, name: bytes) -> None:
        """Count one more, whatever the limit."""
        self._set(name, self._own.get(name, 0) + 1)

    def leave(self, name: bytes) -> None:
        """One client fewer."""
        self._set(name, self._own.get(name, 0) - 1)

    def total(self, name: bytes) -> int:
        """Clients of this name of all workers of this host."""
        total = self._own.get(name, 0)
        if self._map is not None:
            digest = _hash(name)
            for slot in range(SLOTS):
                if slot != self._slot:
                    total += self._read(slot, digest)
        return total

    def close(self) -> None:
        """Give the table back."""
        if self._map is not None:
            self._clear(self._slot)
            self._map.close()
            self._map = None
            os.close(self._fd)

    def _set(self, name: bytes, count: int) -> None:
        if count > 0:
            self._own[name] = count
        else:
            self._own.pop(name, None)
        if self._map is not None:
            digest = _hash(name)
            at = self._place(digest)
            if at is not None:
                _ENTRY.pack_into(self._map, at, digest, max(0, count))

    def _place(self, digest: int) -> int | None:
        """Where the own count of this name stands, or could."""
        assert self._map is not None
        free = None
        for at in _probes(self._slot, digest):
            found, count = _ENTRY.unpack_from(self._map, at)
            if found == digest:
                return at
            if not count and free is None:
                free = at
            if not found:
                break
        return free

    def _read(self, slot: int, digest: int) -> int:
        assert self._map is not None
        for at in _probes(slot, digest):
            found, count = _ENTRY.unpack_from(self._map, at)
            if found == digest:
                return int(count)
            if not found:
                break
        return 0

    def _sweep(self) -> None:
        """Tables of processes that are gone stand until somebody needs the room."""
        if self._map is not None:
            for slot in range(SLOTS):
                if slot != self._slot and self._claim(slot):
                    self._clear(slot)
                    fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, slot)

    def _claim(self, slot: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
        except OSError:
            return False
        return True

    def _clear(self, slot: int) -> None:
        assert self._map is not None
        at = slot * _SLOT_BYTES
        if any(self._map[at : at + _SLOT_BYTES]):
            self._map[at : at + _SLOT_BYTES] = bytes(_SLOT_BYTES)


def _hash(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8).digest()) or 1


def _probes(slot: int, digest: int) -> Iterator[int]:
    """Places of the entries to look at, in order."""
    base = slot * _SLOT_BYTES
    for step in range(PROBES_MAX):
        yield base + (digest + step) % ENTRIES * _ENTRY.size
