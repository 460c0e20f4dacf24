"""Commands that may hold a permit, noted in the run directory: so that their host sees when one has died.

Nobody waits for a command's process. Its note says which process it is, by number, start time, kernel boot
and pid namespace; when that one is gone the coordinator of this host records the death (`known dead`).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from coordinator.registry import read_kernel_boot_id

DIRECTORY = "commands"


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this machine. `pid_start`: clock ticks since boot, as /proc has it."""

    pid: int
    pid_start: int
    kernel_boot_id: str
    pid_namespace: str

    @classmethod
    def this(cls) -> Process:
        """The one that runs this code."""
        pid = os.getpid()
        return cls(pid, _start_of(pid) or 0, read_kernel_boot_id(), _namespace())

    @property
    def is_gone(self) -> bool:
        """Certainly: seen from its own namespace, or this machine was booted since."""
        if self.kernel_boot_id != read_kernel_boot_id():
            return True
        return self.pid_namespace == _namespace() and _start_of(self.pid) != self.pid_start


def note(run_dir: Path, boot_id: str, process: Process) -> bool:
    """Notes a command before it is registered; False if it cannot: its death is then not seen by itself."""
    path = run_dir / DIRECTORY / boot_id
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        scratch = path.with_suffix(".new")
        scratch.write_text(json.dumps(asdict(process)))
        os.replace(scratch, path)
    except OSError:
        return False
    return True


def forget(run_dir: Path, boot_id: str) -> None:
    """Nothing of it is left, or its death is on record."""
    try:
        (run_dir / DIRECTORY / boot_id).unlink(missing_ok=True)
    except OSError:
        return


def dead_ones(run_dir: Path) -> list[str]:
    """Boot ids of noted commands whose process is gone."""
    return [boot_id for boot_id, process in _noted(run_dir) if process.is_gone]


def living_ones(run_dir: Path) -> list[str]:
    """Boot ids of noted commands whose process may be there."""
    return [boot_id for boot_id, process in _noted(run_dir) if not process.is_gone]


def _noted(run_dir: Path) -> list[tuple[str, Process]]:
    found = []
    for path in sorted((run_dir / DIRECTORY).glob("command-*")):
        try:
            process = Process(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue  # not written whole: it was never registered
        found.append((path.name, process))
    return found


def _start_of(pid: int) -> int | None:
    """Field 22 of /proc/<pid>/stat; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
