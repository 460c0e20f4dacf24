"""What a transaction leaves behind on a server session, and the least SQL that undoes it.

Two sources say it: command tags (SET, LISTEN, PREPARE, ...) and the text of a statement, for what tags do
not tell (set_config, advisory locks, temporary objects, held cursors). A text is first searched for a few
words; only if one is there, comments and literals are taken out and it is looked at closely. Saying too much
costs one clean-up; saying too little would hand one client's state to the next, so doubt counts as yes. What
a called function does inside is not looked into. Large-object descriptors are no residue: they end with their
transaction, and so do cursors declared without hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import IntFlag
from functools import cache
from typing import Final, NamedTuple


class Residue(IntFlag):
    """Kinds of state. The hot path handles them as plain ints."""

    PARAMETERS = 1
    """SET, RESET, set_config; role and session_authorization too, which no text need name."""
    LISTEN = 2
    CURSORS = 4
    PREPARED = 8
    TEMP = 16
    ADVISORY = 32
    SUSPECT = 64
    """Unknown: DO, CALL, a function named in `session_state_functions`."""
    RENEW = 128
    """Nothing but a new session undoes it: LOAD, dblink connections, temporary replication slots."""
    RESETS = 1 << 13
    """Not a residue: settings went back to what the session began with."""
    CUSTOM = 1 << 14
    """Not a residue: the text names a setting that the server lists nowhere; see `TextLook.custom`."""
    UNNAMED = 1 << 15
    """Not a residue: the text sets something whose name it does not show."""
    LOOK = 1 << 16
    """Not a residue: state of a client that keeps its session may be gone."""
    SEQUENCES = 1 << 17
    """Not a residue: the text asks for what a sequence gave last on its session."""


STATE_MASK: Final = int(Residue.RESETS) - 1

_TAGS: Final[dict[bytes, int]] = {
    b"SET": int(Residue.PARAMETERS),
    b"RESET": int(Residue.PARAMETERS | Residue.RESETS),
    b"DISCARD ALL": int(Residue.PARAMETERS | Residue.RESETS),
    b"LISTEN": int(Residue.LISTEN),
    b"PREPARE": int(Residue.PREPARED),
    b"CREATE TABLE": int(Residue.TEMP),
    b"CREATE TABLE AS": int(Residue.TEMP),
    b"SELECT INTO": int(Residue.TEMP),
    b"CREATE VIEW": int(Residue.TEMP),
    b"CREATE SEQUENCE": int(Residue.TEMP),
    b"LOAD": int(Residue.RENEW),
    b"DO": int(Residue.SUSPECT),
    b"CALL": int(Residue.SUSPECT),
}

FORGETTING_TAGS: Final = frozenset({b"DISCARD ALL", b"DEALLOCATE ALL"})
"""After these the session has no prepared statement, the pooler's own included."""

CUSTOM_NAMES_MAX: Final = 256
"""How many names `TextLook.custom` keeps: each question to a session has all of them."""

LONGEST_WORD_BYTES: Final = 64
"""How far the pieces of a text must overlap for `TextLook.residue_of_piece`."""


def residue_of_tag(tag: bytes) -> int:
    """Residue told by a CommandComplete tag (without its zero byte); tags with counts leave nothing."""
    return _TAGS.get(tag, 0)


class _Sign(NamedTuple):
    """A pattern in lower-case code (literals and comments out) and what it means.

    `loose` is used instead where code cannot be told from literals and comments.
    """

    pattern: re.Pattern[bytes]
    residue: int
    loose: re.Pattern[bytes]
    check: Callable[[bytes], bool] | None = None


# Every sign below contains one of these; each alternative begins with a letter that is rare in SQL or is
# decided by its second, which is what keeps the search short. DISCARD and DEALLOCATE are for who asks `hits`,
# and so is the pooler's own name: see `own_parameters`.
_WORDS = (
    rb"set\s+(?:session\s+)?[\w$\"]+\s*\.",
    rb"_(?:config|settings|lock|unlock|limit|connect|origin|slot|temp)",
    rb"mp(?<=temp)",
    rb"hold",
    rb'&(?<=u&)"',
    rb"sc(?<=disc)ard",
    rb"ocate",
    rb"val(?<=lastval|currval)",
    rb"oo(?<=poo)ler",
)
_RUNS_STRINGS = re.compile(rb"query_to_xml|crosstab|connectby|ts_stat|ts_rewrite|execute")


