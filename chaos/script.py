"""What a scripted server says: a table of answers, and one session that follows it, bytes in and bytes out.

Without a table it is a small honest PostgreSQL: it lets in by trust, md5 or scram-sha-256, answers the
questions that pooler and coordinator ask about sessions, and any other query with one row that holds its
text. A rule replaces the answer to one kind of message; it may say any bytes, and end the session in any way.
No sockets, no clock, no chance.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from chaos import words as w
from pooler.errors import PoolerError
from pooler.wire.scram import ServerExchange, Verifier

FIRST_PACKETS = {80_877_103: "ssl", 80_877_104: "gss", 80_877_102: "cancel"}
PASSWORD, SALT = b"scripted-password", b"md5s"  # of a server on loopback that lives as long as a test
VERIFIER = Verifier.derive(PASSWORD, b"saltsaltsalt")
GREETED = {
    "server_version": "17.0", "client_encoding": "UTF8", "DateStyle": "ISO, MDY", "TimeZone": "UTC",
    "IntervalStyle": "postgres", "standard_conforming_strings": "on", "server_encoding": "UTF8",
    "integer_datetimes": "on", "in_hot_standby": "off", "default_transaction_read_only": "off",
}
_STARTUP_BYTES_MAX = 10_000


class Then(Enum):
    """What becomes of the session behind an answer."""

    GO_ON = "go on"
    FIN = "end in order"
    RST = "end with a reset"
    MUTE = "read on, and answer nothing any more"


@dataclass(frozen=True, slots=True)
class Say:
    """One answer."""

    data: bytes = b""
    then: Then = Then.GO_ON


@dataclass(frozen=True, slots=True)
class Asked:
    """What came. `event`: ssl, gss, cancel, startup, password, facts, look, or the letter of the message;
    `text`: that of a Query or Parse, else empty."""

    event: str
    body: bytes
    text: str = ""


Answer = Say | Callable[["Session", Asked], Say | None]
"""None: the honest answer after all."""


@dataclass(frozen=True, slots=True)
class Script:
    """`rules`: (event, answer) in the order in which they are tried. `login`: trust, md5 or scram."""

    rules: Sequence[tuple[str, Answer]] = ()
    login: str = "trust"


@dataclass(slots=True)
class Session:
    """One connection. `feed` it; what it says stands in `out`, and `then` is how it goes on."""

    pid: int
    start_us: int
    script_for: Callable[[Session], Script]
    others: Callable[[], Sequence[Session]]
    ends: tuple[tuple[str, int], tuple[str, int]]  # the peer's, and ours
    parameters: dict[str, str] = field(default_factory=dict)
    script: Script = field(default_factory=Script)
    out: bytearray = field(default_factory=bytearray)
    then: Then = Then.GO_ON
    status: bytes = b"I"
    is_in: bool = False
    asked_startup: bool = False
    text: str = ""  # of the statement that was parsed or bound last, up to the Sync
    statements: dict[str, str] = field(default_factory=dict)
    skipping: bool = False
    memo: Any = None  # a rule's own
    _buffer: bytearray = field(default_factory=bytearray)
    _scram: ServerExchange | None = None

    @property
    def user(self) -> str:
        return self.parameters.get("user", "")

    @property
    def is_idle(self) -> bool:
        """Logged in, and nothing is unanswered."""
        return self.is_in and not self._buffer and self.then is Then.GO_ON

    def feed(self, data: bytes) -> None:
        """What the peer sent. A message that breaks the framing ends the session."""
        self._buffer += data
        while self.then is Then.GO_ON:
            asked = self._typed() if self.asked_startup else self._first()
            if asked is None:
                return
            self._answer(asked)

    def say(self, said: Say) -> None:
        """Unasked."""
        self.out += said.data
        self.then = said.then

    def _first(self) -> Asked | None:
        if len(self._buffer) < 8:
            return None
        size, code = struct.unpack_from("!ii", self._buffer)
        if not 8 <= size <= _STARTUP_BYTES_MAX:
            self.then = Then.FIN
            return None
        if len(self._buffer) < size:
            return None
        body = bytes(self._buffer[8:size])
        del self._buffer[:size]
        event = FIRST_PACKETS.get(code, "startup")
        if event == "startup":
            self.asked_startup = True
            words = body.decode(errors="replace").split("\0")
            self.parameters = dict(zip(words[:-2:2], words[1::2], strict=False))
            self.script = self.script_for(self)
        return Asked(event, body)

    def _typed(self) -> Asked | None:
        if len(self._buffer) < 5:
            return None
        size = int.from_bytes(self._buffer[1:5])
        if size < 4:
            self.then = Then.FIN
            return None
        if len(self._buffer) < size + 1:
            return None
        kind, body = chr(self._buffer[0]), bytes(self._buffer[5 : size + 1])
        del self._buffer[: size + 1]
        if kind == "Q":
            text = body[:-1].decode(errors="replace")
            return Asked(_question(text), body, text)
        if kind in "PB":
            first, second = ("\0\0" if body.count(0) < 2 else body.decode(errors="replace")).split("\0")[:2]
            if kind == "P":
                self.statements[first] = second
            self.text = second if kind == "P" else self.statements.get(second, "")
            return Asked(kind, body, self.text)
        return Asked("password" if kind == "p" else kind, body)

    def _answer(self, asked: Asked) -> None:
        for event, answer in self.script.rules:
            if event in (asked.event, "any"):
                said = answer if isinstance(answer, Say) else answer(self, asked)
                if said is not None:
                    self.say(said)
                    return
        self.say(honest(self, asked))


def _question(text: str) -> str:
    if "pg_control_system()" not in text:
        return "Q"
    return "look" if "json_agg" in text else "facts"


def honest(session: Session, asked: Asked) -> Say:
    """What a server would say."""
    return _HONEST.get(asked.event, _other)(session, asked)


def greeting(session: Session) -> bytes:
    """From AuthenticationOk to ReadyForQuery."""
    session.is_in = True
    told = b"".join(w.parameter(name, value) for name, value in GREETED.items())
    name = w.parameter("application_name", session.parameters.get("application_name", ""))
    return w.request(0) + told + name + w.backend_key(session.pid) + w.ready()


def _startup(session: Session, asked: Asked) -> Say:
    match session.script.login:
        case "md5":
            return Say(w.request(5, SALT))
        case "scram":
            return Say(w.request(10, b"SCRAM-SHA-256\0\0"))
    return Say(greeting(session))


def _password(session: Session, asked: Asked) -> Say:
    wrong = Say(w.error("28P01", "password authentication failed", "FATAL"), Then.FIN)
    if session.script.login == "md5":
        inner = hashlib.md5(PASSWORD + session.user.encode()).hexdigest().encode()
        fits = asked.body == b"md5" + hashlib.md5(inner + SALT).hexdigest().encode() + b"\0"
        return Say(greeting(session)) if fits else wrong
    try:
        if session._scram is None:
            session._scram = ServerExchange(
                nonce="scripted+nonce+of+24+byt", salt=VERIFIER.salt, iterations=VERIFIER.iterations)
            return Say(w.request(11, session._scram.first(asked.body.split(b"\0", 1)[1][4:])))
        proven = session._scram.final(asked.body, VERIFIER)
    except (PoolerError, IndexError):
        return wrong
    return wrong if proven is None else Say(w.request(12, proven[0]) + greeting(session))


def facts(session: Session) -> list[str | None]:
    """The answer to the pooler's question about a new session."""
    peer, own = session.ends
    return [str(session.pid), str(session.start_us), SYSTEM, "1", str(STARTED_US), "f",
            peer[0], str(peer[1]), own[0], str(own[1]), None]


