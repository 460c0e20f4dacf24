"""What the coordinator must learn, sooner or later: kept, and repeated until it is answered."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
import trio

from coordinator.link import Args, LinkRefused
from pooler.observe.events import Event
from pooler.pool.link_up import Uplink

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class _Errand:
    op: str
    args: Args
    done: Callable[[str], None]


class Errands:
    """All that is still to be told. `run()` carries them, each in a task of its own: one never waits for
    another."""

    def __init__(self, uplink: Uplink) -> None:
        self._uplink = uplink
        self._open: set[_Errand] = set()
        self._one_done = trio.Event()
        self._send, self._receive = trio.open_memory_channel[Callable[[], Awaitable[None]]](math.inf)

    def __len__(self) -> int:
        return len(self._open)

    def tell(self, op: str, done: Callable[[str], None], /, **args: Any) -> None:
        """Returns at once. `done` is called once answered, with the code of a refusal that stands, or ""."""
        errand = _Errand(op, args, done)
        self._open.add(errand)
        self.start(partial(self._carry, errand))

    def start(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run a task beside them."""
        self._send.send_nowait(task)

    async def settled(self) -> None:
        """Wait until everything told was answered."""
        while self._open:
            await self._one_done.wait()

    async def run(self) -> None:
        """For ever."""
        async with trio.open_nursery() as nursery:
            async for task in self._receive:
                nursery.start_soon(task)

    async def _carry(self, errand: _Errand) -> None:
        refusal = ""
        try:
            await self._uplink.insist(errand.op, **errand.args)
        except LinkRefused as refused:
            refusal = refused.code
            if refusal != "gone":
                log.error(Event.SOMETHING_FAILED, what=errand.op, code=refusal, why=refused.message,
                          **errand.args)
        errand.done(refusal)
        self._open.discard(errand)
        self._one_done.set()
        self._one_done = trio.Event()
