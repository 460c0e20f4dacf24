"""Secrets of users that are asked of the server (PgBouncer's auth_query).

Every login asks, so that a password changed a moment ago counts at once; logins of one user that come while
it is being asked for share the next question. An answer may be kept for a short time if the configuration
says so. Bounded in entries and in time; who asks, and whom, is the caller's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from pooler.errors import PoolerError
from pooler.wire.auth import Secret

DEFAULT_QUERY = (  # PgBouncer's
    "SELECT rolname, CASE WHEN rolvaliduntil < now() THEN NULL ELSE rolpassword END "
    "FROM pg_authid WHERE rolname=$1 AND rolcanlogin")
# what a query finds by an unqualified name must not depend on who had the session before
SESSION_SETTINGS = "SET LOCAL search_path = pg_catalog, public, pg_temp; SET LOCAL client_encoding = 'UTF8'"
ENTRIES_MAX = 10_000
SECRET_BYTES_MAX = 65_536


@dataclass(frozen=True, slots=True)
class Place:
    """Where a user is looked up: an entry of `databases`, as whom, by which query."""

    name: str
    user: str
    query: str


NO_PASSWORD_FITS = Secret(plain=b"")  # of one who is there
Key = tuple[Place, str]
Ask = Callable[[Place, str], Awaitable[Secret | None]]


@dataclass(slots=True, eq=False)
class _Round:
    """One question and its answer."""

    done: trio.Event = field(default_factory=trio.Event)
    secret: Secret | None = field(default=None, repr=False)
    error: PoolerError | None = None


@dataclass(slots=True)
class _Line:
    """The question that is out, and the one that those who came since will share."""

    out: _Round
    next: _Round | None = None


class AskedSecrets:
    """What `ask` answers, asked no more often than needed. `ask` raises PoolerError; `start` runs a task.

    `now` is a clock in seconds; `keep_seconds` how long an answer serves further logins (0: not at all).
    """

    def __init__(
        self,
        ask: Ask,
        start: Callable[..., None],
        now: Callable[[], float],
        *,
        keep_seconds: float = 0.0,
        entries_max: int = ENTRIES_MAX,
    ) -> None:
        self._ask = ask
        self._start = start
        self._now = now
        self.keep_seconds = keep_seconds
        self._entries_max = entries_max
        self._lines: dict[Key, _Line] = {}
        self._kept: OrderedDict[Key, tuple[Secret | None, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    async def find(self, place: Place, user: str) -> Secret | None:
        """The secret of a user, None for one that does not exist or may not log in. Raises as `ask`."""
        kept = self._kept.get((place, user))
        if kept is not None and self._now() - kept[1] < self.keep_seconds:
            await trio.lowlevel.checkpoint()
            return kept[0]
        return await self._answer(place, user)

    async def ask_again(self, place: Place, user: str, wrong: Secret | None) -> Secret | None:
        """A newer secret than one that was kept and just found wrong; None if there is none. What was asked
        for in the same login is as new as can be."""
        if self._kept.pop((place, user), None) is None:
            return None
        found = await self._answer(place, user)
        return None if found == wrong else found

    def forget(self) -> None:
        """The configuration changed."""
        self._kept.clear()

    async def _answer(self, place: Place, user: str) -> Secret | None:
        joined = self._join((place, user))
        await joined.done.wait()
        if joined.error is not None:
            raise joined.error
        return joined.secret

    def _join(self, key: Key) -> _Round:
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(_Round())
            self._start(self._run, key, line)
            return line.out
        line.next = line.next or _Round()
        return line.next

    async def _run(self, key: Key, line: _Line) -> None:
        while True:
            try:
                line.out.secret = await self._ask(*key)
            except PoolerError as error:
                line.out.error = error
            else:
                self._keep(key, line.out.secret)
            line.out.done.set()
            if line.next is None:
                del self._lines[key]
                return
            line.out, line.next = line.next, None

    def _keep(self, key: Key, secret: Secret | None) -> None:
        if self.keep_seconds <= 0:
            return
        self._kept[key] = (secret, self._now())
        self._kept.move_to_end(key)
        while len(self._kept) > self._entries_max:
            self._kept.popitem(last=False)


def read_answer(rows: list[list[bytes | None]]) -> Secret | None:
    """The secret in the answer to an auth_query: name and secret, or no row. A NULL secret is that of a user
    whom no password lets in. Raises ValueError for an answer of another shape, without showing it."""
    if not rows:
        return None
    if len(rows) > 1:
        raise ValueError("gave more than one row")
    if len(rows[0]) < 2:
        raise ValueError("must give two columns: the name and the secret")
    stored = rows[0][1]
    if stored is None:
        return NO_PASSWORD_FITS
    if len(stored) > SECRET_BYTES_MAX:
        raise ValueError("gave an over-long secret")
    return Secret.parse(stored)
