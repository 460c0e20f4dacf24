"""What the settings take from the machine: usable CPUs, the run directory, the machine's identity."""

from __future__ import annotations

import os
import socket
from pathlib import Path

WORKERS_MAX = 16


def usable_cpus() -> int:
    """CPUs this process may use, by affinity and by cgroup quota (versions 1 and 2), at least 1."""
    affinity = len(os.sched_getaffinity(0))
    quota = _cgroup_quota_cpus()
    return max(1, affinity if quota is None else min(affinity, int(quota)))


def default_workers() -> int:
    return min(WORKERS_MAX, usable_cpus())


def cgroup_folders(controller: str) -> list[Path]:
    """This process's cgroup folders for `controller`, version 2 first; in a namespace the mount's root."""
    root = Path("/sys/fs/cgroup")
    found: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            found[:0] = [root / path.lstrip("/"), root]
        elif controller in controllers.split(","):
            for mount in (root / controllers, root / controller):
                found += [mount / path.lstrip("/"), mount]
    return [folder for folder in found if folder.is_dir()]


def _cgroup_quota_cpus() -> float | None:
    for folder in cgroup_folders("cpu"):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
                period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
        except (OSError, ValueError):
            continue
        return None if quota in ("max", "-1") else int(quota) / int(period)
    return None


def default_run_dir() -> Path:
    """/run/pooler if it is writable or can be made, else $XDG_RUNTIME_DIR/pooler, else /tmp/pooler-UID."""
    system = Path("/run/pooler")
    if os.access(system if system.exists() else system.parent, os.W_OK | os.X_OK):
        return system
    session = os.environ.get("XDG_RUNTIME_DIR")
    return Path(session) / "pooler" if session else Path(f"/tmp/pooler-{os.getuid()}")


def host_name() -> str:
    return socket.gethostname()


def machine_id() -> str:
    """This machine, not its name: machine-id, and the instance's own id if there is one. Empty: unknown."""
    sources = ("/etc/machine-id", "/var/lib/cloud/data/instance-id", "/sys/class/dmi/id/product_uuid")
    return ":".join(filter(None, (read_line(path) for path in sources)))


def kernel_boot_id() -> str:
    """Changes with every boot of this kernel."""
    return read_line("/proc/sys/kernel/random/boot_id")


def read_line(path: str) -> str:
    """The stripped text of a small file, or empty."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
