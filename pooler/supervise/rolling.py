"""A rolling restart: one worker at a time, its replacement ready on the same sockets before it is drained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import trio

from coordinator.link import LinkLost, LinkRefused
from pooler.supervise.place import Place
from pooler.supervise.process import Process

DRAIN_MARGIN_SECONDS = 2.0
EXIT_DONE, EXIT_FAILED, EXIT_TIMED_OUT = 0, 1, 4

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Rolled:
    """How it ended: `code` is the command's exit code, `text` what to tell."""

    code: int
    text: str


class Hands(Protocol):
    """What a roll asks of the supervisor."""

    def start(self, place: Place) -> Process:
        """Start a process beside the current one, among `place.others`. Raises OSError."""

    async def end(self, process: Process) -> None:
        """Stop it in order, then for certain."""

    def retire(self, process: Process) -> None:
        """Let it go on until its clients are gone, then end it."""


async def roll_workers(places: list[Place], hands: Hands, timeout_seconds: float, say: Say) -> Rolled:
    """Replace every worker. `timeout_seconds` bounds each worker's start and drain together.

    Stops at the first that does not come up (code 1) or whose clients do not leave in time (code 4): that one
    goes on serving them beside its replacement, and the workers after it are left as they are.
    """
    for place in places:
        failed = await _replace(place, hands, timeout_seconds, say)
        if failed is not None:
            return failed
    return Rolled(EXIT_DONE, f"{len(places)} workers replaced")


async def _replace(place: Place, hands: Hands, timeout_seconds: float, say: Say) -> Rolled | None:
    deadline = trio.current_time() + timeout_seconds
    try:
        process = hands.start(place)
    except OSError as fault:
        return Rolled(EXIT_FAILED, f"{place.name}: cannot start its replacement: {fault.strerror}")
    say(f"{place.name}: pid {process.pid} starts")
    with trio.move_on_at(deadline):
        await process.settled.wait()
    if not process.is_serving:
        why = str(process.ending) if process.ending else f"not ready after {timeout_seconds:g} s"
        await hands.end(process)
        text = f"{place.name}: its replacement did not come up ({why}); nothing changed"
        return Rolled(EXIT_FAILED, text)
    place.is_down = False
    old = place.take_over(process)
    say(f"{place.name}: pid {process.pid} serves")
    if old is None:
        return None
    say(f"{place.name}: pid {old.pid} is drained")
    holders = await drain(old, max(0.0, deadline - trio.current_time()))
    if holders is not None:
        hands.retire(old)
        return Rolled(EXIT_TIMED_OUT, f"{place.name}: pid {old.pid} is still held after {timeout_seconds:g} s"
                                      f"{holders}; it ends when its clients leave; stopped here")
    await hands.end(old)
    return None


async def drain(process: Process, timeout_seconds: float, *, last: bool = False) -> str | None:
    """Ask a worker to let its clients go; the `last` of a fleet tells those who come that it ends. None: they
    (or it) are gone; else who holds it, as a suffix."""
    link, started = process.link, trio.current_time()
    if link is None or not process.is_serving:
        return None
    try:
        with trio.move_on_after(timeout_seconds + DRAIN_MARGIN_SECONDS):
            answer = await link.call("drain", timeout_seconds=timeout_seconds, last=last)
            if isinstance(answer, dict) and "clients" in answer:
                return None if not answer["clients"] else await _holders(process, answer["clients"])
            if trio.current_time() - started < timeout_seconds:
                return None
        return await _holders(process, None)
    except LinkLost:
        return None
    except LinkRefused as refused:
        return f" ({refused.message})"


async def _holders(process: Process, clients: int | None) -> str:
    held = await figures_of(process)
    holders = held.get("holders", ())
    told = [str(each) for each in holders][:5] if isinstance(holders, list) else []
    counted = clients if clients is not None else held.get("clients")
    count = f" ({counted} clients)" if counted is not None else ""
    return f"{count}: {', '.join(told)}" if told else count


async def figures_of(process: Process, timeout_seconds: float = 2.0) -> dict[str, object]:
    """What the process says of itself; empty if it does not answer in time."""
    if process.link is None or not process.is_serving:
        return {}
    try:
        with trio.move_on_after(timeout_seconds):
            answer = await process.link.call("status")
            return answer if isinstance(answer, dict) else {}
    except (LinkLost, LinkRefused):
        pass
    return {}
