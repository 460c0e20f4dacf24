"""`max_user_connections`: places for the sessions of one server user over all pools of a worker. Pure.

Who finds none stands in line, and a place that comes free goes to the head of it, whichever pool that is.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable


class Turn:
    """One opening: it has a place, or waits for one. `on_place` is called when it has got one."""

    __slots__ = ("has_place", "on_place", "user")

    def __init__(self, user: str, on_place: Callable[[], object] = bool) -> None:
        self.user, self.on_place = user, on_place
        self.has_place = False


class UserPlaces:
    """The places that are taken, by openings and by sessions, and who waits for one."""

    def __init__(self) -> None:
        self._taken = Counter[str]()
        self._lines: dict[str, OrderedDict[Turn, None]] = {}
        self._users: dict[Hashable, str] = {}  # of each session
        self._limits: dict[str, int] = {}  # of those with a line

    def ask(self, turn: Turn, limit: int) -> bool:
        """Whether it has a place (`limit` 0: there is always one); else it stands where it stood in line."""
        if not turn.has_place:
            self._limits[turn.user] = limit
            self._lines.setdefault(turn.user, OrderedDict()).setdefault(turn)
            self._hand_out(turn.user)
        return turn.has_place

    def leave(self, turn: Turn) -> None:
        """It wants none any more: out of the line, or its place is free."""
        if turn.has_place:
            turn.has_place = False
            self._free(turn.user)
        elif turn.user in self._lines:
            self._lines[turn.user].pop(turn, None)
            self._hand_out(turn.user)

    def settle(self, turn: Turn, session: Hashable) -> None:
        """What it opened has its place from now on."""
        assert turn.has_place
        turn.has_place = False
        self._users[session] = turn.user

    def ended(self, session: Hashable) -> None:
        """A session is closed."""
        user = self._users.pop(session, None)
        if user is not None:
            self._free(user)

    def taken(self, user: str) -> int:
        """How many places are."""
        return self._taken[user]

    def waiting(self, user: str) -> int:
        """How many stand in line."""
        return len(self._lines.get(user, ()))

    def _free(self, user: str) -> None:
        self._taken[user] -= 1
        self._hand_out(user)
        if not self._taken[user]:
            del self._taken[user]

    def _hand_out(self, user: str) -> None:
        line = self._lines.get(user)
        if line is None:
            return
        limit = self._limits[user]
        while line and (not limit or self._taken[user] < limit):
            turn, _ = line.popitem(last=False)
            self._taken[user] += 1
            turn.has_place = True
            turn.on_place()
        if not line:
            del self._lines[user], self._limits[user]
