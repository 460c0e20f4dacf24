"""What PAUSE and DISABLE left standing on this host, in the run directory for workers that start later.

Without it a worker that was killed, or replaced by a rolling restart, would serve a database that is paused.
A new fleet begins with nothing paused: its supervisor removes the file.
"""

from __future__ import annotations

import json
from pathlib import Path

import structlog

from pooler.observe.events import Event
from pooler.supervise.files import replace_file
from pooler.supervise.run_dir import STANDING_FILE

log = structlog.get_logger()


class Standing:
    """The names of what is paused and what is disabled, as the last command of any worker left them."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / STANDING_FILE

    def keep(self, paused: set[str], disabled: set[str]) -> None:
        """Write them down. Where that fails it is logged, and the command holds all the same."""
        content = json.dumps({"paused": sorted(paused), "disabled": sorted(disabled)})
        try:
            replace_file(self._path, content.encode())
        except OSError as fault:
            log.error(Event.SOMETHING_FAILED, what=f"cannot write {self._path}: {fault.strerror}")

    def read(self) -> tuple[set[str], set[str]]:
        """(paused, disabled); nothing where nobody wrote, or what is there cannot be read."""
        try:
            found = json.loads(self._path.read_bytes())
            return set(found["paused"]), set(found["disabled"])
        except FileNotFoundError:
            return set(), set()
        except (OSError, ValueError, KeyError, TypeError) as fault:
            log.error(Event.SOMETHING_FAILED, what=f"cannot read {self._path}: {fault}")
            return set(), set()
