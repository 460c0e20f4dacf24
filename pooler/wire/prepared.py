"""Prepared statements of the extended protocol: what a client's names mean, and what a server session has.

A client's name stands for a `Statement`, which is shared by every client that prepared the same text with the
same parameter types and which has one name on every server session of this worker. Nothing here sends
anything; the functions at the end read and rewrite the bytes of single messages (protocol chapter 55.7,
"Message Formats"). Names of statements are never used twice, so a stale one can only be missing, never wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Final

from pooler.errors import PoolerError, ProtocolViolation
from pooler.wire.session_state import residue_of_text

SERVER_NAME_PREFIX = b"pooler_"
COMMITS = re.compile(rb"\b(?:commit|end|prepare\s+transaction)\b", re.IGNORECASE)
ALTERING_WORDS = rb"(?:alter|create|drop|import|do|call)\b"
ALTERING_TAG: Final = re.compile(ALTERING_WORDS, re.IGNORECASE).match
"""Whether what has this tag may change what texts mean: the types of their parameters and columns."""
ALL = b"\0"
"""As what a text forgets: every name. No name can be this."""
NOTHING = b"\0\0"
"""As what a text forgets: no name; something else is waited for."""
MAY_FORGET: Final = re.compile(rb"deallocate|discard", re.IGNORECASE).search
_BLANK = rb"(?:\s|--[^\n\r]*[\n\r]|/\*(?:(?!\*/|/\*).)*\*/)"
ALTERS: Final = re.compile(rb"(?:;|" + _BLANK + rb")*" + ALTERING_WORDS, re.IGNORECASE | re.DOTALL).match
"""The same of a text: whether its first statement may."""
_FORGETTING = re.compile(
    rb"(?:;|" + _BLANK + rb")*(?:discard" + _BLANK + rb"+(?P<discard>all)"
    rb"|deallocate(?:" + _BLANK + rb"+prepare)?" + _BLANK
    + rb"""*(?:(?<=[\s/])(?P<all>all)|"(?P<quoted>(?:[^"\0]|"")+)["]"""
    + rb"""|(?<=[\s/])(?P<plain>[a-z_\x80-\xff][\w$\x80-\xff]*)))"""
    rb"(?:;|" + _BLANK + rb")*(?:--[^\n\r]*)?\0?",
    re.IGNORECASE | re.DOTALL,
)
OWN_NAME: Final = re.compile(rb'"(pooler_(?:\d+|stand_in))"')
OUTDATED_PLAN: Final = re.compile(rb"C0A000\0.*RRevalidateCachedQuery\0", re.DOTALL).search
IS_ANALYSIS: Final = re.compile(rb"\0C42...\0", re.DOTALL).search
"""Whether an error is about what a text means: a Bind fails so where that is no longer what it was."""
_NAME_BYTES_MAX = 63  # PostgreSQL cuts longer ones
STAND_IN = SERVER_NAME_PREFIX + b"stand_in"
STAND_IN_TEXT: Final = b"DEALLOCATE " + STAND_IN
"""Answered as the client's own DEALLOCATE of a name would be: sessions do not know the statement by that
name, and others may have it still."""
_STAND_IN_BODY = b"ROLLBACK\0\0\0"  # may be prepared in a failed transaction too
_LENGTH = Struct(">I")


class TooManyStatements(PoolerError):
    """A client has more names, or the worker more text, than the limit allows."""

    sqlstate = "53400"


class Statement:
    """One text with its parameter types. `body` is what follows the name in Parse, `uses` the names for it.

    `residue` is what executing the text may leave behind on a session (see `session_state`), `commits`
    whether it may end a transaction, `alters` whether it may change what other texts mean, `forgets` what
    prepared names it forgets: they are found once here and not again at each Bind. `path` is the search path
    that the text was prepared under, if that is known.
    """

    __slots__ = ("alters", "body", "commits", "forgets", "path", "residue", "server_name", "uses")

    def __init__(self, server_name: bytes, body: bytes, residue: int = 0, path: bytes | None = None) -> None:
        self.server_name = server_name
        self.body = body
        self.residue = residue
        self.path = path
        self.commits = COMMITS.search(body) is not None
        self.alters = ALTERS(body) is not None
        self.forgets = forgotten_name(body.partition(b"\0")[0]) if MAY_FORGET(body) is not None else None
        self.uses = 0

    def is_again(self, body: bytes, path: bytes | None) -> bool:
        """Whether this text is this statement, and nothing has to be looked up to know it."""
        return self.body == body and self.path == path and self.forgets is None

    def __repr__(self) -> str:
        return f"<Statement {self.server_name.decode()} {self.uses} uses>"


