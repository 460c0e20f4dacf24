"""Processes of a supervisor that died: waited for, ended if they linger, and their end noted.

They saw end of file on their link and need up to 3 s to close their sessions with proof; a new fleet waits
for that, as they still hold its sockets.
"""

from __future__ import annotations

import contextlib
import os
import signal

import structlog
import trio

from pooler.observe.events import Event
from pooler.supervise.exits import Boot, ExitFiles, how_it_is_gone, is_running
from pooler.supervise.place import WORKER

PATIENCE_SECONDS = 5.0

log = structlog.get_logger()


async def settle_left_overs(files: ExitFiles) -> None:
    """Every boot noted by an earlier supervisor is dead and noted so, or not provably dead and stays noted.

    Raises OSError when the run directory cannot be written.
    """
    async with trio.open_nursery() as nursery:
        for boot in files.left_over():
            nursery.start_soon(_settle, files, boot)


async def _settle(files: ExitFiles, boot: Boot) -> None:
    if how_it_is_gone(boot) is None:
        await _await_end(boot)
    how = how_it_is_gone(boot)
    if how is None:
        log.warning(
            Event.SOMETHING_FAILED, what="an earlier process cannot be proven dead", boot_id=boot.boot_id,
            pid=boot.pid, hint="`pooler ledger resolve DB --owner BOOT --evidence TEXT` once it is")
    elif boot.role == WORKER:
        name = f"{boot.role} {boot.index}"
        log.warning(Event.PROCESS_EXITED, process=name, boot_id=boot.boot_id, how=how)
        files.note_exit(boot.boot_id, how)
    else:
        files.forget(boot.boot_id)


async def _await_end(boot: Boot) -> None:
    try:
        pidfd = os.pidfd_open(boot.pid)
    except OSError:
        return
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            # looked at after the pidfd was opened: it is that very process, or none of ours
            if not is_running(boot):
                return
            with trio.move_on_after(PATIENCE_SECONDS):
                await trio.lowlevel.wait_readable(pidfd)
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(boot.pid, number)
        with trio.move_on_after(PATIENCE_SECONDS):
            await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)