class TextLook:
    """Looks at texts. `functions` are names (schema.name or name) of functions that leave state behind.

    `custom` are the names of settings with a dot that any text was seen to set.
    """

    __slots__ = ("_hit", "_signs", "custom", "hits")

    def __init__(self, functions: Iterable[str] = ()) -> None:
        self.custom: dict[bytes, None] = {}
        names = [name.rsplit(".", 1)[-1].lower().encode() for name in functions]
        own = tuple(re.escape(name) for name in names if name)
        self.hits = self._hit = re.compile(b"|".join(_WORDS + own)).search
        """Whether a text in lower case is to be looked at at all (for who wants that alone, and fast)."""
        self._signs = _SIGNS + tuple(_sign(name, Residue.SUSPECT) for name in own)

    def residue(self, query: bytes) -> int:
        """Residue that this text may leave when it runs; 0 in the common case."""
        lowered = query.lower()
        if self._hit(lowered) is None:
            return 0
        code = _code(query)
        found = self._loosely(lowered) if code is None else self._strictly(code)
        return found | self._note_custom(query) if found & Residue.CUSTOM else found

    def residue_of_piece(self, piece: bytes) -> int:
        """The same for a part of a text too large to hold. Parts must overlap by LONGEST_WORD_BYTES.

        Literals and comments count as code here, since where they begin is not known.
        """
        lowered = piece.lower()
        found = 0 if self._hit(lowered) is None else self._loosely(lowered)
        return found | Residue.UNNAMED if found & Residue.CUSTOM else found

    def _note_custom(self, query: bytes) -> int:
        names = custom_names(query)
        for name in names.found:
            if len(self.custom) < CUSTOM_NAMES_MAX:
                self.custom[name] = None
        complete = names.complete and all(name in self.custom for name in names.found)
        return 0 if complete else int(Residue.UNNAMED)

    def _strictly(self, code: bytes) -> int:
        found = 0
        for sign in self._signs:
            if sign.pattern.search(code) is not None and (sign.check is None or sign.check(code)):
                found |= sign.residue
        return found

    def _loosely(self, lowered: bytes) -> int:
        found = 0
        for sign in self._signs:
            if sign.loose.search(lowered) is not None:
                found |= sign.residue
        return found


def _sets_beyond_transaction(code: bytes) -> bool:
    """Whether a set_config call is not certainly local to its transaction."""
    return any(_last_argument(code, call.end()) != b"true" for call in _SET_CONFIG_CALL.finditer(code))


def _last_argument(code: bytes, at: int) -> bytes:
    """The last argument of the call whose parenthesis opens before `at`; empty if it does not end."""
    depth, begin = 1, at
    for place in _CALL_PUNCTUATION.finditer(code, at):
        mark = place.group()
        if mark in b"([":
            depth += 1
        elif mark in b")]":
            depth -= 1
            if depth == 0:
                return code[begin : place.start()].strip()
        elif depth == 1:
            begin = place.end()
    return b""


_SET_CONFIG_CALL = re.compile(rb'set_config"?\s*\(')
_CALL_PUNCTUATION = re.compile(rb"[()\[\],]")

def _sign(
    pattern: bytes, residue: int, loose: bytes | None = None, check: Callable[[bytes], bool] | None = None
) -> _Sign:
    return _Sign(re.compile(pattern), int(residue), re.compile(loose or pattern), check)


_CUSTOM = Residue.PARAMETERS | Residue.CUSTOM
_SIGNS: Final[tuple[_Sign, ...]] = (
    _sign(rb'set_config"?\s*\(', _CUSTOM, b"set_config", _sets_beyond_transaction),
    _sign(rb"\bset\s+(?:session\s+)?(?!local\b)[\w$\"]+\s*\.", _CUSTOM),
    _sign(b"pg_settings", Residue.PARAMETERS, check=lambda code: b"update" in code),
    _sign(b"set_limit", Residue.PARAMETERS),  # pg_trgm
    _sign(b"advisory_lock", Residue.ADVISORY),
    _sign(b"advisory_unlock", Residue.LOOK),
    _sign(
        rb"\b(?:create|into)\s+(?:or\s+replace\s+)?(?:local\s+|global\s+)?temp(?:orary)?\b|pg_temp",
        Residue.TEMP,
        b"temp",
    ),
    _sign(rb"\bwith\s+hold\b", Residue.CURSORS, b"hold"),
    _sign(b'u&"', Residue.SUSPECT),  # an escaped identifier can hide any function
    _sign(b"dblink_connect|replication_origin_session|_replication_slot", Residue.RENEW),
    _sign(rb"(?:last|curr)val\b", Residue.SEQUENCES),
)

_OPENING = re.compile(
    rb"""(?P<escape>[eE]'(?:[^'\\]|\\.|'')*')"""
    rb"""|'(?P<plain>[^']*)'"""
    rb"""|(?P<quoted>"[^"]*")"""
    rb"""|(?P<line>--[^\n\r]*)"""
    rb"""|(?P<block>/\*)"""
    rb"""|(?P<dollar>\$(?:[A-Za-z_\x80-\xff][\w\x80-\xff]*)?\$)"""
    rb"""|(?P<word>[A-Za-z_\x80-\xff][\w$\x80-\xff]*)""",
    re.DOTALL,
)
_BLOCK_EDGE = re.compile(rb"/\*|\*/")


