"""One trio task that waits on an epoll of its own and calls plain methods for what is ready.

Everything with a lifetime is a trio task elsewhere; the bytes of logged-in clients and open sessions move
here, without a task, a checkpoint or an allocation per message.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from time import monotonic

import structlog
import trio

from pooler.observe.events import Event

IN = select.EPOLLIN
READ = select.EPOLLIN | select.EPOLLRDHUP
QUIET = select.EPOLLRDHUP  # nothing is read, but a peer that leaves is noticed
WRITE = select.EPOLLOUT
GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
EVENTS_MAX = 64  # of a batch: what is put off to its end waits a millisecond at most
# A turn of trio's own loop costs as much as several messages. So while messages keep coming the reactor asks
# its epoll again, waiting up to a millisecond for the next ones, and lets trio have its turn after a bounded
# time: what other tasks wait for may be that much late, never more.
LINGER_SECONDS = 0.001
TURN_SECONDS_MAX = 0.005

log = structlog.get_logger()


class Reactor:
    """Calls `handler(mask)` for each descriptor that is ready."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._in_batch = False
        self._ends: list[Callable[[], None]] = []
        self._held: trio.Event | None = None
        self.turns = 0
        self.faults = 0

    def add(self, fd: int, handler: Callable[[int], None], mask: int = READ) -> None:
        """Watch a descriptor (level-triggered)."""
        self._handlers[fd] = handler
        self._epoll.register(fd, mask)

    def change(self, fd: int, mask: int) -> None:
        """Watch it for something else."""
        self._epoll.modify(fd, mask)

    def remove(self, fd: int) -> None:
        """Forget a descriptor before it is closed or given away; unknown ones are ignored."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def at_end(self, call: Callable[[], None]) -> None:
        """Call it behind the events of this batch; at once if none is being handled."""
        if self._in_batch:
            self._ends.append(call)
        else:
            call()

    def hold(self) -> None:
        """Call no handler until release(): what peers send stays with the kernel."""
        if self._held is None:
            self._held = trio.Event()

    def release(self) -> None:
        """Go on; nothing if it is not held."""
        if self._held is not None:
            self._held.set()
            self._held = None

    async def run(self) -> None:
        """Serve until cancelled."""
        fileno = self._epoll.fileno()
        try:
            while True:
                if self._held is not None:
                    await self._held.wait()
                await trio.lowlevel.wait_readable(fileno)
                if self._held is None:
                    self._turn()
        finally:
            self._epoll.close()

    def _turn(self) -> None:
        handlers, ends = self._handlers, self._ends
        poll = self._epoll.poll
        end = monotonic() + TURN_SECONDS_MAX
        wait_seconds = 0.0
        while events := poll(wait_seconds, EVENTS_MAX):
            self.turns += 1
            self._in_batch = True
            for fd, mask in events:
                handler = handlers.get(fd)  # an earlier event of this batch may have removed it
                if handler is not None:
                    try:
                        handler(mask)
                    except Exception:  # noqa: BLE001 - see _fault
                        self.remove(fd)
                        self._fault(handler)
            self._in_batch = False
            for call in ends:
                try:
                    call()
                except Exception:  # noqa: BLE001 - see _fault
                    self._fault(call)
            ends.clear()
            if monotonic() >= end:
                return
            wait_seconds = LINGER_SECONDS

    def _fault(self, call: Callable[..., None]) -> None:
        # our own bug in one connection must not take the others down; it is loud and counted
        self.faults += 1
        owner = getattr(call, "__self__", None)
        log.exception(Event.SOMETHING_FAILED, where="relay", what=type(owner).__name__)
        if owner is not None:
            try:
                owner.fault()
            except Exception:
                log.exception(Event.SOMETHING_FAILED, where="relay, ending a connection")
