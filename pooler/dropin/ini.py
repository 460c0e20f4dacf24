"""PgBouncer's ini dialect: text in, entries with their place out, every fault of a file at once. Pure.

Source: PgBouncer's config page and libusual's cfparser. A section may come again and adds to what it had; a
key may come again and the last one wins; `%include FILE` stands for that file's lines and leaves the section
that file ended in. A value is the rest of its line. What a value means is not decided here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from pooler.errors import UsageFault

SECTIONS: Final = ("databases", "users", "peers", "pgbouncer")
INCLUDES_DEEP_MAX: Final = 10
FILE_CHARACTERS_MAX: Final = 16 * 1024 * 1024

_SPACE = re.compile(r"\s+")
_COMMENT = re.compile(r"[#;][^\n]*")
_HEADER = re.compile(r"\[([^\]\n]*)(\]?)")
_INCLUDE = re.compile(r"%include[ \t]+([^\n]*)")
_KEY = re.compile(r'"((?:[^"\n]|"")*)"|([A-Za-z0-9_.*-]+)')
_ASSIGNED = re.compile(r"[ \t]*=[ \t]*([^\n]*)")
_REST = re.compile(r"[^\n]*")

ReadFile = Callable[[str], str]
"""A path as written → the file's text. Raises OSError or UnicodeDecodeError."""


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One `key = value` line."""

    section: str
    key: str
    value: str = field(repr=False)  # may hold a password
    place: Place


class IniRefused(UsageFault):
    """The file cannot be read as PgBouncer's ini. `faults` has `file:line: what; what to do` for each."""

    exit_code = 1  # PgBouncer's

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


def parse_ini(file: str, read: ReadFile) -> list[Entry]:
    """The entries of `file` and what it includes, in their order, repeated keys and all.

    Raises IniRefused with every fault.
    """
    reader = _Reader(read)
    reader.take(file, Place(file, 0), 0)
    if reader.faults:
        raise IniRefused(reader.faults)
    return reader.entries


def last_of(entries: list[Entry], section: str) -> dict[str, Entry]:
    """The entries of a section by key, the last of each, in the order in which the keys first came."""
    found: dict[str, Entry] = {}
    for entry in entries:
        if entry.section == section:
            found[entry.key] = entry
    return found


class _Reader:
    def __init__(self, read: ReadFile) -> None:
        self._read = read
        self._section = ""
        self.entries: list[Entry] = []
        self.faults: list[str] = []

    def take(self, file: str, named_at: Place, depth: int) -> None:
        where = f"{named_at}: " if named_at.line else ""
        if depth > INCLUDES_DEEP_MAX:
            self.faults.append(f"{where}%include goes deeper than {INCLUDES_DEEP_MAX} files: "
                               "does a file include itself?")
            return
        try:
            text = self._read(file)
        except UnicodeDecodeError:
            self.faults.append(f"{where}{file} is not UTF-8 text: save it as UTF-8")
            return
        except OSError as fault:
            self.faults.append(f"{where}cannot read {file}: {fault.strerror or fault}")
            return
        if len(text) > FILE_CHARACTERS_MAX or "\0" in text:
            self.faults.append(f"{where}{file} is no ini file: it has zero bytes or is larger than 16 MB")
            return
        for found in _tokens(text):
            self._take_token(found, Place(file, found.line), depth)

    def _take_token(self, token: _Token, place: Place, depth: int) -> None:
        if token.kind == "include":
            self.take(token.value, place, depth + 1)
        elif token.kind == "section":
            self._section = token.value
            if token.value not in SECTIONS:
                self._blame(place, f"unknown section [{token.value}]: "
                                   "it must be [databases], [users], [peers] or [pgbouncer]")
        elif token.kind == "fault":
            self._blame(place, token.value)
        elif not self._section:
            self._blame(place, f'"{token.key}" stands before any section: '
                               "write [databases], [users], [peers] or [pgbouncer] above it")
        elif self._section in SECTIONS:
            self.entries.append(Entry(self._section, token.key, token.value, place))

    def _blame(self, place: Place, what: str) -> None:
        self.faults.append(f"{place}: {what}")


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # include, section, entry, fault
    line: int
    value: str = field(repr=False)
    key: str = ""


def _tokens(text: str) -> Iterator[_Token]:
    at, line, counted = 0, 1, 0
    while at < len(text):
        if (skipped := _SPACE.match(text, at) or _COMMENT.match(text, at)) is not None:
            at = skipped.end()
            continue
        line += text.count("\n", counted, at)
        counted = at
        token, at = _token(text, at, line)
        yield token


def _token(text: str, at: int, line: int) -> tuple[_Token, int]:
    if (header := _HEADER.match(text, at)) is not None:
        if not header[2]:
            return _Token("fault", line, "the section's name is not closed: write [name]"), header.end()
        return _Token("section", line, header[1]), header.end()
    if (include := _INCLUDE.match(text, at)) is not None:
        return _Token("include", line, include[1].strip()), include.end()
    key = _KEY.match(text, at)
    assigned = _ASSIGNED.match(text, key.end()) if key is not None else None
    if key is None or assigned is None:
        rest = _REST.match(text, at)
        assert rest is not None  # it matches anything
        return _Token("fault", line, "this is no `key = value` (a comment begins with ; or #)"), rest.end()
    name = key[2] if key[1] is None else key[1].replace('""', '"')
    if not name:
        return _Token("fault", line, "the name is empty"), assigned.end()
    return _Token("entry", line, assigned[1].strip(), name), assigned.end()
