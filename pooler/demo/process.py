"""Child processes that never outlive the one that started them, and ports to give them.

Decides how a part is started and ended; what it runs is the caller's. Everything here blocks: the callers are
commands and test fixtures, not the data plane.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import random
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
_ACCOUNTS = ("postgres", "embedded_postgres", "nobody")
_TICK_SECONDS = 0.02
# Below the kernel's range for outgoing connections (32768 up), so that no client socket takes one meanwhile.
_PORTS = range(12_000, 32_000)

_libc = ctypes.CDLL(None, use_errno=True)
_handed_out: set[int] = set()
_chance = random.SystemRandom()


class PartFailed(Exception):
    """A part did not start, or ended by itself. The text has the end of its log."""


@dataclass(frozen=True, slots=True)
class Account:
    """A system user for a program that refuses to run as root."""

    name: str
    uid: int
    gid: int

    @classmethod
    def named(cls, name: str) -> Account:
        """Raises KeyError when there is no such user."""
        entry = pwd.getpwnam(name)
        return cls(name, entry.pw_uid, entry.pw_gid)


class Child:
    """One running part. `die_signal` is what the kernel sends it when the thread that started it ends:
    start children from a thread that lives as long as they should (the main one); None keeps them alive.
    """

    def __init__(
        self,
        argv: Sequence[str | Path],
        log: Path,
        *,
        account: Account | None = None,
        die_signal: signal.Signals | None = signal.SIGKILL,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.argv = [str(word) for word in argv]
        self.log = log
        with log.open("ab") as output:
            self.process = self._start(output, account, die_signal, env)

    @property
    def pid(self) -> int:
        return self.process.pid

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def stop(self, how: signal.Signals = signal.SIGTERM, timeout_seconds: float = 20) -> int:
        """Ask it to end, kill it if it does not in time, and return its exit status."""
        if self.is_alive():
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(how)
        try:
            return self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def wait(self, timeout_seconds: float) -> int:
        """Its exit status, once it has ended. Raises PartFailed when the time is over first."""
        try:
            return self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise PartFailed(f"{self.argv[0]} has not ended within {timeout_seconds:g} s") from None

    def wait_until(self, fact: Callable[[], bool], what: str, timeout_seconds: float = 30) -> None:
        """Return when `fact` holds. Raises PartFailed when the child ends before, or the time is over."""
        deadline = time.monotonic() + timeout_seconds
        while not fact():
            try:
                status = self.process.wait(_TICK_SECONDS)
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    raise PartFailed(f"{what}: not within {timeout_seconds:g} s\n{self.log_end()}") from None
            else:
                raise PartFailed(f"{what}: {self.argv[0]} ended with status {status}\n{self.log_end()}")

    def log_end(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _start(
        self,
        output: IO[bytes],
        account: Account | None,
        die_signal: signal.Signals | None,
        env: Mapping[str, str] | None,
    ) -> subprocess.Popen[bytes]:
        parent = os.getpid()

        def in_child() -> None:  # runs after the change of user, which clears the setting
            if die_signal is not None:
                _libc.prctl(_PR_SET_PDEATHSIG, int(die_signal))
                if os.getppid() != parent:
                    os._exit(1)

        return subprocess.Popen(
            self.argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env=None if env is None else {**os.environ, **env},
            start_new_session=True,  # Ctrl-C reaches the starter only: it ends its parts in order
            preexec_fn=in_child,  # noqa: PLW1509  prctl has no other place
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
        )


def unprivileged() -> Account | None:
    """Who runs PostgreSQL: ourselves, or where we are root the first of the users that exists."""
    if os.geteuid() != 0:
        return None
    for name in _ACCOUNTS:
        try:
            return Account.named(name)
        except KeyError:
            continue
    raise PartFailed(f"PostgreSQL refuses to run as root and none of {', '.join(_ACCOUNTS)} exists")


def free_ports(count: int = 1) -> int:
    """The first of `count` consecutive loopback ports that are free now, each handed out once."""
    for _ in range(1_000):
        first = _chance.choice(_PORTS[:-count])
        wanted = range(first, first + count)
        if _handed_out.isdisjoint(wanted) and all(_is_free(port) for port in wanted):
            _handed_out.update(wanted)
            return first
    raise PartFailed(f"no {count} consecutive free ports between {_PORTS.start} and {_PORTS.stop}")


def accepts(port: int, host: str = "127.0.0.1") -> bool:
    """Does somebody accept connections there?"""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0


def started_at(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty when it is gone or only waits to be reaped."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if words[0] == "Z" else words[19]


def has_ended(pidfd: int, timeout_seconds: float) -> bool:
    """Wait for the end of any process by its pidfd; False when the time is over first."""
    return bool(select.select([pidfd], [], [], timeout_seconds)[0])


def process_ids(parent: int) -> set[int]:
    """Every living descendant of a process."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # it ended meanwhile
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found: set[int] = set()
    waiting = [parent]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.add(child)
            waiting.append(child)
    return found


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
