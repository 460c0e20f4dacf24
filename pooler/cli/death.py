"""`pooler ledger resolve --owner BOOT --dead`: an operator says that a worker's process has ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pooler.cli.reach import Where


def attest(where: Where, db: str, owner: str, evidence: str) -> int:
    """The exit code: 0 when the death is on record, 1 when it is refused."""
    import trio

    return trio.run(_attest, where, db, owner, evidence)


async def _attest(where: Where, name: str, owner: str, evidence: str) -> int:
    from coordinator.revoking import NotThis, attest_death, find_worker
    from pooler.cli.reach import now_us, operator_name, reach

    async with reach(where) as reached:
        db = reached.db(name)
        ledger = await reached.whole_ledger(db)
        try:
            boot_id = await find_worker(reached.store, reached.keys, [ledger], owner)
            is_news = await attest_death(
                reached.store, reached.keys, boot_id, db, who=operator_name(), evidence=evidence,
                visible=seen_here(reached.run_dir, boot_id), now_us=now_us)
        except NotThis as why:
            print(f"pooler: {why}", file=sys.stderr)
            return 1
    how = "is on record as dead" if is_news else "was on record as dead already"
    print(f"{boot_id} {how}: what it left without a server process is freed once looks have proven it "
          "never born")
    return 0


def seen_here(run_dir: Path | None, boot_id: str) -> str:
    """Why this host sees the process of `boot_id`; empty if it does not (it may run on another)."""
    from coordinator import commands
    from coordinator.session_table import TableUnreadable, read_head, table_path
    from pooler.supervise.exits import Boot, is_running

    if run_dir is None:
        return ""
    try:
        boot = Boot(**json.loads((run_dir / "boots" / boot_id).read_bytes()))
        if is_running(boot):
            return f"its process {boot.pid} runs on this host"
    except (OSError, ValueError, TypeError):
        pass
    if boot_id in commands.living_ones(run_dir):
        return "it is a command that runs on this host"
    try:
        pid = read_head(table_path(run_dir, boot_id)).pid
    except (OSError, TableUnreadable, ValueError):
        return ""
    if Path(f"/proc/{pid}").exists():
        return f"process {pid}, which wrote its session table, runs on this host"
    return ""
