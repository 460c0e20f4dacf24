"""What a server still owes: one entry for each message sent to it whose end can be seen in its answers.

The entries stand in a deque in the order of sending. Integers are answers that pass to the client; a
`Parsed` is a Parse (the client's own, or one that the pooler put in, whose answer it keeps back); a `Told`
is an answer that the pooler gives itself. Pure.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from pooler.wire.prepared import Statement

SYNC: Final = 1
QUERY: Final = 2
FUNCTION: Final = 3
BIND: Final = 4
DESCRIBE: Final = 5
EXECUTE: Final = 6
CLOSE: Final = 7
CLOSE_OWN: Final = 8  # the pooler's own Close of an evicted statement: its answer is kept back

PARSE_COMPLETE: Final = b"1\x00\x00\x00\x04"
CLOSE_COMPLETE: Final = b"3\x00\x00\x00\x04"

Owed = deque[Any]


class Parsed:
    """A Parse on its way. If it fails or is skipped, `statement` is not on the session after all.

    `forward`: the client asked for it (under `name`) and gets the answer; else the pooler put it in.
    """

    __slots__ = ("forward", "name", "statement")

    def __init__(self, statement: Statement, name: bytes, forward: bool) -> None:
        self.statement = statement
        self.name = name
        self.forward = forward


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


def settle_error(owed: Owed) -> list[Parsed | Told]:
    """The server reported an error: it skips to the next Sync. Returns what did not happen.

    A simple query or function call ends by its own ReadyForQuery, so nothing is skipped for it.
    """
    failed: list[Parsed | Told] = []
    while owed:
        entry = owed[0]
        if type(entry) is int and entry <= FUNCTION:
            break
        if type(entry) is not int:
            failed.append(entry)
        owed.popleft()
    return failed


def settle_ready(owed: Owed) -> list[Parsed | Told]:
    """ReadyForQuery: everything up to and with the Sync (or query) it answers is settled."""
    failed: list[Parsed | Told] = []
    while owed:
        entry = owed.popleft()
        if type(entry) is int and entry <= FUNCTION:
            break
        if type(entry) is not int:
            failed.append(entry)
    return failed


def forget_syncs(owed: Owed) -> None:
    """The server went into COPY IN for the first entry: it ignores every Sync that was already sent."""
    kept = [entry for entry in owed if entry != SYNC]
    owed.clear()
    owed.extend(kept)


def readies_owed(owed: Owed) -> int:
    """How many ReadyForQuery are still to come."""
    return sum(1 for entry in owed if type(entry) is int and entry <= FUNCTION)
