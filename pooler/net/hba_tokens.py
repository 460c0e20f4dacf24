"""The lines and words of pg_hba.conf and pg_ident.conf, with the files that they include.

Source: PostgreSQL's hba.c (tokenize_auth_file, next_token): fields are separated by blanks, the words of a
field by commas; `#` begins a comment, a backslash at the end of a line continues it, double quotes take a
word's special meaning away (a quote inside is doubled). Files are read through `read`, so that this decides
nothing about where they are. Every fault names its file and line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pooler.errors import UsageFault

FILE_BYTES_MAX = 1 << 20
INCLUDE_DEPTH_MAX = 10
_INCLUDES = ("include", "include_if_exists", "include_dir")
_WORD = re.compile(r'(?:"(?:[^"]|"")*"|[^\s,"#])+')


class HbaFault(UsageFault):
    """A line that cannot be used: `where` is file:line."""

    def __init__(self, where: str, text: str) -> None:
        super().__init__(f"{where}: {text}")


@dataclass(frozen=True, slots=True)
class Word:
    """One word; a quoted one has no special meaning."""

    text: str
    quoted: bool = False

    def is_keyword(self, *names: str) -> bool:
        """Whether it stands for one of these and is not a name."""
        return not self.quoted and self.text in names


Field = tuple[Word, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """One entry: its fields, and where it stands."""

    where: str
    fields: tuple[Field, ...]


@dataclass(frozen=True, slots=True)
class Files:
    """Reading: `text` of a file (UsageFault if it cannot be read), its existence, the files of a folder."""

    text: Callable[[Path], str]
    exists: Callable[[Path], bool]
    folder: Callable[[Path], list[Path]]


def read_text(path: Path) -> str:
    """The text of a file. Raises UsageFault: unreadable, too large, not UTF-8."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise UsageFault(f"{path}: larger than {FILE_BYTES_MAX} bytes")
        return content.decode()
    except OSError as fault:
        raise UsageFault(f"{path}: cannot be read: {fault.strerror}") from fault
    except UnicodeDecodeError:
        raise UsageFault(f"{path}: is not UTF-8 text") from None


def _folder(path: Path) -> list[Path]:
    try:
        return sorted(each for each in path.iterdir() if each.suffix == ".conf" and each.name[0] != ".")
    except OSError as fault:
        raise UsageFault(f"{path}: cannot be read: {fault.strerror}") from fault


DISK = Files(read_text, Path.exists, _folder)


def lines_of(path: Path, files: Files, faults: list[str], depth: int = 0) -> Iterator[Line]:
    """The entries of a file and of what it includes, in order. What is wrong is added to `faults`."""
    try:
        content = files.text(path)
    except UsageFault as fault:
        faults.append(str(fault))
        return
    for number, text in _joined(content):
        where = f"{path}:{number}"
        try:
            fields = tuple(_fields(text, where))
        except HbaFault as fault:
            faults.append(str(fault))
            continue
        if not fields:
            continue
        if fields[0][0].is_keyword(*_INCLUDES):
            yield from _included(Line(where, fields), path.parent, files, faults, depth)
        else:
            yield Line(where, fields)


def words_of_file(path: Path, where: str, files: Files, depth: int = 0) -> Iterator[Word]:
    """The names in a file that stands as @file in a list. Raises UsageFault, HbaFault."""
    if depth > INCLUDE_DEPTH_MAX:
        raise HbaFault(where, f"@{path.name}: files include each other more than {INCLUDE_DEPTH_MAX} deep")
    for number, text in _joined(files.text(path)):
        for field in _fields(text, f"{path}:{number}"):
            yield from resolved(field, f"{path}:{number}", path.parent, files, depth + 1)


def resolved(field: Field, where: str, base: Path, files: Files, depth: int = 0) -> Iterator[Word]:
    """The words of a field, those of its @files in their place. Raises UsageFault, HbaFault."""
    for word in field:
        if not word.quoted and word.text.startswith("@") and len(word.text) > 1:
            yield from words_of_file(base / word.text[1:], where, files, depth)
        else:
            yield word


def _included(
    line: Line, base: Path, files: Files, faults: list[str], depth: int
) -> Iterator[Line]:
    keyword = line.fields[0][0].text
    if len(line.fields) != 2 or len(line.fields[1]) != 1:
        faults.append(f"{line.where}: {keyword} takes one file: write {keyword} NAME")
        return
    if depth >= INCLUDE_DEPTH_MAX:
        faults.append(f"{line.where}: files include each other more than {INCLUDE_DEPTH_MAX} deep")
        return
    target = base / line.fields[1][0].text
    if keyword == "include_if_exists" and not files.exists(target):
        return
    try:
        paths = files.folder(target) if keyword == "include_dir" else [target]
    except UsageFault as fault:
        faults.append(f"{line.where}: {fault}")
        return
    for path in paths:
        yield from lines_of(path, files, faults, depth + 1)


def _joined(content: str) -> Iterator[tuple[int, str]]:
    """Lines with the number of their first one; a backslash at the end goes on with the next."""
    first, held = 0, ""
    for number, raw in enumerate(content.split("\n"), start=1):
        first = first or number
        text = raw.removesuffix("\r")
        if text.endswith("\\"):
            held += text[:-1]
            continue
        yield first, held + text
        first, held = 0, ""
    if held:
        yield first, held


def _fields(text: str, where: str) -> Iterator[Field]:
    """The fields of a line. A comma right behind a word joins the next one to it; others mean nothing."""
    at, size = 0, len(text)
    words: list[Word] = []
    while at < size and text[at] != "#":
        if text[at].isspace() or text[at] == ",":
            at += 1
            continue
        found = _WORD.match(text, at)
        if found is None:
            raise HbaFault(where, 'a double quote is not closed: write a name with blanks as "name"')
        words.append(_word(found.group()))
        at = found.end()
        if text[at : at + 1] != ",":
            yield tuple(words)
            words = []
    if words:
        yield tuple(words)


def _word(raw: str) -> Word:
    if '"' not in raw:
        return Word(raw)
    plain = re.sub(r'"((?:[^"]|"")*)"', lambda found: found.group(1).replace('""', '"'), raw)
    return Word(plain, quoted=raw.startswith('"'))