def _code(query: bytes) -> bytes | None:
    """The text in lower case with comments as blanks and literals as ''; None if that cannot be told.

    It cannot where a plain literal holds a backslash (its meaning hangs on standard_conforming_strings) and
    where a function runs its literals.
    """
    text = without_literals(query)
    if text is None:
        return None
    code = text.lower()
    return None if _RUNS_STRINGS.search(code) is not None else code


def without_literals(query: bytes) -> bytes | None:
    kept: list[bytes] = []
    at = 0
    while (opening := _OPENING.search(query, at)) is not None:
        kept.append(query[at : opening.start()])
        at = opening.end()
        kind = opening.lastgroup
        if kind in ("word", "quoted"):
            kept.append(opening.group())
            continue
        if kind == "plain" and b"\\" in opening.group():
            return None
        kept.append(b" " if kind in ("line", "block") else b"''")
        if kind == "block":
            at = _end_of_block(query, at)
        elif kind == "dollar":
            close = query.find(opening.group(), at)
            at = len(query) if close < 0 else close + len(opening.group())
    kept.append(query[at:])
    return b"".join(kept)


def _end_of_block(query: bytes, at: int) -> int:
    depth = 1
    while depth:
        edge = _BLOCK_EDGE.search(query, at)
        if edge is None:
            return len(query)
        depth += 1 if edge.group() == b"/*" else -1
        at = edge.end()
    return at


_LOCAL_SET = re.compile(
    rb"(?:Q.{4})?\s*set\s+(?:local|transaction)\b[^;]*;?\s*\0?\Z", re.DOTALL | re.IGNORECASE)


def is_local_set(query: bytes) -> bool:
    """Whether a text (or a whole Query message) is one SET that ends with its transaction."""
    return _LOCAL_SET.match(query) is not None


class CustomNames(NamedTuple):
    """Names of custom settings that a text sets; `complete`: it sets no other whose name it does not show."""

    found: tuple[bytes, ...]
    complete: bool


_PART = rb'(?:[a-z_\x80-\xff][\w$\x80-\xff]*|"[^"]+")'
_SET_CUSTOM = re.compile(rb"\bset\s+(?:session\s+)?(%b(?:\s*\.\s*%b)+)" % (_PART, _PART), re.IGNORECASE)
_SET_CONFIG_NAMED = re.compile(rb"""set_config"?\s*\(\s*e?'([^'\\]*)'""", re.IGNORECASE)


def custom_names(query: bytes) -> CustomNames:
    """What is to be asked for by name after this text. Ask only where CUSTOM was found."""
    named = _SET_CONFIG_NAMED.findall(query)
    written = [re.sub(rb'[\s"]', b"", name) for name in _SET_CUSTOM.findall(query)]
    found = [name.lower() for name in (*written, *named) if b"." in name]
    return CustomNames(tuple(dict.fromkeys(found)), query.lower().count(b"set_config") <= len(named))


_UNDO: Final[tuple[tuple[int, bytes], ...]] = (
    (int(Residue.CURSORS), b"CLOSE ALL"),
    # RESET ALL leaves role and session_authorization alone, and SET or set_config may have set them
    (int(Residue.PARAMETERS), b"SET SESSION AUTHORIZATION DEFAULT;RESET ROLE;RESET ALL"),
    (int(Residue.PREPARED), b"DEALLOCATE ALL"),
    (int(Residue.LISTEN), b"UNLISTEN *"),
    (int(Residue.ADVISORY), b"SELECT pg_catalog.pg_advisory_unlock_all()"),
    (int(Residue.TEMP), b"DISCARD TEMP"),
)


@cache
def cleanup(residue: int, *, in_transaction: bool = False) -> tuple[bytes, ...]:
    """The SQL that undoes the residue: each element is one Query message, all sent in one write.

    `in_transaction` ends an open transaction first. Any error in the answers means that the session must be
    closed. Precondition: the residue is undoable.
    """
    assert is_undoable(residue)
    begin = (b"ROLLBACK",) if in_transaction else ()
    if residue & Residue.SUSPECT:
        return (*begin, b"DISCARD ALL")  # refuses to run together with other statements
    parts = [sql for kind, sql in _UNDO if residue & kind]
    return (b";".join([*begin, *parts]),) if begin or parts else ()


def is_undoable(residue: int) -> bool:
    """Whether SQL can undo it; if not, the session is to be closed."""
    return not residue & Residue.RENEW


def forgets_statements(residue: int) -> bool:
    """Whether the clean-up of this residue also drops the pooler's own statements from the session."""
    return bool(residue & (Residue.PREPARED | Residue.SUSPECT))


def kinds(residue: int) -> tuple[str, ...]:
    """Names of the kinds, in lower case, for counters, notices and SHOW."""
    return tuple(kind.name.lower() for kind in Residue if kind.name and kind & residue & STATE_MASK)


residue_of_text: Final = TextLook().residue
