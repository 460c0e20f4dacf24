"""Debian's PgBouncer, and how it is run by tests that are run as root (it refuses to be root)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from pooler.demo.process import Account

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def as_ordinary_user(*paths: Path) -> dict[str, Any]:
    """Arguments for subprocess; the account may enter and read what is under `paths`."""
    if os.geteuid() != 0:
        return {}
    account = Account.named("nobody")
    for path in paths:
        for folder in (path, *path.parents):
            if folder != Path("/") and folder.stat().st_uid == 0 and folder != Path("/tmp"):
                folder.chmod(folder.stat().st_mode | 0o055)
    return {"user": account.uid, "group": account.gid, "extra_groups": []}
