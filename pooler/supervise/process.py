"""One start of one child: its process, its link, what it said of itself, and how it ended.

The process is waited for by pidfd, so its end is seen whatever its link does; its whole process group goes
with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
import trio

from coordinator.link import Args, Handler, Link
from pooler.observe.events import Event
from pooler.supervise.deathsig import end_with_parent
from pooler.supervise.oom import oom_kills

LINKLESS_SECONDS_MAX = 5.0  # a child whose link ended has 3 s to close what it can prove

ArgvFactory = Callable[[str, int], Sequence[str]]
"""(role, descriptor of the link) → the command line of a child."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended. `oom_kills` is how far the cgroup's counter rose while it lived."""

    code: int | None
    signal: int | None
    oom_kills: int

    @property
    def how(self) -> str:
        """As the ledger keeps it."""
        return f"exit code {self.code}" if self.signal is None else f"signal {self.signal}"

    def __str__(self) -> str:
        out_of_memory = self.signal == signal.SIGKILL and self.oom_kills > 0
        return f"{self.how} (out of memory: the kernel killed it)" if out_of_memory else self.how


class Process:
    """A running child. `ready` and `ended` are set once each; `settled` with the first of them."""

    def __init__(
        self, name: str, role: str, boot_id: str, popen: subprocess.Popen[bytes], ours: socket.socket
    ) -> None:
        self.name = name
        self.role = role
        self.boot_id = boot_id
        self.pid = popen.pid
        self.text = ""
        self.ready = trio.Event()
        self.ended = trio.Event()
        self.settled = trio.Event()  # ready or ended, whichever comes first
        self.ending: Ending | None = None
        self.is_noted = False  # its end is in the run directory
        self.started_at = trio.current_time()
        self.link: Link | None = None
        self._popen = popen
        self._ours = ours
        self._oom_kills = oom_kills()

    @classmethod
    def spawn(
        cls, name: str, role: str, boot_id: str, argv_of: ArgvFactory, descriptors: Sequence[int]
    ) -> Process:
        """Start it with its end of the link and the listening sockets, in a process group of its own.

        Raises OSError. Called from the main thread only (see deathsig).
        """
        ours, theirs = socket.socketpair()
        try:
            popen = subprocess.Popen(  # blocks for the fork only; trio's own would fork in a thread that ends
                list(argv_of(role, theirs.fileno())),
                pass_fds=(theirs.fileno(), *descriptors),
                stdin=subprocess.DEVNULL,
                process_group=0,
                preexec_fn=partial(end_with_parent, os.getpid()),  # noqa: PLW1509  (one system call, no locks)
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return cls(name, role, boot_id, popen, ours)

    @property
    def is_serving(self) -> bool:
        return self.ready.is_set() and not self.ended.is_set()

    async def run(self, handlers: Mapping[str, Handler]) -> None:
        """Serve its link until the process has ended; then `ending` says how and nothing of it is left."""
        own: dict[str, Handler] = {"ready": self._on_ready, "state": self._on_state}
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(self._ours))
        self.link = Link(stream, {**own, **handlers})
        pidfd = os.pidfd_open(self.pid)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._serve_link, self.link)
                await trio.lowlevel.wait_readable(pidfd)
                nursery.cancel_scope.cancel()
        finally:
            os.close(pidfd)
            self._reap()

    def signal(self, number: int) -> None:
        """Send a signal to its whole group; nothing if it has ended."""
        if self.ending is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def end_now(self) -> None:
        """Kill it, wait for it, note how it ended. For the last moments, when nothing else runs."""
        self.signal(signal.SIGKILL)
        self._reap()

    async def _serve_link(self, link: Link) -> None:
        try:
            await link.run()
        except* Exception as broken:
            log.error(Event.SOMETHING_FAILED, process=self.name, what="the link", exc_info=broken)
        # without a link it can neither be told anything nor say that it is well
        with trio.move_on_after(LINKLESS_SECONDS_MAX):
            await self.ended.wait()
        self.signal(signal.SIGKILL)

    def _reap(self) -> None:
        if self.ending is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # before the wait: its number is not free for another yet
        code = self._popen.wait()
        killed = max(0, oom_kills() - self._oom_kills)
        self.ending = Ending(code if code >= 0 else None, -code if code < 0 else None, killed)
        self._ours.close()
        self.ended.set()
        self.settled.set()

    async def _on_ready(self, args: Args) -> None:
        self.ready.set()
        self.settled.set()

    async def _on_state(self, args: Args) -> None:
        self.text = str(args.get("text", ""))[:500]
