"""`python -m pooler.demo.promote BIN DATA SOCKET_DIRECTORY PORT`: what `pooler drain --run` runs in the
demonstration.

Waits until the standby has replayed all that the primary (at that unix socket) wrote, then promotes it. It
leaves no session on the standby, whose every slot is spoken for. Clients wait meanwhile: it imports little.
"""

from __future__ import annotations

import subprocess
import sys
import time

from pooler.demo.client import RawClient
from pooler.demo.process import unprivileged

_BEHIND = """SELECT coalesce(bool_and(replay_lsn >= pg_current_wal_lsn()), false) FROM pg_stat_replication
             WHERE application_name = 'walreceiver'"""
_WAIT_SECONDS = 20.0


def main() -> int:
    binaries, data, directory, port = sys.argv[1:]
    deadline = time.monotonic() + _WAIT_SECONDS
    with RawClient(directory, int(port)) as primary:
        primary.login("postgres")
        while primary.query(_BEHIND) != [["t"]]:
            if time.monotonic() > deadline:
                print("the standby does not catch up", file=sys.stderr)  # noqa: T201  a command's own word
                return 1
            primary.query("SELECT pg_sleep(0.02)")
    account = unprivileged()
    return subprocess.run(
        [f"{binaries}/pg_ctl", "promote", "-w", "-s", "-D", data], check=False, cwd="/",
        user=account.uid if account else None, group=account.gid if account else None,
        extra_groups=[] if account else None).returncode


if __name__ == "__main__":
    sys.exit(main())