class Statements:
    """Every statement that some client of this worker has a name for, by its body and its search path: what a
    text's tables are, and so what its columns are, hangs on that.

    A statement without a name stays for `spare_max` others, because a server session may still have it: a
    client that comes back with the same text then finds it prepared. The text of all together stays below
    `bytes_max`. `look` tells the residue of a text.
    """

    __slots__ = ("_by_body", "_bytes", "_bytes_max", "_look", "_next", "_spare", "_spare_max")

    def __init__(
        self, look: Callable[[bytes], int] = residue_of_text, *, spare_max: int = 1000,
        bytes_max: int = 256 * 1024 * 1024,
    ) -> None:
        self._look = look
        self._by_body: dict[tuple[bytes | None, bytes], Statement] = {}
        self._spare: dict[Statement, None] = {}
        self._spare_max = spare_max
        self._bytes = 0
        self._bytes_max = bytes_max
        self._next = 0

    def __len__(self) -> int:
        return len(self._by_body)

    @property
    def text_bytes(self) -> int:
        """Bytes of text kept, each text once."""
        return self._bytes

    def intern(self, body: bytes, path: bytes | None = None, *, alone: bool = False) -> Statement:
        """The statement of this body, with one use more; `alone`: one that nobody else will find.

        Raises TooManyStatements, ProtocolViolation.
        """
        statement = None if alone else self._by_body.get((path, body))
        if statement is None:
            statement = self._make(body, path)
            if not alone:
                self._by_body[path, body] = statement
        elif statement.uses == 0:
            del self._spare[statement]
        statement.uses += 1
        return statement

    def release(self, statement: Statement) -> None:
        """One use less."""
        assert statement.uses > 0
        statement.uses -= 1
        if statement.uses == 0:
            if self._by_body.get((statement.path, statement.body)) is not statement:
                self._bytes -= len(statement.body)
                return
            self._spare[statement] = None
            if len(self._spare) > self._spare_max:
                self._drop_oldest_spare()

    def take_back(self, statement: Statement) -> None:
        """One use more of what may have been released."""
        if statement.uses == 0:
            if statement in self._spare:
                del self._spare[statement]
            else:
                self._bytes += len(statement.body)
        statement.uses += 1

    def outdate(self, statement: Statement) -> None:
        """Sessions may have a plan of it that the server refuses: who prepares its text from now on gets
        another one. Who has a name for it keeps it, as with the server. Precondition: it is in use."""
        assert statement.uses > 0
        if self._by_body.get((statement.path, statement.body)) is statement:
            del self._by_body[statement.path, statement.body]

    def outdate_all(self) -> None:
        """Tables or types may have changed: what the server would now say of any text may differ from what it
        said before. Who prepares one from now on gets a new statement; who has a name keeps what it means."""
        self._bytes -= sum(len(statement.body) for statement in self._spare)
        self._spare.clear()
        self._by_body.clear()

    def _make(self, body: bytes, path: bytes | None) -> Statement:
        if 0 not in body:
            raise ProtocolViolation("invalid Parse message")
        while self._bytes + len(body) > self._bytes_max and self._spare:
            self._drop_oldest_spare()
        if self._bytes + len(body) > self._bytes_max:
            raise TooManyStatements("the pooler keeps too much text of prepared statements")
        statement = Statement(
            SERVER_NAME_PREFIX + b"%d" % self._next, body, self._look(body.partition(b"\0")[0]), path)
        self._next += 1
        self._bytes += len(body)
        return statement

    def _drop_oldest_spare(self) -> None:
        oldest = next(iter(self._spare))
        del self._spare[oldest]
        del self._by_body[oldest.path, oldest.body]
        self._bytes -= len(oldest.body)


class ClientStatements:
    """What one client's names mean, the unnamed statement (b"") included. `in_use` is the name that it
    was told last is in use."""

    __slots__ = ("_names", "_names_max", "_statements", "in_use")

    def __init__(self, statements: Statements, *, names_max: int = 10_000) -> None:
        self._statements = statements
        self._names: dict[bytes, Statement] = {}
        self._names_max = names_max
        self.in_use = b""

    def __len__(self) -> int:
        return len(self._names)

    def add(
        self, name: bytes, body: bytes, path: bytes | None = None, *, alone: bool = False
    ) -> Statement | None:
        """Let a name mean a body under a search path, `alone`: shared with nobody. None if the name is taken
        (42P05; the unnamed one is replaced instead).

        Raises TooManyStatements at the limit of names or text.
        """
        names = self._names
        old = names.get(name)
        if old is not None:
            if name:
                return None
            if old.body == body and old.path == path:
                return old
        elif len(names) >= self._names_max:
            raise TooManyStatements(f"a client may have {self._names_max} prepared statements")
        statement = self._statements.intern(body, path, alone=alone)
        if name and statement.uses > 1 and statement in names.values():  # errors name one of them: which?
            self._statements.release(statement)
            statement = self._statements.intern(body, path, alone=True)
        names[name] = statement
        if old is not None:
            self._statements.release(old)
        return statement

    def restore(self, name: bytes, statement: Statement) -> None:
        """A name means again what it meant, if it means nothing else by now (the unnamed one: whatever it
        means). Errors speak of that statement, so it is the same one. Raises TooManyStatements as `add`."""
        names = self._names
        old = names.get(name)
        if name and (old is not None or len(names) >= self._names_max or statement in names.values()):
            self.add(name, statement.body, statement.path, alone=True)
            return
        self._statements.take_back(statement)
        names[name] = statement
        if old is not None:
            self._statements.release(old)

    def get(self, name: bytes) -> Statement | None:
        """What the name means, None if nothing (26000)."""
        return self._names.get(name)

    def all(self) -> Iterator[tuple[bytes, bytes, bytes | None]]:
        """Every name, what it means, and under which search path."""
        for name, statement in self._names.items():
            yield name, statement.body, statement.path

    def name_of(self, server_name: bytes) -> bytes | None:
        """The name that this client has for what sessions know by that one."""
        names = (name for name, each in self._names.items() if name and each.server_name == server_name)
        return next(names, None)

    def outdate(self) -> None:
        """The server refuses the plan of one of these, it does not say of which."""
        for statement in self._names.values():
            self._statements.outdate(statement)

    def close(self, name: bytes) -> None:
        """Forget a name; a name that means nothing is no error."""
        statement = self._names.pop(name, None)
        if statement is not None:
            self._statements.release(statement)

    def forget_names(self) -> None:
        """DEALLOCATE ALL, DISCARD ALL: all but the unnamed one."""
        unnamed = self._names.pop(b"", None)
        self.clear()
        if unnamed is not None:
            self._names[b""] = unnamed

    def clear(self) -> None:
        """Forget all: the client has left."""
        release = self._statements.release
        for statement in self._names.values():
            release(statement)
        self._names.clear()


