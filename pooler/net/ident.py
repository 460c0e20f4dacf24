"""pg_ident.conf: which name outside (of a unix user, of a certificate) may be which user here.

Source: PostgreSQL documentation, "User Name Maps"; hba.c, check_ident_usermap. A system name that begins with
a slash is a regular expression; `\\1` in the user's name is what its first parentheses matched. Without a map
the two names must be the same. Pure but for reading files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pooler.errors import UsageFault
from pooler.net.hba import pattern_of
from pooler.net.hba_tokens import DISK, Files, HbaFault, Line, lines_of


@dataclass(frozen=True, slots=True)
class Entry:
    """One line: a name or pattern outside, and a name, a pattern or (None) anybody here."""

    system: str | re.Pattern[str]
    user: str | re.Pattern[str] | None

    def allows(self, system: str, user: str) -> bool:
        """Whether this line lets `system` be `user`."""
        captured: str | None = None
        if isinstance(self.system, str):
            if self.system != system:
                return False
        else:
            found = self.system.search(system)
            if found is None:
                return False
            captured = found.group(1) if found.re.groups else None
        if self.user is None:
            return True
        if not isinstance(self.user, str):
            return self.user.search(user) is not None
        wanted = self.user if captured is None else self.user.replace("\\1", captured)
        return wanted == user


@dataclass(frozen=True, slots=True)
class IdentMaps:
    """The maps of a file."""

    maps: Mapping[str, tuple[Entry, ...]] = field(default_factory=dict)

    def allows(self, name: str | None, system: str, user: str) -> bool:
        """Whether `system` may be `user` by map `name`; None: only if they are the same. A map that does not
        exist lets nobody in."""
        if name is None:
            return system == user
        return any(entry.allows(system, user) for entry in self.maps.get(name, ()))


def read_ident(path: Path, *, files: Files = DISK) -> IdentMaps:
    """The maps in a file and what it includes. Raises UsageFault naming every faulty line."""
    faults: list[str] = []
    maps: dict[str, list[Entry]] = {}
    for line in lines_of(path, files, faults):
        try:
            name, entry = _read_entry(line)
        except HbaFault as fault:
            faults.append(str(fault))
        else:
            maps.setdefault(name, []).append(entry)
    if faults:
        raise UsageFault("\n".join(faults))
    return IdentMaps({name: tuple(entries) for name, entries in maps.items()})


def _read_entry(line: Line) -> tuple[str, Entry]:
    if len(line.fields) != 3 or any(len(words) != 1 for words in line.fields):
        raise HbaFault(line.where, "three names belong on a line: write MAP SYSTEM-NAME USER")
    name, system, user = (words[0] for words in line.fields)
    known: str | re.Pattern[str] = system.text
    if system.text.startswith("/"):
        known = pattern_of(line.where, system.text)
        if not user.text.startswith("/") and "\\1" in user.text and not known.groups:
            raise HbaFault(line.where, f"{user.text} asks for what parentheses in {system.text} matched: "
                                       "there are none")
    if not user.quoted and user.text.startswith("+"):
        raise HbaFault(line.where, f"{user.text}: membership of roles is not known here: write one line for "
                                   "each user")
    if user.is_keyword("all"):
        return name.text, Entry(known, None)
    if user.text.startswith("/"):
        return name.text, Entry(known, pattern_of(line.where, user.text))
    return name.text, Entry(known, user.text)
