"""systemd's notification protocol: one datagram per state. Source: sd_notify(3)."""

from __future__ import annotations

import contextlib
import os
import socket


def notify_systemd(state: str) -> None:
    """Send `READY=1` and the like; does nothing where systemd did not ask. Never raises."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.connect("\0" + address[1:] if address.startswith("@") else address)
        sender.send(state.encode())


def watchdog_period_seconds() -> float | None:
    """Half of what systemd allows between two WATCHDOG=1; None if it does not watch this process."""
    allowed, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID")
    if not allowed.isdigit() or (pid is not None and pid != str(os.getpid())):
        return None
    return int(allowed) / 1e6 / 2
