"""What a server still owes: one entry for each message sent to it whose end can be seen in its answers.

The entries stand in a deque in the order of sending. Integers are answers that pass to the client; a
`Parsed` is a Parse (the client's own, or one that the pooler put in, whose answer it keeps back); a `Closed`
is the pooler's own Close of an evicted statement; a `Told` is an answer that the pooler gives itself. Pure.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from pooler.wire.prepared import Statement

REFUSED: Final = 0  # a query instead of which one was sent that fails
SYNC: Final = 1
QUERY: Final = 2
FUNCTION: Final = 3
BIND: Final = 4
DESCRIBE: Final = 5
EXECUTE: Final = 6
CLOSE: Final = 7

PARSE_COMPLETE: Final = b"1\x00\x00\x00\x04"
CLOSE_COMPLETE: Final = b"3\x00\x00\x00\x04"

Owed = deque[Any]


class Parsed:
    """A Parse on its way. If it fails or is skipped, `statement` is not on the session after all.

    `forward`: the client asked for it (under `name`; None: no name of its hangs on it) and gets the answer;
    else the pooler put it in. `named`:
    it is to have the pooler's name on the session; else it is the unnamed one, which was `before` to the
    client and is so again if this is skipped. `taken`: the name that it cannot have, as it is in use.
    `refused`: a text that fails was sent instead of the client's.
    """

    __slots__ = ("before", "forward", "name", "named", "refused", "statement", "taken")

    def __init__(
        self, statement: Statement, name: bytes | None, forward: bool, named: bool = True,
        before: Statement | None = None, taken: bytes = b"",
    ) -> None:
        self.statement = statement
        self.before = before
        self.taken = taken
        self.refused = False
        self.named = named
        self.name = name
        self.forward = forward

    def is_about(self, name: bytes | None, statement: Statement | None) -> bool:
        """Whether that name of the client's, or that statement of the session, hangs on it."""
        return self.statement is statement or (self.forward and name is not None and self.name == name)


class Closed:
    """The pooler's own Close, whose answer it keeps back. If it is skipped, the session still has `statement`
    (None: it was the unnamed one)."""

    __slots__ = ("statement",)

    def __init__(self, statement: Statement | None) -> None:
        self.statement = statement

    def is_about(self, _name: bytes | None, statement: Statement | None) -> bool:
        """As of a Parsed."""
        return statement is not None and self.statement is statement

    @property
    def drops_unnamed(self) -> bool:
        return self.statement is None


class Told:
    """An answer that the pooler gives itself once everything before it is answered.

    If it is skipped after an error, what it stood for did not happen: a Parse of `name` is forgotten, a Close
    of it (`closed` is what it meant) is taken back.
    """

    __slots__ = ("answer", "closed", "name")

    def __init__(self, answer: bytes, name: bytes, closed: Statement | None = None) -> None:
        self.answer = answer
        self.name = name
        self.closed = closed

    def is_about(self, name: bytes | None, _statement: Statement | None) -> bool:
        """As of a Parsed."""
        return self.name == name and (self.name != b"" or self.closed is not None)

    @property
    def drops_unnamed(self) -> bool:
        return self.closed is not None and not self.name


COPY_ENDED: Final = Told(b"", b"")  # CopyDone or CopyFail sent before COPY IN was seen to begin: no answer
Entry = Parsed | Closed | Told


def settle_error(owed: Owed) -> list[Entry]:
    """The server reported an error for an extended message: it skips everything, simple queries too, to the
    next Sync (one may still be to come). Returns what did not happen.
    """
    failed: list[Entry] = []
    while owed and owed[0] != SYNC:
        entry = owed.popleft()
        if type(entry) is not int and entry is not COPY_ENDED:
            failed.append(entry)
    return failed


def may_touch_unnamed(owed: Owed) -> bool:
    """Whether something up to the next Sync would replace or drop the session's unnamed statement."""
    for entry in owed:
        if entry == SYNC:
            return False
        if type(entry) is int:
            if entry == QUERY or entry == REFUSED or entry == FUNCTION or entry == CLOSE:
                return True
        elif not entry.named if type(entry) is Parsed else entry.drops_unnamed:
            return True
    return False


def is_superseded(owed: Owed, skipped: Entry) -> bool:
    """Whether what is still on its way makes or closes the name of what was skipped: then that holds. What is
    remembered there as having been before is from now on what was before `skipped`."""
    if isinstance(skipped, Closed) or skipped.name is None:
        return False
    if isinstance(skipped, Told):
        if skipped.name:
            return False
        before = skipped.closed
    elif skipped.forward:
        before = skipped.before
    else:
        return False
    for entry in owed:
        if type(entry) is Parsed and entry.forward and entry.name == skipped.name:
            if not entry.named:
                entry.before = before
            return True
        if type(entry) is Told and entry.name == skipped.name and (
                entry.closed is not None if entry.name else not entry.answer and entry is not COPY_ENDED):
            entry.closed = before
            return True
    return False


def ends_by_itself(owed: Owed) -> bool:
    """Whether what is answered now ends with its own ReadyForQuery even after an error."""
    return not owed or (type(owed[0]) is int and owed[0] <= FUNCTION)


def settle_ready(owed: Owed) -> list[Entry]:
    """ReadyForQuery: everything up to and with the Sync (or query) it answers is settled."""
    failed: list[Entry] = []
    while owed:
        entry = owed.popleft()
        if type(entry) is int and entry <= FUNCTION:
            break
        if type(entry) is not int and entry is not COPY_ENDED:
            failed.append(entry)
    return failed


def settle_copy_in(owed: Owed) -> tuple[int, bool]:
    """The server went into COPY IN for the first entry: it ignores the Syncs that follow at once.

    Returns how many, and whether the copy goes on: not if its end was sent already, nor if another message
    was, which the server takes as an error (then it skips to a Sync that counts).
    """
    ignored = 0
    while len(owed) > 1 and owed[1] == SYNC:
        del owed[1]
        ignored += 1
    if len(owed) > 1:
        if owed[1] is COPY_ENDED:
            del owed[1]
        return ignored, False
    return ignored, True


def readies_owed(owed: Owed) -> int:
    """How many ReadyForQuery are still to come."""
    return sum(1 for entry in owed if type(entry) is int and entry <= FUNCTION)
