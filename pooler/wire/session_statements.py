"""Which prepared statements one server session has."""

from __future__ import annotations

from collections import OrderedDict

from pooler.wire.prepared import Statement


class SessionStatements:
    """What one server session has prepared under server names, least recently used first.

    `unnamed` is the statement whose text the session's unnamed statement is now; a simple Query destroys that
    one, so whoever sends a Query sets it to None. The order is that of what was sent, not of what was
    answered: what the server then skipped after an error is put right with `remove` (a Parse) and `restore`
    (a Close). `young` are those whose Parse or Close may be unanswered, and such names of the client's, each
    with the number of the `group` that it was last sent in; a Sync ends a group.
    """

    __slots__ = ("_held", "group", "limit", "unnamed", "young")

    def __init__(self, limit: int) -> None:
        self._held: OrderedDict[Statement, None] = OrderedDict()
        self.young: dict[Statement | bytes | None, int] = {}
        self.group = 0
        self.limit = limit
        self.unnamed: Statement | None = None

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, statement: Statement) -> bool:
        return statement in self._held

    def touch(self, statement: Statement) -> bool:
        """Mark as just used; False if the session does not have it."""
        try:
            self._held.move_to_end(statement)
        except KeyError:
            return False
        return True

    def add(self, statement: Statement) -> list[Statement]:
        """A Parse for it is being sent. Returns what to Close first so that the limit holds.

        Precondition: the session does not have it.
        """
        assert statement not in self._held
        evicted: list[Statement] = []
        while len(self._held) >= max(self.limit, 1):
            evicted.append(self._held.popitem(last=False)[0])
        self.young.update(dict.fromkeys(evicted, self.group))
        self._held[statement] = None
        self.young[statement] = self.group
        return evicted

    def remove(self, statement: Statement) -> None:
        """The session does not have it: its Parse failed or was skipped, or it was closed."""
        self._held.pop(statement, None)
        if self.unnamed is statement:
            self.unnamed = None

    def restore(self, statement: Statement) -> None:
        """The session still has it after all: the Close was skipped. It is the first to go next time."""
        self._held[statement] = None
        self._held.move_to_end(statement, last=False)

    def clear(self) -> None:
        """The session has none: after DISCARD ALL or DEALLOCATE ALL."""
        self._held.clear()
        self.unnamed = None
