"""An ini's entries as PgBouncer understands them: settings and defaults, databases, users, peers. Pure.

Everything PgBouncer refuses is refused, every fault of the file at once, each with its line and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from pooler.dropin.connstring import parse_pairs
from pooler.dropin.ini import Entry, IniRefused, Place, last_of
from pooler.dropin.known import ALIASES, BY_NAME, DATABASE_KEYS, LATER, PEER_KEYS, USER_KEYS, Kind, Known
from pooler.dropin.values import Value, read_value

ANY_DATABASE = "*"
CONSOLE_DATABASE = "pgbouncer"
PEER_ID_MAX = 0xFFFF


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting's value; `place` None: nobody wrote it, it is the default. `value` None: unset."""

    known: Known
    text: str | None
    value: Value | None
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """An entry of [databases], [users] or [peers]."""

    name: str
    values: Mapping[str, Value] = field(repr=False)  # a password may be among them
    place: Place

    def text(self, key: str) -> str | None:
        """A text value, None if it is not given."""
        value = self.values.get(key)
        return None if value is None else str(value)

    def whole(self, key: str) -> int | None:
        """A whole number, None if it is not given or negative (PgBouncer's way to say `as usual`)."""
        value = self.values.get(key)
        return value if isinstance(value, int) and value >= 0 else None


@dataclass(frozen=True, slots=True)
class Bouncer:
    """A whole ini. `settings` has every setting of 1.25, given or not."""

    settings: Mapping[str, Setting]
    databases: Mapping[str, Part]
    users: Mapping[str, Part]
    peers: Mapping[str, Part]

    def value(self, name: str) -> Value | None:
        """The value of a setting."""
        return self.settings[name].value

    def words(self, name: str) -> tuple[str, ...]:
        """A setting that is a list."""
        value = self.settings[name].value
        return value if isinstance(value, tuple) else ()

    def whole(self, name: str) -> int:
        """A setting that is a whole number."""
        value = self.settings[name].value
        return value if isinstance(value, int) else 0

    def text(self, name: str) -> str:
        """A setting that is text, empty if it is unset."""
        value = self.settings[name].value
        return value if isinstance(value, str) else ""


def read_bouncer(entries: list[Entry]) -> Bouncer:
    """What the entries of `parse_ini` mean. Raises IniRefused with every fault."""
    reader = _Meaning()
    for entry in entries:
        reader.take(entry)
    if reader.faults:
        raise IniRefused(reader.faults)
    given = last_of(entries, "pgbouncer")
    settings = {known.name: _setting(known, given.get(known.name)) for known in BY_NAME.values()}
    settings |= {name: _setting(known, given[name]) for name, known in LATER.items() if name in given}
    return Bouncer(settings, reader.parts["databases"], reader.parts["users"], reader.parts["peers"])


def _setting(known: Known, entry: Entry | None) -> Setting:
    text = known.default if entry is None else entry.value
    value = None if text is None else read_value(known.name, known.kind, text)
    return Setting(known, text, value, None if entry is None else entry.place)


class _Meaning:
    def __init__(self) -> None:
        self.faults: list[str] = []
        self.parts: dict[str, dict[str, Part]] = {"databases": {}, "users": {}, "peers": {}}

    def take(self, entry: Entry) -> None:
        if entry.section == "pgbouncer":
            self._take_setting(entry)
            return
        if entry.section == "databases" and entry.key == CONSOLE_DATABASE:
            self._blame(entry, f'database name "{entry.key}" is reserved for the console: give it another')
        if entry.section == "peers" and not _is_peer_id(entry.key):
            self._blame(entry, f'peer "{entry.key}" must be a number from 1 to {PEER_ID_MAX}')
        keys = {"databases": DATABASE_KEYS, "users": USER_KEYS, "peers": PEER_KEYS}[entry.section]
        self.parts[entry.section][entry.key] = Part(entry.key, self._pairs(entry, keys), entry.place)
        if entry.section == "peers" and "host" not in self.parts["peers"][entry.key].values:
            self._blame(entry, f"peer {entry.key} has no host: write host=...")

    def _take_setting(self, entry: Entry) -> None:
        known = BY_NAME.get(entry.key) or LATER.get(entry.key)
        if known is None:
            self._blame(entry, f"unknown parameter {entry.key}{_near(entry.key, (*BY_NAME, *LATER))}")
            return
        try:
            read_value(known.name, known.kind, entry.value)
        except ValueError as fault:
            self._blame(entry, f"{entry.key}: {fault}")

    def _pairs(self, entry: Entry, keys: Mapping[str, Kind]) -> dict[str, Value]:
        values: dict[str, Value] = {}
        try:
            pairs = parse_pairs(entry.value)
        except ValueError as fault:
            self._blame(entry, f"{entry.key}: {fault}")
            return values
        for key, text in pairs.items():
            if key not in keys:
                self._blame(entry, f"{entry.key}: unrecognized parameter {key}{_near(key, tuple(keys))}")
                continue
            try:
                values[ALIASES.get(key, key)] = read_value(key, keys[key], text)
            except ValueError as fault:
                self._blame(entry, f"{entry.key}: {key}: {fault}")
        port = values.get("port")
        if port is not None and not (isinstance(port, int) and 1 <= port <= 65535):
            self._blame(entry, f"{entry.key}: port {port} must be from 1 to 65535")
        return values

    def _blame(self, entry: Entry, what: str) -> None:
        self.faults.append(f"{entry.place}: {what}")


def _is_peer_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and 1 <= int(key) <= PEER_ID_MAX


def _near(word: str, known: tuple[str, ...]) -> str:
    found = get_close_matches(word, known, n=1)
    return f": did you mean {found[0]}?" if found else ": PgBouncer 1.25 has no such parameter"
