"""Which processes this machine started and which are known to be dead, in files that outlive the supervisor.

`boots/<boot id>` is written when a process starts, `exits/<boot id>` when it was seen to end, before anybody
is told; both go once the ledger has the exit. A process is called dead only on what proves it: waited for,
gone from /proc by pid and start time in the same pid namespace and kernel boot, or a new kernel boot of the
same machine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from pooler.settings_host import kernel_boot_id, machine_id
from pooler.supervise.files import replace_file

_R = TypeVar("_R", "Boot", "Exit")


@dataclass(frozen=True, slots=True)
class Boot:
    """One start of one process. `pid_start` is field 22 of /proc/<pid>/stat, in clock ticks since boot."""

    boot_id: str
    role: str
    index: int
    pid: int
    pid_start: int
    machine: str
    kernel_boot: str
    pid_namespace: str


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one process, as the ledger is told it."""

    boot_id: str
    how: str
    at_us: int


class ExitFiles:
    """The two folders under the run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._boots = run_dir / "boots"
        self._exits = run_dir / "exits"
        for folder in (self._boots, self._exits):
            folder.mkdir(mode=0o700, exist_ok=True)

    def note_boot(self, boot_id: str, role: str, index: int, pid: int) -> None:
        """A process was started. Raises OSError if it cannot be noted: then it must not run."""
        start = process_start(pid) or 0
        boot = Boot(boot_id, role, index, pid, start, machine_id(), kernel_boot_id(), pid_namespace())
        replace_file(self._boots / boot_id, json.dumps(asdict(boot)).encode())

    def note_exit(self, boot_id: str, how: str) -> Exit:
        """A process is known to have ended. Raises OSError; its boot file then tells the next supervisor."""
        seen = Exit(boot_id, how, time.time_ns() // 1000)
        replace_file(self._exits / boot_id, json.dumps(asdict(seen)).encode())
        return seen

    def forget(self, boot_id: str) -> None:
        """The ledger has it, or it never mattered."""
        for folder in (self._boots, self._exits):
            (folder / boot_id).unlink(missing_ok=True)

    def unreported(self) -> list[Exit]:
        """Exits noted and not yet known to the ledger, oldest first."""
        return sorted(_read_all(self._exits, Exit), key=lambda seen: seen.at_us)

    def left_over(self) -> list[Boot]:
        """Boots of earlier supervisors without a noted exit."""
        noted = {seen.boot_id for seen in self.unreported()}
        return [boot for boot in _read_all(self._boots, Boot) if boot.boot_id not in noted]


def how_it_is_gone(boot: Boot) -> str | None:
    """Why the process of `boot` is certainly dead; None if it lives or nothing proves it."""
    if boot.kernel_boot != kernel_boot_id():
        return "the machine booted anew" if boot.machine and boot.machine == machine_id() else None
    if boot.pid_namespace != pid_namespace():
        return None
    return None if is_running(boot) else "gone when the supervisor started"


def is_running(boot: Boot) -> bool:
    """Whether that very process, not another of the same pid, runs where we can see it."""
    here = boot.kernel_boot == kernel_boot_id() and boot.pid_namespace == pid_namespace()
    return here and process_start(boot.pid) == boot.pid_start


def process_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if there is none or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in ("Z", "X") else int(fields[19])


def pid_namespace() -> str:
    """Names the pid namespace of this process; empty if unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _read_all(folder: Path, kind: type[_R]) -> Iterator[_R]:
    for file in sorted(folder.iterdir()):
        if file.name.startswith("."):
            continue
        try:
            yield kind(**json.loads(file.read_bytes()))
        except (ValueError, TypeError):
            file.unlink(missing_ok=True)  # written by a rename: only a damaged disk makes half a file
