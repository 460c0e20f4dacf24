"""The session that a client of session pooling is told of at its login.

A client is told a process id when it is greeted, and drivers take it for that of their session: they look
for it in pg_stat_activity and in notifications. So the client is promised an idle session before it is
greeted, one is opened where the pool has room and the ledger a permit to spare, and its first query gets
that very session, unless it ended or somebody had to have it meanwhile. Nothing is held: a client that never
asks for anything takes nothing from those that do.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from pooler.admission.ticket import Ticket
    from pooler.pool.pool import Pool
    from pooler.relay.server import ServerConn

WAIT_SECONDS_MAX: Final = 1.0  # for an opening; a login is not kept longer for what it can do without


class Promises:
    """The logins of one pool that wait to be told of a session."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiting: dict[trio.Event, None] = {}

    async def session(self) -> ServerConn | None:
        """One for a client that is to be greeted: the caller sets its ticket's `promised`, or breaks the
        promise. None: there is none to be had without taking it from somebody."""
        if not self._pool.holds_session:
            return None
        with trio.move_on_after(WAIT_SECONDS_MAX):
            while (server := self._pool.core.promise()) is None:
                if not self._may_grow() or not await self._opening():
                    return None
            return server
        return None

    def forget(self, ticket: Ticket) -> None:
        """Its holder is gone, or is served elsewhere from now on."""
        session, ticket.promised = ticket.promised, None
        if session is not None:
            self._pool.core.break_promise(session)

    def _may_grow(self) -> bool:
        core = self._pool.core
        has_room = core.total - core.opening + len(self._waiting) < core.size_max
        fails = self._pool.growth.is_pausing(monotonic())
        return has_room and not core.blocked and not core.waiting and not fails

    async def _opening(self) -> bool:
        """Wait for the end of one. False: it is of no use to wait for another."""
        event = trio.Event()
        self._waiting[event] = None
        self._count()
        try:
            self._pool.grow()
            await event.wait()
            return event in self._waiting
        finally:
            self._waiting.pop(event, None)
            self._count()

    def tried(self) -> None:
        """An opening came to an end: those who wait look whether there is an idle session."""
        for event in self._waiting:
            event.set()

    def none_left(self) -> None:
        """There is no permit to spare, or the server lets nobody in: all do without."""
        waiting, self._waiting = self._waiting, {}
        self._count()
        for event in waiting:
            event.set()

    def _count(self) -> None:
        self._pool.core.logins = len(self._waiting)
