"""Parameters that follow a client to whichever session serves it.

A client and a server session each hold one `ParameterSet`. Sets are frozen and interned, so in the steady
state "nothing to do" is `client.parameters is server.parameters`. Where they differ, `difference` is the SQL
that makes the session fit, and after it `adopt` makes the two one object again: a server may write a value
differently from how it was given (`ISO` becomes `ISO, MDY`), and the set then holds the server's form.

Parameters that are not tracked and that a client gave at its start, or has set since, travel with it as
`extra`; `with_settings` takes them from what a session says of itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

TRACKED_ALWAYS: Final = (
    b"client_encoding",
    b"DateStyle",
    b"TimeZone",
    b"IntervalStyle",
    b"standard_conforming_strings",
    b"application_name",
    b"search_path",
)
NOT_PARAMETERS: Final = frozenset({b"user", b"database", b"replication", b"options"})
OWN_APPLICATION: Final = b"pooler"
SETS_KEPT_MAX: Final = 10_000
SETS_KEPT_BYTES_MAX: Final = 8 << 20  # of their values

# SET takes these as one literal; of a list such as search_path it would make one name with commas in it
_PLAIN = frozenset(TRACKED_ALWAYS) - {b"search_path"}
_ENCODING, _APPLICATION, _SEARCH_PATH = 0, 5, 6
_NAME = re.compile(rb"[A-Za-z_][A-Za-z0-9_$]*(?:\.[A-Za-z_][A-Za-z0-9_$]*)*\Z")
_CODECS: Final = {
    b"UTF8": "utf-8",
    b"LATIN1": "iso8859-1",
    b"LATIN2": "iso8859-2",
    b"LATIN5": "iso8859-9",
    b"LATIN9": "iso8859-15",
    b"WIN1250": "cp1250",
    b"WIN1251": "cp1251",
    b"WIN1252": "cp1252",
    b"KOI8R": "koi8-r",
    b"EUC_JP": "euc-jp",
    b"EUC_KR": "euc-kr",
    b"EUC_CN": "gb2312",
    b"SJIS": "shift-jis",
    b"GBK": "gbk",
    b"GB18030": "gb18030",
    b"BIG5": "big5",
    b"UHC": "cp949",
}

# While one of these is another than the login's, what the login may set may be refused: they go first when
# they are undone and come last when they are set. The second undoes the first.
_IDENTITY: Final = (b"role", b"session_authorization")

# What a server took once it takes again; of other settings that is not known (a role may be dropped)
_TAKEN_ALWAYS: Final = frozenset((
    b"bytea_output", b"client_min_messages", b"default_transaction_deferrable",
    b"default_transaction_isolation", b"default_transaction_read_only", b"extra_float_digits", b"geqo",
    b"idle_in_transaction_session_timeout", b"idle_session_timeout", b"jit", b"lock_timeout", b"row_security",
    b"statement_timeout", b"synchronous_commit", b"transaction_timeout", b"work_mem",
))

Extra = tuple[tuple[bytes, bytes], ...]


class TrackedParameters:
    """Which parameters are tracked, and every set of their values that is in use.

    `extra` are the names of `track_extra_parameters`. Raises ValueError for what is not a parameter's name.
    """

    __slots__ = ("_index", "_kept_bytes", "_sets", "empty", "names")

    def __init__(self, extra: Iterable[str] = ()) -> None:
        names = list(TRACKED_ALWAYS)
        for name in extra:
            raw = name.encode()
            if _NAME.match(raw) is None:
                raise ValueError(f"{name!r} is not the name of a parameter")
            if raw.lower() not in {known.lower() for known in names}:
                names.append(raw)
        self.names = tuple(names)
        self._index = {name.lower(): at for at, name in enumerate(names)} | {
            name: at for at, name in enumerate(names)
        }
        self._sets: dict[tuple[tuple[bytes | None, ...], int, Extra], ParameterSet] = {}
        self._kept_bytes = 0
        self.empty = self.intern((None,) * len(names), 0, ())

    def index(self, name: bytes) -> int | None:
        """Where a name stands in `names`, in any case; None if it is not tracked."""
        at = self._index.get(name)
        return self._index.get(name.lower()) if at is None else at

    def intern(self, values: tuple[bytes | None, ...], told: int, extra: Extra) -> ParameterSet:
        """The one set of these values. Beyond SETS_KEPT_MAX, or SETS_KEPT_BYTES_MAX, two equal ones may be
        made: slower, not wrong."""
        key = (values, told, extra)
        known = self._sets.get(key)
        if known is None:
            if len(self._sets) >= SETS_KEPT_MAX or self._kept_bytes >= SETS_KEPT_BYTES_MAX:
                self._sets.clear()
                self._kept_bytes = 0
            known = self._sets[key] = ParameterSet(self, values, told, extra)
            self._kept_bytes += known.size_bytes + sum(len(value) for value in values if value is not None)
        return known

    def from_statuses(self, statuses: Iterable[tuple[bytes, bytes]]) -> ParameterSet:
        """The set that a server reports at the start of a session."""
        found = self.empty
        for name, value in statuses:
            found = found.with_status(name, value)
        return found


class ParameterSet:
    """Values of the tracked parameters in the order of their names; None where a value is unknown.

    `told` has a bit for each value that the server reports by itself.
    """

    __slots__ = ("_tracked", "extra", "may_be_refused", "search_path", "told", "values")

    def __init__(
        self, tracked: TrackedParameters, values: tuple[bytes | None, ...], told: int, extra: Extra
    ) -> None:
        self._tracked = tracked
        self.values = values
        self.told = told
        self.extra = extra
        self.search_path = values[_SEARCH_PATH]
        self.may_be_refused = any(name not in _TAKEN_ALWAYS for name, _ in extra)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Names and values of what a client is greeted with."""
        for at, (name, value) in enumerate(zip(self._tracked.names, self.values, strict=True)):
            if value is not None and self.told >> at & 1:
                yield name, value

    def get(self, name: bytes) -> bytes | None:
        """One value; None if it is unknown or not tracked."""
        at = self._tracked.index(name)
        return None if at is None else self.values[at]

    def with_status(self, name: bytes, value: bytes) -> ParameterSet:
        """After a ParameterStatus message; the same object if it changes nothing tracked."""
        at = self._tracked.index(name)
        if at is None or (self.values[at] == value and self.told >> at & 1):
            return self
        values = (*self.values[:at], value, *self.values[at + 1 :])
        return self._tracked.intern(values, self.told | 1 << at, self.extra)

    def with_startup(self, parameters: Mapping[bytes, bytes]) -> ParameterSet:
        """What a client that starts with these parameters wants, where this set is the session's default.

        Names in any case; user, database, replication, options and `_pq_.` ones are passed over. Raises
        ValueError for what cannot be the name of a parameter.
        """
        values = list(self.values)
        extra: dict[bytes, bytes] = dict(self.extra)
        for name, value in parameters.items():
            if name in NOT_PARAMETERS or name.startswith(b"_pq_."):
                continue
            at = self._tracked.index(name)
            if at is not None:
                values[at] = value
            elif _NAME.match(name) is None:
                raise ValueError(f"{name.decode(errors='replace')!r} is not the name of a parameter")
            else:
                extra[name.lower()] = value
        return self._tracked.intern(tuple(values), self.told, tuple(sorted(extra.items())))

    def difference(self, wanted: ParameterSet) -> bytes | None:
        """SQL, to be sent as one Query, that turns a session with this set into one with `wanted`.

        None if there is nothing to do; a value that is unknown in `wanted` is the session's default.
        """
        if wanted is self or (wanted.values == self.values and wanted.extra == self.extra):
            return None
        recode = _Recode(wanted.values[_ENCODING], self.values[_ENCODING])
        parts = [
            _reset(name) if value is None else _set(name, recode(_foreign(at, value)))
            for at, (name, now, value) in enumerate(
                zip(self._tracked.names, self.values, wanted.values, strict=True)
            )
            if value != now and (value is None or _foreign(at, value) != now)
        ]
        old, new = dict(self.extra), dict(wanted.extra)
        parts += [_reset(name) for name in old if name not in new and name not in _IDENTITY]
        parts += [_set(name, recode(value)) for name, value in new.items()
                  if old.get(name) != value and name not in _IDENTITY]
        if not parts and all(old.get(name) == new.get(name) for name in _IDENTITY):
            return None
        undone = [_reset(name) for name in reversed(_IDENTITY) if name in old]
        taken = [_set(name, recode(new[name])) for name in reversed(_IDENTITY) if name in new]
        return b";".join([*undone, *parts, *taken])

    def adopt(self, wanted: ParameterSet) -> ParameterSet:
        """After the difference was applied, or was None: the set of both session and client.

        What the server reports is as it reports it, the rest as it was wanted.
        """
        values = tuple(
            mine if self.told >> at & 1 else theirs
            for at, (mine, theirs) in enumerate(zip(self.values, wanted.values, strict=True))
        )
        return self._tracked.intern(values, self.told, wanted.extra)

    def with_settings(self, found: Mapping[bytes, bytes]) -> ParameterSet:
        """Where a session says that just `found` is set on it, by names as the server writes them.

        What the server reports by itself is known better already and stays.
        """
        values = tuple(
            mine if self.told >> at & 1 else found.get(name)
            for at, (name, mine) in enumerate(zip(self._tracked.names, self.values, strict=True)))
        extra = {name.lower(): value for name, value in found.items() if self._tracked.index(name) is None}
        return self._tracked.intern(values, self.told, tuple(sorted(extra.items())))

    def again(
        self, started: ParameterSet, fresh: ParameterSet, found: Collection[bytes] = ()
    ) -> ParameterSet:
        """After a RESET: what went back to the session's `fresh` value has, to its client, the value that it
        `started` with. `found`: what is set on the session all the same."""
        values = tuple(
            first if mine == default and first != default and name not in found else mine
            for name, mine, first, default in zip(
                self._tracked.names, self.values, started.values, fresh.values, strict=True))
        return self._tracked.intern(
            values, self.told, tuple(sorted((dict(started.extra) | dict(self.extra)).items())))

    @property
    def size_bytes(self) -> int:
        """Of the names and values in `extra`."""
        return sum(len(name) + len(value) for name, value in self.extra)

    def after_reset(self, fresh: ParameterSet) -> ParameterSet:
        """After RESET ALL or DISCARD ALL on a session that began with `fresh`.

        The server reports what changed of the values that it reports; the others are as they began.
        """
        values = tuple(
            mine if fresh.told >> at & 1 else first
            for at, (mine, first) in enumerate(zip(self.values, fresh.values, strict=True))
        )
        return self._tracked.intern(values, fresh.told, fresh.extra)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name.decode()}={value!r}" for name, value in self.items())
        return f"<ParameterSet {shown}>"


