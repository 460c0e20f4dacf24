"""What this host last knew of each ledger, kept in the run directory over restarts.

A ledger that shows another incarnation, or an older revision than was seen before, was wiped or restored:
this memory is the only thing that notices.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path

from coordinator.ledger.access import Memory, Seen

FILE_NAME = "ledger-seen.json"
POLICIES_NAME = "policy-seen.json"


class MemoryUnreadable(Exception):
    """The file is there and does not say what was seen: to go on would be to believe any ledger."""


class Remembered:
    """Incarnation and highest revision by database. Raises MemoryUnreadable, naming the file, when made."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._saved = self._read()
        self._memories: dict[str, Memory] = {}
        self._policies_path = run_dir / POLICIES_NAME
        self._policies = self._read_policies()

    def seen(self, db: str) -> Seen:
        """What was known of this ledger; empty when it is new to this host."""
        return self._saved.get(db, Seen())

    def memory(self, db: str) -> Memory:
        """The same, to go on with: one for everything in this process that asks for this ledger."""
        return self._memories.setdefault(db, Memory(self.seen(db)))

    def policy(self, db: str) -> tuple[int, bytes] | None:
        """The generation that granted when this ledger was last whole, as stored; None: not known."""
        return self._policies.get(db)

    def keep_policy(self, db: str, generation: int, stored: bytes) -> None:
        """This one grants now. Raises OSError."""
        if self._policies.get(db) != (generation, stored):
            self._policies[db] = (generation, stored)
            values = {each: [number, base64.b64encode(raw).decode()]
                      for each, (number, raw) in self._policies.items()}
            self._replace(self._policies_path, json.dumps(values))

    def save(self, seen: Mapping[str, Seen]) -> None:
        """Replaces the file, whole also after a power cut, if anything is newer. Raises OSError."""
        if dict(seen) == self._saved:
            return
        text = json.dumps({
            db: [each.incarnation, each.revision, each.rebuilt, each.lost, each.base]
            for db, each in seen.items()})
        self._replace(self._path, text)
        self._saved = dict(seen)

    def _replace(self, path: Path, text: str) -> None:
        scratch = path.with_suffix(".new")
        with open(scratch, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # before the rename: else the name may survive and the text not
        os.replace(scratch, path)
        _sync_folder(path.parent)

    def _read_policies(self) -> dict[str, tuple[int, bytes]]:
        """What cannot be read is not known: no ledger is believed for it."""
        try:
            values = json.loads(self._policies_path.read_text(encoding="utf-8"))
            return {db: (int(number), base64.b64decode(raw)) for db, (number, raw) in values.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def _read(self) -> dict[str, Seen]:
        try:
            values = json.loads(self._path.read_text(encoding="utf-8"))
            return {db: _seen(*each) for db, each in values.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, IndexError, KeyError, TypeError) as fault:
            raise MemoryUnreadable(
                f"{self._path} cannot be read ({fault}): it tells whether a ledger was wiped or restored. If "
                f"the ledgers are known to be whole (`pooler ledger audit`), remove it") from None


def _seen(incarnation: str, revision: int, rebuilt: str = "", lost: bool = False, base: int = 0) -> Seen:
    return Seen(str(incarnation), int(revision), str(rebuilt), bool(lost), int(base))


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