SYSTEM, STARTED_US = "7300000000000000042", 1_780_000_000_000_000
AUTHENTICATION_TIMEOUT_SECONDS, CONNECTIONS_MAX = 1, 10_000


def _facts(session: Session, asked: Asked) -> Say:
    return Say(w.answered([facts(session)]))


def _look(session: Session, asked: Asked) -> Say:
    """The coordinator's, with the types it reads by."""
    return Say(w.answered([_look_row(session)], _LOOK_TYPES))


def _look_row(session: Session) -> list[str | None]:
    rows = ",".join(
        f'[{each.pid},{each.start_us},"{each.user}","{each.parameters.get("database", "")}",'
        f'"{each.parameters.get("application_name", "")}","idle","client backend","{each.ends[0][0]}"]'
        for each in session.others() if each is not session and each.is_in)
    return [
        str(session.pid), str(session.start_us), session.ends[1][0], SYSTEM, "1", str(STARTED_US), "f", "t",
        str(AUTHENTICATION_TIMEOUT_SECONDS), str(CONNECTIONS_MAX), "3", "10", f"[{rows}]", "[]"]


_LOOK_TYPES = (23, 20, 25, 25, 23, 20, 16, 16, 23, 23, 23, 23, 114, 114)
_BEGINS = re.compile(r"\s*(begin|start transaction)\b", re.IGNORECASE)
_ENDS = re.compile(r"\s*(commit|end|rollback|abort)\b", re.IGNORECASE)
_SETS = re.compile(r"\s*(set|reset|discard|deallocate|close|unlisten|listen)\b[^;]*", re.IGNORECASE)