class _Recode:
    """A Query is read in the encoding that the session has when it comes, so values must be written in it."""

    __slots__ = ("source", "target")

    def __init__(self, source: bytes | None, target: bytes | None) -> None:
        self.source = _codec(source)
        self.target = _codec(target)

    def __call__(self, value: bytes) -> bytes:
        if value.isascii() or self.source == self.target or not self.source or not self.target:
            return value
        return value.decode(self.source, "replace").encode(self.target, "replace")


def _codec(encoding: bytes | None) -> str:
    name = (encoding or b"").upper().replace(b"-", b"").replace(b"UNICODE", b"UTF8")
    return _CODECS.get(name, "")


def _foreign(at: int, application: bytes) -> bytes:
    """A client may not take the name that marks the pooler's own sessions."""
    if at == _APPLICATION and application.startswith(OWN_APPLICATION):
        return b"_" + application
    return application


def _set(name: bytes, value: bytes) -> bytes:
    if name in _PLAIN:
        return b"SET %b=%b" % (name, literal(value))
    return b"SELECT pg_catalog.set_config(%b,%b,false)" % (literal(name), literal(value))


def _reset(name: bytes) -> bytes:
    return b"RESET %b" % name


def literal(value: bytes) -> bytes:
    """A string literal that means the same whatever standard_conforming_strings is."""
    quoted = value.replace(b"'", b"''")
    if b"\\" in quoted:
        return b"E'%b'" % quoted.replace(b"\\", b"\\\\")
    return b"'%b'" % quoted
