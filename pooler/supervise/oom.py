"""How often the kernel killed for lack of memory in this cgroup: nothing else tells an OOM kill."""

from __future__ import annotations

from pooler.settings_host import cgroup_folders


def oom_kills() -> int:
    """The cgroup's `oom_kill` counter (versions 1 and 2); 0 where there is none to read."""
    for folder in cgroup_folders("memory"):
        for name in ("memory.events", "memory.oom_control"):
            try:
                lines = (folder / name).read_text(encoding="ascii").splitlines()
            except OSError:
                continue
            for line in lines:
                key, _, count = line.partition(" ")
                if key == "oom_kill" and count.isdigit():
                    return int(count)
    return 0
