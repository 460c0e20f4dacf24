"""Waiting for a fact that only asking can show (another process, a log file)."""

from __future__ import annotations

import time
from collections.abc import Callable

ASK_SECONDS = 0.1


def wait_until(holds: Callable[[], object], what: str, timeout_seconds: float) -> None:
    """Ask until it holds. Fails with `what` when the time is over."""
    deadline = time.monotonic() + timeout_seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_seconds:g} s: {what}"
        time.sleep(ASK_SECONDS)  # noqa: TID251 - between two askings of another process
