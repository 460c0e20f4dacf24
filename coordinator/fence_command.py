"""The operator's command that fences: what it is told, and how it is run: bounded, unheard."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import trio

from coordinator.ledger.record import Backend

COMMAND_SECONDS_MAX = 60.0
# of the environment, what a shell and its tools need; the fleet's secrets may be in the rest
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "SSH_AUTH_SOCK")

Run = Callable[[str, Mapping[str, str]], Awaitable[int | None]]
"""(command line, environment) → its exit code; None: it did not end in time. Raises OSError, ValueError,
subprocess.SubprocessError where it cannot be started."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended; `is_off`: it says that the node is off."""

    is_off: bool
    how: str


async def run_command(command: str, environment: Mapping[str, str]) -> int | None:
    """Runs it in a shell, without input and with nobody to hear what it says. See Run."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    process = await trio.lowlevel.open_process(
        ["/bin/sh", "-c", command], env={**kept, **environment}, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    code: int | None = None
    try:
        with trio.move_on_after(COMMAND_SECONDS_MAX):
            code = await process.wait()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with trio.move_on_after(1.0, shield=True):
                await process.wait()
    return code


async def outcome_of(run: Run, command: str, environment: Mapping[str, str]) -> Ended:
    """Runs it. That it cannot be started is an outcome, too, of which only the reason is said."""
    try:
        code = await run(command, environment)
    except OSError as fault:
        return Ended(False, f"not started: {os.strerror(fault.errno) if fault.errno else 'OSError'}")
    except (ValueError, subprocess.SubprocessError) as fault:  # of the command line, which is not told
        return Ended(False, f"not started: {type(fault).__name__}")
    if code is None:
        return Ended(False, f"not ended within {COMMAND_SECONDS_MAX:g} s")
    return Ended(code == 0, f"exit code {code}")


def environment_for(db: str, backend: Backend) -> dict[str, str]:
    """What the command is told: the node, and a ledger that was served there."""
    host, _, port = backend.address.rpartition(":")
    told = {"DATABASE": db, "ADDRESS": backend.address, "HOST": host.strip("[]"), "PORT": port,
            "SYSTEM_IDENTIFIER": backend.system_identifier}
    return {f"POOLER_FENCE_{name}": value for name, value in told.items()}
