"""Scripts: what clients write, and what each of them hears.

A script is a sequence of writes, each by one of its clients. Straight at PostgreSQL every client has a
session of its own, and a write is over when the server waits for the client again: a fact the server itself
shows. What had been heard by then is what the pooled run waits for before the next write, so that it needs no
guesses about what a write is answered with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pooler.demo.client import Message, ServerSaid

Heard = tuple[str, object]  # a message's letter and its content, comparable
UNFLUSHED = frozenset(b"PBDEC")  # what a server may answer only later
WORKS = UNFLUSHED | frozenset(b"QF")  # what a session is needed for


class Write(NamedTuple):
    """One send of one client. An empty one ends the client's connection without a word."""

    data: bytes
    client: int = 0


Steps = Sequence[Write | bytes]


def writes(steps: Steps) -> list[Write]:
    """Plain bytes are the first client's."""
    return [step if isinstance(step, Write) else Write(step) for step in steps]


def kinds(data: bytes) -> bytes:
    """The types of the messages in it; one that is cut off counts."""
    found, at = bytearray(), 0
    while at < len(data):
        found.append(data[at])
        at += 1 + int.from_bytes(data[at + 1 : at + 5])
    return bytes(found)


@dataclass(slots=True)
class Reference:
    """What happened straight at the server. Lists are by write."""

    heard: dict[int, list[Message]] = field(default_factory=dict)  # by client
    counts: list[int] = field(default_factory=list)  # what its client had heard by then, as of `count`
    holds: list[bool] = field(default_factory=list)  # its client would keep a session of a transaction pool
    closed: list[bool] = field(default_factory=list)  # the server had ended the connection
    blocks: bool = False  # somebody was in a transaction block


def a_query_ends_a_group(steps: Steps, client: int) -> bool:
    """Without a Sync. Behind the Sync that comes then 18 undoes what the group had set, at whatever command
    is next: for a client of a pool that is the pooler's, and so it is told of it earlier."""
    sent = b"".join(kinds(step.data) for step in writes(steps) if step.client == client)
    return re.search(rb"[PBDEC][^SF]*Q", sent) is not None


def without_news(said: Sequence[Message]) -> list[Message]:
    """Without ParameterStatus."""
    return [each for each in said if each.type != "S"]


def count(said: Sequence[Message]) -> int:
    """How many messages there are but for those that always come before others."""
    return len(without_news(said))


def keeps_session(said: Sequence[Message], sent: bytes) -> bool:
    """Whether a client that heard this, and sent messages of these kinds, needs its session still, so that
    nobody else can have it. What an error has skipped has that error for the last word."""
    told = [each for each in said if each.type not in ("N", "A", "S")]
    behind = sent[max(sent.rfind(end) for end in b"QFS") + 1 :]
    if any(kind in WORKS for kind in behind):
        return True
    return bool(told) and (told[-1].type != "Z" or told[-1].body != b"I")


def shown(said: Message) -> Heard:
    """Comparable: without what a session or an object is numbered with, errors by field."""
    if said.type in ("E", "N"):
        return said.type, tuple(
            (name, _without_chance(text)) for name, text in sorted(fields(said).items()))
    if said.type == "A":
        return "A", said.body[4:]
    if said.type == "T":
        return "T", _without_tables(said.body)
    return said.type, said.body


_TEMPORARY = re.compile(r"pg_temp_\d+")
# which message it was that broke a COPY off: a Parse of what the session has is not sent again
_BREAKS_COPY = re.compile(r"message type 0x\w\w during COPY")


def _without_chance(text: str) -> str:
    return _BREAKS_COPY.sub("message type during COPY", _TEMPORARY.sub("pg_temp", text))


def _without_tables(body: bytes) -> bytes:
    """A RowDescription without the oids of tables, which may have been made by the script."""
    kept, at = bytearray(body), 2
    for _ in range(int.from_bytes(body[:2])):
        at = body.index(b"\0", at) + 1
        kept[at : at + 4] = bytes(4)
        at += 18
    return bytes(kept)


def fields(said: Message) -> dict[str, str]:
    """Of an error or a notice."""
    fault: ServerSaid = said.error()
    return fault.fields


def first_difference(ours: Iterable[Message], theirs: Iterable[Message]) -> str:
    """Where two transcripts part, for a reader; empty if they are equal.

    In a transaction that has failed already, a Bind of what the session has to be given first is refused as
    that Parse is.
    """
    mine, other = [shown(each) for each in ours], [shown(each) for each in theirs]
    for n, (a, b) in enumerate(zip(mine, other, strict=False)):
        if a[0] == b[0] == "E" and {("C", "25P02"), ("R", "exec_parse_message")} <= set(a[1]):  # type: ignore[call-overload]
            mine[n] = b
    if mine == other:
        return ""
    at = next((n for n, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b),
              min(len(mine), len(other)))
    return f"message {at}: pooled {_brief(mine[at : at + 3])}, straight {_brief(other[at : at + 3])}"


def _brief(said: list[Heard]) -> str:
    return " ".join(f"{kind} {content!r}"[:300] for kind, content in said) or "nothing"