def parse_name_body(data: bytes, at: int = 0) -> tuple[bytes, bytes]:
    """Name and body of a Parse whose contents begin at `at` (5 if the header is there).

    Raises ProtocolViolation.
    """
    end = data.find(0, at)
    if end < 0 or data.find(0, end + 1) < 0:
        raise ProtocolViolation("invalid Parse message")
    return data[at:end], data[end + 1 :]


def bind_names(data: bytes, at: int = 0) -> tuple[bytes, bytes, int]:
    """Portal and statement name of a Bind whose contents begin at `at`, and the offset of what follows.

    Raises ProtocolViolation if a name does not end in these bytes.
    """
    portal_end = data.find(0, at)
    name_end = data.find(0, portal_end + 1)
    if portal_end < 0 or name_end < 0:
        raise ProtocolViolation("invalid Bind message")
    return data[at:portal_end], data[portal_end + 1 : name_end], name_end + 1


def describe_target(data: bytes, at: int = 0) -> tuple[bytes, bytes]:
    """Kind (b"S" statement, b"P" portal) and name that a Describe or Close is about.

    Raises ProtocolViolation.
    """
    kind = data[at : at + 1]
    end = data.find(0, at + 1)
    if end < 0 or kind not in (b"S", b"P"):
        raise ProtocolViolation("invalid Describe or Close message")
    return kind, data[at + 1 : end]


def rename_bind(message: bytes, name: bytes, behind: int, new_name: bytes) -> bytes:
    """The Bind with another statement name than `name`, which `behind` is the offset of what follows (both as
    of `bind_names`). `message` begins with the header and may lack its tail."""
    length = _LENGTH.unpack_from(message, 1)[0] + len(new_name) - len(name)
    end = behind - 1
    return b"B%b%b%b%b" % (_LENGTH.pack(length), message[5 : end - len(name)], new_name, message[end:])


def parse_message(statement: Statement, name: bytes | None = None) -> bytes:
    """A Parse of the statement under its server name, or another (b"" for the unnamed)."""
    if name is None:
        name = statement.server_name
    return b"P%b%b\0%b" % (_LENGTH.pack(5 + len(name) + len(statement.body)), name, statement.body)


def describe_statement(name: bytes) -> bytes:
    """A Describe of a statement."""
    return b"D%bS%b\0" % (_LENGTH.pack(6 + len(name)), name)


def close_statement(name: bytes) -> bytes:
    """A Close of a statement."""
    return b"C%bS%b\0" % (_LENGTH.pack(6 + len(name)), name)


def forgotten_name(text: bytes) -> bytes | None:
    """The prepared name that this text, a single statement, forgets: ALL for DEALLOCATE ALL and DISCARD ALL.
    None if it does nothing of the kind, or other things beside it."""
    found = _FORGETTING.fullmatch(text)
    if found is None:
        return None
    if found["discard"] or found["all"]:
        return ALL
    name: bytes = found["quoted"].replace(b'""', b'"') if found["quoted"] else found["plain"].lower()
    return name[:_NAME_BYTES_MAX]


def prepare_stand_in() -> bytes:
    """Close and Parse of the stand-in."""
    parse = b"%b\0%b" % (STAND_IN, _STAND_IN_BODY)
    return close_statement(STAND_IN) + b"P%b%b" % (_LENGTH.pack(4 + len(parse)), parse)


UNSURE = Statement(b"", b"")  # as a session's unnamed statement: it may have one, nobody knows which
