"""A PostgreSQL session without I/O: bytes in, bytes out, as the real one as far as a relay can tell.

Commands are few: see `_COMMANDS`. What it has committed, and which state is left on the session, is to be
looked at. Source: PostgreSQL documentation, "Message Flow", and backend/tcop/postgres.c.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from pooler.demo.client import message
from pooler.wire.session_state import Residue
from tests.relay.words import PARAMETERS, Ended, Failed, columns, error, row


@dataclass
class MiniServer:
    """One session. `feed` takes bytes and returns what the server sends; nothing is sent before a flush."""

    pid: int = 1
    status: str = "I"
    parsed: int = 0
    committed: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    statements: dict[str, str] = field(default_factory=dict)
    portals: dict[str, str] = field(default_factory=dict)
    settings: dict[bytes, bytes] = field(default_factory=lambda: dict(PARAMETERS))
    set_here: set[bytes] = field(default_factory=set)  # by this session, to whatever value
    locks: int = 0
    lastval: int = 0
    ran: list[str] = field(default_factory=list)
    ended: bool = False
    refuses_cleanup: bool = False
    refuses_question: bool = False
    mute: bool = False
    copy: str = ""
    _copied: int = 0
    _implicit: bool = False
    _skipping: bool = False
    _buffer: bytes = b""
    _out: bytes = b""
    _told: dict[bytes, bytes] = field(default_factory=dict)

    def feed(self, data: bytes) -> bytes:
        """Raises nothing: after a FATAL, or Terminate, `ended` is set."""
        self._buffer += data
        sent = b""
        while not self.ended and not self.mute and len(self._buffer) >= 5:
            size = int.from_bytes(self._buffer[1:5], "big")
            if not 4 <= size <= 1 << 30:
                self._say_fatal("08P01", "invalid message length")
                break
            if len(self._buffer) < size + 1:
                break
            kind, body = chr(self._buffer[0]), self._buffer[5 : size + 1]
            self._buffer = self._buffer[size + 1 :]
            try:
                sent += self._take(kind, body)
            except Ended:
                self.ended = True
        return sent + (self._flush() if self.ended else b"")

    def leave(self) -> None:
        """The client is gone: what was not committed is not."""
        self.pending.clear()
        self.ended = True

    def _flush(self) -> bytes:
        sent, self._out = self._out, b""
        return sent

    def _say_fatal(self, code: str, text: str) -> None:
        self._out += error(code, text, "FATAL")
        self.ended = True

    def _take(self, kind: str, body: bytes) -> bytes:
        if self.copy:
            return self._take_copy(kind, body)
        if self._skipping and kind not in "SX":
            return b""
        handler: Callable[[bytes], None] | None = getattr(self, f"_on_{kind}", None)
        if kind in "dcf":
            return b""  # what is left of a COPY that failed
        if kind == "H":
            return self._flush()
        if handler is None:
            self._say_fatal("08P01", f"invalid frontend message type {ord(kind)}")
            return self._flush()
        try:
            handler(body)
        except (Failed, ValueError, LookupError, struct.error) as fault:
            failed = fault if isinstance(fault, Failed) else Failed("08P01", "malformed")
            self._fail(failed, extended=kind not in "QFS")
            if kind in "QF":
                self._ready()
            return self._flush()
        return self._flush() if kind in "QFS" or self.copy else b""

    def _fail(self, failed: Failed, *, extended: bool) -> None:
        self._out += error(failed.code, str(failed))
        self.pending.clear()
        self._implicit = False
        if self.status == "T":
            self.status = "E"
        self._skipping = extended

    # ---- messages

    def _on_Q(self, body: bytes) -> None:
        self.statements.pop("", None)
        texts = [t.strip() for t in body.rstrip(b"\0").decode().split(";")]
        texts = [t for t in texts if t]
        if not texts:
            self._out += message(b"I")
        for text in texts:
            self._describe(text)
            self._run(text)
            if self.copy:
                self.copy = "simple"
                return
        self._ready()

    def _on_F(self, body: bytes) -> None:
        self._out += message(b"V", struct.pack("!i", 2) + b"ok")
        self._ready()

    def _on_S(self, body: bytes) -> None:
        self._skipping = False
        self._ready()

    def _on_X(self, body: bytes) -> None:
        self.leave()
        raise Ended

    def _on_P(self, body: bytes) -> None:
        name, text = (part.decode() for part in body.split(b"\0")[:2])
        self.parsed += 1
        if name and name in self.statements:
            raise Failed("42P05", f'prepared statement "{name}" already exists')
        if not name:
            self.statements.pop("", None)
        if text.startswith(("bad", "CREATE ASSERTION")):
            raise Failed("42601" if text.startswith("bad") else "0A000", "syntax error")
        self.statements[name] = text
        self._out += message(b"1")

    def _statement(self, name: str) -> str:
        if name not in self.statements:
            raise Failed("26000", f'prepared statement "{name}" does not exist')
        return self.statements[name]

    def _on_B(self, body: bytes) -> None:
        portal, name = (part.decode() for part in body.split(b"\0")[:2])
        text = self._statement(name)
        self._check_failed(text)
        count = struct.unpack_from("!h", body, len(portal) + len(name) + 4)[0]
        rest = body[len(portal) + len(name) + 6 :]
        for n in range(count):
            size = struct.unpack_from("!i", rest)[0]
            text = text.replace(f"${n + 1}", str(size) if size > 100 else rest[4 : 4 + size].decode())
            rest = rest[4 + max(size, 0) :]
        self.portals[portal] = text
        self._out += message(b"2")

    def _on_D(self, body: bytes) -> None:
        name = body[1:-1].decode()
        if body[:1] == b"S":
            text = self._statement(name)
            self._out += message(b"t", struct.pack("!h", 0))
        elif name in self.portals:
            text = self.portals[name]
        else:
            raise Failed("34000", f'portal "{name}" does not exist')
        if not self._describe(text):
            self._out += message(b"n")

    def _on_C(self, body: bytes) -> None:
        (self.statements if body[:1] == b"S" else self.portals).pop(body[1:-1].decode(), None)
        self._out += message(b"3")

    def _on_E(self, body: bytes) -> None:
        name = body.split(b"\0")[0].decode()
        if name not in self.portals:
            raise Failed("34000", f'portal "{name}" does not exist')
        self._implicit = True
        self._run(self.portals[name])
        if self.copy:
            self.copy = "extended"

    def _take_copy(self, kind: str, body: bytes) -> bytes:
        how = self.copy
        try:
            if kind in "SH":
                return b""
            if kind == "d":
                if b"bad" in body:
                    raise Failed("22P04", "bad row")
                self._copied += len(body)
                return b""
            self.copy = ""
            if kind == "f":
                raise Failed("57014", "COPY from stdin failed")
            if kind != "c":
                raise Failed("08P01", f"unexpected message type {ord(kind)} during COPY from stdin")
            self._out += message(b"C", b"COPY %d\0" % self._copied)
            self._write(f"copy {self._copied}")
        except Failed as failed:
            self.copy = ""
            self._fail(failed, extended=how == "extended")
            if how == "simple":
                self._ready()
            return self._flush()
        finally:
            if not self.copy:
                self._copied = 0
        if how == "simple":
            self._ready()
            return self._flush()
        return b""

    def _ready(self) -> None:
        if self.status == "I":
            self.committed += self.pending
            self.pending.clear()
            self.portals.clear()
        self._implicit = False
        for name, value in self.settings.items():
            if name in PARAMETERS and self._told.get(name, PARAMETERS[name]) != value:
                self._told[name] = value
                self._out += message(b"S", name + b"\0" + value + b"\0")
        self._out += message(b"Z", self.status.encode())

    # ---- commands

    def _describe(self, text: str) -> bool:
        shown = re.match(r"(?:select|show|rows)\b", text, re.IGNORECASE) is not None
        if shown:
            self._out += columns(b"v")
        return shown

    def _check_failed(self, text: str) -> None:
        if self.status == "E" and text.lower() not in ("rollback", "commit"):
            raise Failed("25P02", "current transaction is aborted")

    def _write(self, text: str) -> None:
        self.pending.append(text)

    def _tag(self, tag: str) -> None:
        self._out += message(b"C", tag.encode() + b"\0")

    def _run(self, text: str) -> None:
        self.ran.append(text)
        self._check_failed(text)
        for pattern, command in _COMMANDS:
            found = re.fullmatch(pattern, text, re.IGNORECASE)
            if found is not None:
                command(self, *found.groups())
                return
        raise Failed("0A000" if text.startswith("CREATE ASSERTION") else "42601", f"what is {text!r}")

    def _begin(self) -> None:
        self.status = "T"
        self._tag("BEGIN")

    def _commit(self) -> None:
        failed, self.status = self.status == "E", "I"
        if failed:
            self.pending.clear()
        self._tag("ROLLBACK" if failed else "COMMIT")

    def _rollback(self) -> None:
        self.status = "I"
        self.pending.clear()
        self._tag("ROLLBACK")

    def _insert(self, what: str) -> None:
        self._write(what)
        self._tag("INSERT 0 1")

    def _select(self, value: str) -> None:
        self._out += row(value.encode())
        self._tag("SELECT 1")

    def _rows(self, count: str, size: str) -> None:
        self._out += row(b"x" * int(size)) * int(count)
        self._tag(f"SELECT {count}")

    def _fail_now(self) -> None:
        raise Failed("22012", "division by zero")

    def _die(self) -> None:
        self._out += error("57P01", "terminating connection", "FATAL")
        raise Ended

    def _copy_in(self) -> None:
        self.copy = "begun"
        self._out += message(b"G", b"\0\0\0")

    def _copy_out(self, count: str) -> None:
        self._out += message(b"H", b"\0\0\0") + message(b"d", b"1\t2\n") * int(count) + message(b"c")
        self._tag(f"COPY {count}")

    def _set(self, name: str, value: str) -> None:
        if value == "bogus":
            raise Failed("22023", f'invalid value for parameter "{name}": "{value}"')
        self.settings[name.encode()] = value.encode()
        self.set_here.add(name.encode())
        self._tag("SET")

    def _set_config(self, name: str, value: str) -> None:
        self.settings[name.encode()] = value.encode()
        self.set_here.add(name.encode())
        self._select(value)

    def _reset(self, name: str, tag: str = "RESET") -> None:
        self.settings.pop(name.encode(), None)
        self.set_here.discard(name.encode())
        self.settings |= {key: value for key, value in PARAMETERS.items() if key == name.encode()}
        self._tag(tag)

    def _show(self, name: str) -> None:
        self._select(self.settings.get(name.encode(), b"").decode())

    def _lock(self, un: str | None) -> None:
        self.locks += -1 if un else 1
        self._select(f"{un or ''}locked")

    def _deallocate(self, name: str) -> None:
        if self.statements.pop(name, None) is None:
            raise Failed("26000", f'prepared statement "{name}" does not exist')
        self._tag("DEALLOCATE")

    def _clean(self, what: str) -> None:
        if self.refuses_cleanup:
            raise Failed("XX000", "no")
        what = what.upper()
        if what in ("DISCARD ALL", "DEALLOCATE ALL"):
            self.statements.clear()
        self.lastval *= what != "DISCARD SEQUENCES"
        if what in ("DISCARD ALL", "RESET ALL"):
            self.settings = dict(PARAMETERS)
            self.set_here.clear()
        if what in ("DISCARD ALL", "SELECT PG_CATALOG.PG_ADVISORY_UNLOCK_ALL()"):
            self.locks = 0
        self._tag(what if not what.startswith("SELECT") else "SELECT 1")

    def _own_state(self, asked: str) -> None:
        """What is set on this session (see pooler.wire.state_question)."""
        if self.refuses_question:
            raise Failed("57014", "canceling statement due to statement timeout")
        found = [(name, self.settings[name]) for name in sorted(self.set_here)]
        for name, value in found:
            self._out += row(name, value)
        advisory = int(Residue.ADVISORY)
        if f"'?{advisory}'" in asked and self.locks:
            self._out += row(b"?%d" % advisory, b"")
        self._tag(f"SELECT {len(found)}")

    def _sequence(self, what: str) -> None:
        self.lastval += what.lower() == "next"
        if not self.lastval:
            raise Failed("55000", "lastval is not defined")
        self._select(str(self.lastval))

    def _do(self) -> None:
        self.locks += 1
        self._tag("DO")


_CLEANUPS = (
    r"(DISCARD ALL|DEALLOCATE ALL|CLOSE ALL|UNLISTEN \*|DISCARD TEMP|DISCARD SEQUENCES|RESET ALL|RESET ROLE"
    r"|SET SESSION AUTHORIZATION DEFAULT|SELECT pg_catalog\.pg_advisory_unlock_all\(\))"
)
_COMMANDS: tuple[tuple[str, Callable[..., None]], ...] = (
    ("begin", MiniServer._begin),
    ("commit", MiniServer._commit),
    ("rollback", MiniServer._rollback),
    (r"insert (\S+)", MiniServer._insert),
    (r"rows (\d+) (\d+)", MiniServer._rows),
    ("select 1/0", MiniServer._fail_now),
    ("die", MiniServer._die),
    ("copy in", MiniServer._copy_in),
    (r"copy out (\d+)", MiniServer._copy_out),
    (_CLEANUPS, MiniServer._clean),
    ("do", MiniServer._do),
    (r"select (next|last)val\(\)", MiniServer._sequence),
    (r"(create index|load)", lambda mini, what: mini._tag(what.upper())),
    (r"SELECT s\.name, s\.setting FROM (.*)", MiniServer._own_state),
    (r"deallocate (\w+)", MiniServer._deallocate),
    (r"select pg_advisory_(un)?lock\(1\)(?: -- .*)?", MiniServer._lock),
    (r"SELECT (?:pg_catalog\.)?set_config\('([^']*)','([^']*)',false\)", MiniServer._set_config),
    (r"select (\S+)", MiniServer._select),
    (r"SET (\w+)\s*=\s*'?([^']*)'?", MiniServer._set),
    (r"RESET (\w+)", MiniServer._reset),
    (r"SET (\w+) TO DEFAULT", lambda mini, name: mini._reset(name, "SET")),
    (r"show (\w+)", MiniServer._show),
)
