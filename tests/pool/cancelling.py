"""Cancel a task after its n-th step: for tests that cancel at every step in turn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

T = TypeVar("T")


class CancelAtStep(trio.abc.Instrument):
    """Cancels `scope` once `task` has taken `steps` steps (0: after its first)."""

    def __init__(self, task: trio.lowlevel.Task, scope: trio.CancelScope, steps: int) -> None:
        self._task = task
        self._scope = scope
        self._left = steps
        self.fired = False

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Trio's call."""
        if task is self._task and not self.fired:
            self._left -= 1
            if self._left < 0:
                self.fired = True
                self._scope.cancel()


async def run_cancelled(operation: Callable[[], Awaitable[T]], steps: int) -> tuple[bool, T | None]:
    """Run it in a task of its own, cancelled after `steps` steps: whether that still found it, its result."""
    results: list[T] = []
    scope = trio.CancelScope()
    instrument: CancelAtStep | None = None

    async def victim() -> None:
        nonlocal instrument
        instrument = CancelAtStep(trio.lowlevel.current_task(), scope, steps)
        trio.lowlevel.add_instrument(instrument)
        with scope:
            results.append(await operation())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(victim)
    assert instrument is not None
    trio.lowlevel.remove_instrument(instrument)
    return instrument.fired, results[0] if results else None
