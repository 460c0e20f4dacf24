"""Which specification is asked for, and which is served: what a reload waits for."""

from __future__ import annotations

from dataclasses import replace

import trio

from coordinator.spec import CoordinatorSpec


class Renewal:
    """One serves at a time; who asks for another is answered once what serves is the latest."""

    def __init__(self) -> None:
        self.asked: CoordinatorSpec | None = None
        self._served: CoordinatorSpec | None = None
        self._anew = trio.Event()  # another is served, and this is another event
        self.other = trio.Event()  # what serves is to end

    def ask(self, spec: CoordinatorSpec) -> None:
        """From now on it is this one."""
        self.asked = spec

    def begin(self) -> CoordinatorSpec:
        """What to serve now. Precondition: one was asked for."""
        assert self.asked is not None
        self.other = trio.Event()
        return self.asked

    def serves(self, spec: CoordinatorSpec) -> None:
        """What `begin` gave is served."""
        self._served = spec
        self._anew.set()
        self._anew = trio.Event()

    async def until_served(self, seconds_max: float) -> bool:
        """Whether the latest that was asked for is served within the time. The log is followed at once: one
        that differs in that alone is served already."""
        with trio.move_on_after(seconds_max):
            while not self._is_latest():
                await self._anew.wait()
        return self._is_latest()

    def _is_latest(self) -> bool:
        served, asked = self._served, self.asked
        return served is not None and asked is not None and replace(served, log=asked.log) == asked
