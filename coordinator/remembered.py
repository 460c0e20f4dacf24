"""What this host last knew of each ledger, kept in the run directory over restarts.

A ledger that shows another incarnation, or an older revision than was seen before, was wiped or restored:
this memory is the only thing that notices.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from coordinator.ledger.access import Seen

FILE_NAME = "ledger-seen.json"


class Remembered:
    """Incarnation and highest revision by database."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._saved = self._read()

    def seen(self, db: str) -> Seen:
        """What was known of this ledger; empty when it is new to this host."""
        return self._saved.get(db, Seen())

    def save(self, seen: Mapping[str, Seen]) -> None:
        """Replaces the file at once if anything is newer. Raises OSError."""
        if dict(seen) == self._saved:
            return
        text = json.dumps({db: [each.incarnation, each.revision] for db, each in seen.items()})
        scratch = self._path.with_suffix(".new")
        scratch.write_text(text)
        os.replace(scratch, self._path)
        self._saved = dict(seen)

    def _read(self) -> dict[str, Seen]:
        try:
            values = json.loads(self._path.read_text())
            return {db: Seen(str(each[0]), int(each[1])) for db, each in values.items()}
        except FileNotFoundError:
            return {}
        # an unreadable file raises: to go on without the memory would be to believe any ledger