def _query(session: Session, asked: Asked) -> Say:
    return Say(ran(session, asked.text, described=True) + w.ready(session.status))


def ran(session: Session, text: str, *, described: bool) -> bytes:
    """One statement's answer without its ReadyForQuery."""
    if _BEGINS.match(text):
        session.status = b"T"
        return w.complete("BEGIN")
    if ended := _ENDS.match(text):
        session.status = b"I"
        return w.complete(ended[1].upper())
    if found := _SETS.match(text):
        return w.complete(found[1].upper() if found[1].lower() != "discard" else "DISCARD ALL")
    if not text.strip():
        return w.message(b"I")
    told = "1" if "pg_settings" in text else text
    rows = [] if "pg_catalog.pg_settings s" in text else [[told]]
    return w.answered(rows, described=described, ends=False)


def _extended(session: Session, asked: Asked) -> Say:
    """Parse, Bind, Describe, Execute, Close: skipped after an error up to the Sync."""
    if session.skipping:
        return Say()
    is_look = _question(session.text) == "look"
    match asked.event:
        case "P":
            return Say(w.message(b"1"))
        case "B":
            return Say(w.message(b"2"))
        case "C":
            return Say(w.message(b"3"))
        case "D" if asked.body[:1] == b"S":
            return Say(w.message(b"t", b"\0\0") + w.columns(1))
        case "D":
            return Say(w.columns(len(_LOOK_TYPES), _LOOK_TYPES) if is_look else w.columns(1))
    return Say(w.row(_look_row(session)) + w.complete("SELECT 1") if is_look
               else ran(session, session.text, described=False))


def _sync(session: Session, asked: Asked) -> Say:
    session.skipping, session.text = False, ""
    return Say(w.ready(session.status))


def _other(session: Session, asked: Asked) -> Say:
    return Say(w.error("08P01", f"invalid frontend message type {asked.event}", "FATAL"), Then.FIN)


_HONEST: dict[str, Callable[[Session, Asked], Say]] = {
    "ssl": lambda session, asked: Say(b"N"), "gss": lambda session, asked: Say(b"N"),
    "cancel": lambda session, asked: Say(b"", Then.FIN), "X": lambda session, asked: Say(b"", Then.FIN),
    "startup": _startup, "password": _password, "facts": _facts, "look": _look, "Q": _query, "S": _sync,
    **dict.fromkeys("PBDEC", _extended),
    **dict.fromkeys("Hdcf", lambda session, asked: Say()),
    "F": lambda session, asked: Say(w.message(b"V", b"\xff\xff\xff\xff") + w.ready(session.status)),
}
