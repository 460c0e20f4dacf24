"""Keys below a ledger's prefixes that cannot be read, or that nobody of this version would write there. Pure.

One of them is no reason to refuse all the rest: it is left out, and named. What may stand for a session is
never left out: its slot is held, by nobody that could give it back, until somebody removes the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from coordinator.ledger.keys import number_at
from coordinator.ledger.record import Kind, Session
from coordinator.ledger.rules import session_of
from coordinator.ledger.states import SessionState
from coordinator.store.api import Entry

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Strange:
    """One such key, and what is wrong with it."""

    key: str
    why: str

    def __str__(self) -> str:
        return f"{self.key}: {self.why}"


@dataclass(slots=True)
class Sieve:
    """Reads entries, and keeps those that cannot be read in `strange`."""

    strange: list[Strange] = field(default_factory=list)

    def each(self, entries: Iterable[Entry], read: Callable[[Entry], _T]) -> list[_T]:
        """What `read` makes of each of them; what it raises ValueError for is left out."""
        found = []
        for entry in entries:
            try:
                found.append(read(entry))
            except ValueError as fault:
                self.name(entry, str(fault))
        return found

    def name(self, entry: Entry, why: str) -> None:
        """This one is strange."""
        self.strange.append(Strange(entry.key, why or "it cannot be read"))


def number_of(entry: Entry) -> int:
    """The number that its key ends with. Raises ValueError for none."""
    number = number_at(entry.key)
    if number is None:
        raise ValueError("its key does not end in a number")
    return number


def slot_of(entry: Entry) -> tuple[Kind, int]:
    """The slot that a session's key means. Raises ValueError for none."""
    kind, _, number = entry.key.rpartition("/")
    try:
        return Kind(kind.rpartition("/")[2]), number_of(entry)
    except ValueError:
        raise ValueError(f"{number!r} is no slot") from None


def session_at(entry: Entry) -> Session:
    """The session in a slot. Raises ValueError for what cannot be read, and for that of another slot."""
    session = session_of(entry)
    if (session.kind, session.slot) != slot_of(entry):
        raise ValueError(f"it says that it is {session.kind}/{session.slot}")
    return session


def held_by_nobody(entry: Entry) -> Session:
    """What stands for a session that cannot be read: of no epoch and no server, so nothing proves it gone.

    Raises ValueError where its key means no slot.
    """
    kind, slot = slot_of(entry)
    return Session(
        kind=kind, slot=slot, generation=entry.mod_revision, state=SessionState.UNKNOWN, owner="", host="",
        dbname="", user="", seat=-1, request_id=entry.key, epoch=0, policy_generation=0)
