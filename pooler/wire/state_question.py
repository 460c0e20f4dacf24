"""What a session is asked about itself between two clients, and how its answer is read.

Settings are listed by the server where it knows them to come from this session; those of an extension that is
not loaded (`app.tenant`) and the two identities are listed nowhere and have to be asked for by name. Pure.
Source: PostgreSQL documentation, "pg_settings", "pg_cursors", "pg_locks", "System Administration Functions".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from pooler.wire.parameters import literal
from pooler.wire.session_state import Residue

ROLE, AUTHORIZATION = b"role", b"session_authorization"

_SETTINGS: Final = (
    b"SELECT s.name, s.setting FROM pg_catalog.pg_settings s"
    b" WHERE s.source OPERATOR(pg_catalog.=) 'session' AND s.name OPERATOR(pg_catalog.!~) '^transaction_'"
    b" UNION ALL SELECT n, pg_catalog.current_setting(n, true)"
    b" FROM pg_catalog.unnest(ARRAY[%b]::pg_catalog.text[]) n"
)
_STATES: Final[dict[Residue, bytes]] = {
    Residue.LISTEN: b"pg_catalog.pg_listening_channels()",
    Residue.CURSORS: b"pg_catalog.pg_cursors c WHERE c.is_holdable",
    Residue.PREPARED: b"pg_catalog.pg_prepared_statements p WHERE p.from_sql",
    Residue.TEMP: (  # of every kind: what DISCARD TEMP goes by
        b"pg_catalog.pg_depend d WHERE d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_namespace'"
        b"::pg_catalog.regclass AND d.refobjid OPERATOR(pg_catalog.=) pg_catalog.pg_my_temp_schema()"),
    Residue.ADVISORY: (
        b"pg_catalog.pg_locks l WHERE l.locktype OPERATOR(pg_catalog.=) 'advisory'"
        b" AND l.pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid()"),
}
_MARK: Final = b"?"  # no setting has a name that begins like this


class SessionState(NamedTuple):
    """`settings` by name, as set on the session; `residue`: which kinds of other state it has."""

    settings: dict[bytes, bytes]
    residue: int


def question(custom: Iterable[bytes], states: int) -> bytes:
    """SQL for what is set on the session, and whether it has any state of the kinds in `states`.

    `custom` are names of settings that are to be asked for by name.
    """
    names = b",".join(literal(name) for name in (ROLE, AUTHORIZATION, *custom))
    parts = [_SETTINGS % names]
    parts += [
        b"SELECT '%b%d', NULL WHERE EXISTS (SELECT FROM %b)" % (_MARK, int(kind), source)
        for kind, source in _STATES.items() if kind & states
    ]
    return b" UNION ALL ".join(parts)


def read_answer(rows: Iterable[Sequence[bytes | None]], login: bytes) -> SessionState:
    """The state. `login` is the user that the session was opened for. Raises ValueError for rows that are no
    answer to the question.

    An empty value of a custom setting is what the server leaves after a RESET: it counts as not set.
    """
    settings: dict[bytes, bytes] = {}
    residue = 0
    for row in rows:
        name, value = row
        if name is None:
            raise ValueError("a setting without a name")
        if name.startswith(_MARK):
            residue |= int(name[1:])
        elif value is None or (name, value) in ((ROLE, b"none"), (AUTHORIZATION, login)):
            continue
        elif value or b"." not in name:
            settings[name] = value
    return SessionState(settings, residue)
