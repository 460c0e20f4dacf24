"""How many cancel requests for one client are under way: one, and one more that waits for it.

Whoever comes later joins the one that waits: it is sent after he came, and that is all he can want. So any
number of requests for one client costs two connections to its server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
import trio

from pooler.observe.events import Event

log = structlog.get_logger()


class _Turn:
    """One request on its way, and the one behind it if there is one."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.next: _Turn | None = None


class Turns:
    """By whom they are aimed at. What is carried out lives in `nursery` and not with who asked for it: it
    goes on when he leaves."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._now: dict[bytes, _Turn] = {}

    def __len__(self) -> int:
        return len(self._now)

    async def take(self, key: bytes, act: Callable[[], Awaitable[None]]) -> None:
        """Returns when an `act` that began after this call has ended."""
        now = self._now.get(key)
        if now is None:
            turn = self._now[key] = _Turn()
            self._nursery.start_soon(self._run, key, turn, act)
        else:
            turn = now.next = now.next or _Turn()
        await turn.done.wait()

    async def _run(self, key: bytes, turn: _Turn | None, act: Callable[[], Awaitable[None]]) -> None:
        try:
            while turn is not None:
                self._now[key] = turn
                try:
                    await act()
                except Exception:  # of this request alone: whoever else lives in the nursery goes on
                    log.exception(Event.SOMETHING_FAILED, where="cancel request")
                finally:
                    turn.done.set()
                turn = turn.next
        finally:
            self._now.pop(key, None)
