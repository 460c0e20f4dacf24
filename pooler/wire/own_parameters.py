"""`pooler.tenant`, `.class`, `.deadline` and `.ticket`: what a client says of who asks and how long it waits.

Which texts are about them, what they say, and which values there are. Such a text is answered by the pooler
and never reaches a server, so that whatever begins as one and is not understood is a fault, not somebody
else's matter. Pure.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Final, Literal

from pooler.errors import PoolerError
from pooler.wire import sqlstate
from pooler.wire.messages import shown
from pooler.wire.session_state import without_literals
from pooler.wire.startup import split_options

PREFIX: Final = "pooler."
MENTION: Final = b"pooler"
TENANT, CLASS, DEADLINE, TICKET = NAMES = ("tenant", "class", "deadline", "ticket")
TEXT_BYTES_MAX: Final = 4_096
NAME_BYTES_MAX: Final = 63
NO_DEADLINE: Final = "none"
_MS_OF: Final = {"us": 1e-3, "": 1.0, "ms": 1.0, "s": 1e3, "min": 6e4, "h": 3.6e6, "d": 8.64e7}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,6})?) *([a-z]*)", re.ASCII)
_TICKET = re.compile(r"[A-Za-z0-9_.:-]{0,63}")
_TOKEN = re.compile(
    rb"""(?P<space>\s+|--[^\n\r]*)|(?P<block>/\*)|[eE]?'(?P<string>(?:[^'\\]|'')*)'|"(?P<quoted>(?:[^"]|"")+)\""""
    rb"""|\$(?P<tag>(?:[A-Za-z_]\w*)?)\$(?P<dollar>.*?)\$(?P=tag)\$|(?P<number>[+-]?\s*\d+(?:\.\d*)?)(?![\w.])"""
    rb"""|(?P<word>[A-Za-z_\x80-\xff][\w$\x80-\xff]*)|(?P<mark>[.=;,])""",
    re.DOTALL)
_EDGE = re.compile(rb"/\*|\*/")
_AMONG_OTHERS = re.compile(
    rb"(?:^|;)\s*(?:set\s+(?:session\s+|local\s+)?|reset\s+|show\s+)\"?pooler\"?\s*\.")


class OwnFault(PoolerError):
    """A statement, or a start, says something of these that cannot be. `code` is its SQLSTATE."""

    def __init__(self, message: str, code: str, hint: str = "") -> None:
        super().__init__(message)
        self.code, self.hint = code, hint


@dataclass(frozen=True, slots=True)
class Own:
    """One statement. `value` of a SET: None is DEFAULT."""

    verb: Literal["SET", "RESET", "SHOW"]
    name: str
    value: str | None = None


def read_own(query: bytes) -> Own | OwnFault | None:
    """What this text says of the pooler's parameters; None if it is not about them."""
    if MENTION not in query.lower():
        return None
    tokens = list(_tokens(query)) if len(query) <= TEXT_BYTES_MAX else []
    own = _read(tokens)
    if own is None and _AMONG_OTHERS.search((without_literals(query) or query).lower()) is not None:
        return OwnFault("a statement about a parameter of the pooler has to be alone in its query",
                        sqlstate.FEATURE_NOT_SUPPORTED)
    return own


def _tokens(query: bytes) -> Iterator[tuple[str, str]]:
    """Kind and text of each, blanks and comments left out; a "fault" where it is no such text."""
    at = 0
    while at < len(query) and query[at]:
        found = _TOKEN.match(query, at)
        if found is None:
            yield "fault", ""
            return
        at = found.end()
        kind = found.lastgroup or ""
        if kind == "block":
            depth = 1
            while depth:
                edge = _EDGE.search(query, at)
                if edge is None:
                    yield "fault", ""
                    return
                depth += 1 if edge.group() == b"/*" else -1
                at = edge.end()
        elif kind != "space":
            text = shown(found[kind])
            yield "string" if kind == "dollar" else kind, _without_doubled(kind, text)


def _without_doubled(kind: str, text: str) -> str:
    if kind == "string":
        return text.replace("''", "'")
    return text.replace('""', '"') if kind == "quoted" else text


def _read(tokens: list[tuple[str, str]]) -> Own | OwnFault | None:
    while tokens and tokens[-1] == ("mark", ";"):
        tokens.pop()
    while tokens and tokens[0] == ("mark", ";"):
        del tokens[0]
    verb = _word(tokens, 0)
    if verb not in ("set", "reset", "show"):
        return None
    at = 2 if verb == "set" and _word(tokens, 1) in ("session", "local") and not _is_dot(tokens, 2) else 1
    name = _name_at(tokens, at)
    if name is None:
        return None
    rest = tokens[at + name.count(".") * 2 + 1 :]
    fault = _unknown(name)
    value = _value(rest) if verb == "set" else ("" if not rest else None)
    if value is None:
        if any(token == ("mark", ";") for token in rest):
            return None  # other statements follow: see `read_own`
        return OwnFault(
            f'syntax error in a statement about "{name}"', sqlstate.SYNTAX_ERROR,
            f"Write SET {name} = 'value' or = DEFAULT, RESET {name} or SHOW {name}.")
    if fault is not None:
        return fault
    short = name.removeprefix(PREFIX)
    if verb == "set":
        return Own("SET", short, None if value == _DEFAULT else value)
    return Own("RESET" if verb == "reset" else "SHOW", short)


