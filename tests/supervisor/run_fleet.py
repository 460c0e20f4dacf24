"""The real supervisor as a program of its own, with the tests' small children: run_fleet.py CONFIG."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import trio

from coordinator.logs import set_up_logging
from pooler.errors import PoolerError
from pooler.settings import load
from pooler.supervise import backoff
from pooler.supervisor import Supervisor

CHILD = Path(__file__).with_name("child.py")


def argv_of(role: str, link_fd: int) -> Sequence[str]:
    return [sys.executable, "-P", str(CHILD), str(Path(sys.argv[1]).parent), role, str(link_fd)]


def main() -> int:
    config = Path(sys.argv[1])
    settings = load(config)
    set_up_logging()
    backoff.DOWN_RETRY_SECONDS = float(os.environ.get("DOWN_RETRY_SECONDS", backoff.DOWN_RETRY_SECONDS))
    try:
        trio.run(Supervisor(config, settings, argv_of).run)
    except PoolerError as fault:
        print(fault, file=sys.stderr)  # noqa: T201
        return fault.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
