"""What PAUSE, DISABLE and SET left standing on this host, in the run directory for workers that start later.

Without it a worker that was killed, or replaced by a rolling restart, would serve a database that is paused.
A new fleet begins with nothing of it: its supervisor removes the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from pooler.observe.events import Event
from pooler.supervise.files import replace_file
from pooler.supervise.run_dir import STANDING_FILE

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Stands:
    """What stands, as the last command of any worker left it: names of databases, and SET values by key."""

    paused: frozenset[str] = frozenset()
    disabled: frozenset[str] = frozenset()
    settings: Mapping[str, str] = field(default_factory=dict)


class Standing:
    """The file that has it."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / STANDING_FILE

    def keep(self, stands: Stands) -> None:
        """Write it down. Where that fails it is logged, and the command holds all the same."""
        content = json.dumps({"paused": sorted(stands.paused), "disabled": sorted(stands.disabled),
                              "settings": dict(stands.settings)})
        try:
            replace_file(self._path, content.encode())
        except OSError as fault:
            log.error(Event.SOMETHING_FAILED, what=f"cannot write {self._path}: {fault.strerror}")

    def read(self) -> Stands:
        """What stands; nothing where nobody wrote, or what is there cannot be read."""
        try:
            found = json.loads(self._path.read_bytes())
            return Stands(frozenset(found["paused"]), frozenset(found["disabled"]), dict(found["settings"]))
        except FileNotFoundError:
            return Stands()
        except (OSError, ValueError, KeyError, TypeError) as fault:
            log.error(Event.SOMETHING_FAILED, what=f"cannot read {self._path}: {fault}")
            return Stands()