def _word(tokens: list[tuple[str, str]], at: int) -> str:
    return tokens[at][1].lower() if at < len(tokens) and tokens[at][0] == "word" else ""


def _is_dot(tokens: list[tuple[str, str]], at: int) -> bool:
    return at < len(tokens) and tokens[at] == ("mark", ".")


def _name_at(tokens: list[tuple[str, str]], at: int) -> str | None:
    """The name that begins there, in lower case (quoted or not: settings have no other); None if not ours."""
    parts: list[str] = []
    while at < len(tokens) and tokens[at][0] in ("word", "quoted"):
        parts.append(tokens[at][1].lower())
        at += 2
        if not _is_dot(tokens, at - 1):
            break
    return ".".join(parts) if len(parts) > 1 and parts[0] == "pooler" else None


_DEFAULT: Final = "\0"  # no text has that


def _value(rest: list[tuple[str, str]]) -> str | None:
    """What stands behind the name in a SET; None if that is not one value."""
    if len(rest) != 2 or (rest[0] != ("mark", "=") and _word(rest, 0) != "to"):
        return None
    kind, text = rest[1]
    if kind == "word":
        return _DEFAULT if text.lower() == "default" else text.lower()
    if kind == "number":
        return re.sub(r"\s", "", text).removeprefix("+")
    return text if kind in ("string", "quoted") else None


def _unknown(name: str) -> OwnFault | None:
    short = name.removeprefix(PREFIX)
    if short in NAMES:
        return None
    nearest = difflib.get_close_matches(short, NAMES, n=1, cutoff=0.0)[0]
    return OwnFault(f'unrecognized configuration parameter "{name}"', sqlstate.UNDEFINED_OBJECT,
                    f'The nearest parameter of the pooler is "{PREFIX}{nearest}".')


def checked(name: str, value: str) -> str:
    """The value as it is kept. Raises OwnFault (22023) that says what is allowed."""
    if name == DEADLINE:
        return shown_deadline(deadline_seconds(value))
    if name == TICKET:
        if _TICKET.fullmatch(value) is None:
            raise _wrong(name, value, f"up to {NAME_BYTES_MAX} letters, digits and any of _ . : -")
        return value
    if not value or not value.isprintable() or "\\" in value or len(
            value.encode(errors="surrogateescape")) > NAME_BYTES_MAX:
        raise _wrong(name, value, f"1 to {NAME_BYTES_MAX} bytes of printable text without a backslash")
    return value


def deadline_seconds(value: str) -> float:
    """Milliseconds, or a number with us, ms, s, min, h or d; infinite for none. Raises OwnFault."""
    if value.lower() == NO_DEADLINE:
        return math.inf
    found = _DURATION.fullmatch(value.strip())
    scale = _MS_OF.get(found[2]) if found else None
    if found is None or scale is None:
        raise _wrong(DEADLINE, value, 'milliseconds, a number with "us", "ms", "s", "min", "h" or "d", '
                                      f'or "{NO_DEADLINE}"')
    return float(found[1]) * scale / 1e3


def shown_deadline(seconds: float) -> str:
    """As SHOW and errors have it: 50ms, 2s, none."""
    if math.isinf(seconds):
        return NO_DEADLINE
    unit, per_second = ("s", 1.0) if seconds >= 1 and seconds == int(seconds) else ("ms", 1e3)
    return f"{round(seconds * per_second, 3):.15g}{unit}"


def _wrong(name: str, value: str, allowed: str) -> OwnFault:
    said = value if len(value) <= NAME_BYTES_MAX else value[:NAME_BYTES_MAX] + "..."
    return OwnFault(f'invalid value for parameter "{PREFIX}{name}": "{said}"',
                    sqlstate.INVALID_PARAMETER_VALUE, f"Available values: {allowed}.")


def take_startup(start: MutableMapping[bytes, bytes]) -> dict[str, str]:
    """What a start says of these, checked, and taken out of it: no server is to see it. Raises OwnFault."""
    taken: dict[str, str] = {}
    for key in [key for key in start if key.lower().startswith(PREFIX.encode())]:
        name, value = shown(key).lower(), shown(start.pop(key))
        fault = _unknown(name)
        if fault is not None:
            raise fault
        short = name.removeprefix(PREFIX)
        taken[short] = checked(short, value)
    return taken


def without_own(options: str) -> str:
    """An `options` parameter without what it says of these; as it came if it says nothing of them."""
    if PREFIX not in options.lower():
        return options
    kept: list[str] = []
    words = iter(split_options(options))
    for word in words:
        said = [word, next(words, "")] if word == "-c" else [word]
        setting = said[-1].removeprefix("--").removeprefix("-c") if len(said) == 1 else said[-1]
        if not setting.lower().startswith(PREFIX):
            kept += [re.sub(r"([\\\s])", r"\\\1", each) for each in said]
    return " ".join(kept)
