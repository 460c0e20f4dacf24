"""What an administrator typed: text in, a command or a refusal with the nearest known name out. Pure.

Case does not matter, a final `;` may be there or not, several statements may stand in one text. Names of
databases may be quoted. What drivers say by themselves when they connect (SET of a client parameter, BEGIN,
SELECT 1) is understood too, so that any of them can be used here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

TEXT_BYTES_MAX: Final = 65_536

SHOW_ITEMS: Final = (
    "active_sockets", "clients", "config", "databases", "dns_hosts", "dns_zones", "fds", "help", "leaks",
    "ledger", "lists", "mem", "peers", "peer_pools", "pools", "servers", "sockets", "state", "stats",
    "stats_averages", "stats_totals", "totals", "users", "version", "workers",
)  # fmt: skip

_NONE, _OPTIONAL, _NEEDED = "", "[name]", "name"
DATABASE_COMMANDS: Final = {  # verb: what stands after it
    "pause": _OPTIONAL,
    "resume": _OPTIONAL,
    "reconnect": _OPTIONAL,
    "wait_close": _OPTIONAL,
    "kill": _OPTIONAL,
    "disable": _NEEDED,
    "enable": _NEEDED,
    "kill_client": _NEEDED,
    "reload": _NONE,
    "suspend": _NONE,
}
SHUTDOWN_MODES: Final = ("wait_for_servers", "wait_for_clients")
VERBS: Final = ("show", *DATABASE_COMMANDS, "shutdown", "set")

CLIENT_PARAMETERS: Final = frozenset({
    "application_name", "bytea_output", "client_encoding", "client_min_messages", "datestyle",
    "default_transaction_isolation", "default_transaction_read_only", "extra_float_digits",
    "idle_in_transaction_session_timeout", "intervalstyle", "lock_timeout", "names", "search_path",
    "standard_conforming_strings", "statement_timeout", "time", "timezone", "transaction",
})  # fmt: skip
_SESSION_VALUES: Final = {
    "client_encoding": "UTF8",
    "datestyle": "ISO, MDY",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "in_hot_standby": "off",
    "intervalstyle": "postgres",
    "search_path": "",
    "standard_conforming_strings": "on",
    "timezone": "UTC",
    "transaction_isolation": "read committed",
    "transaction_read_only": "off",
}


@dataclass(frozen=True, slots=True)
class Show:
    """SHOW item [argument]."""

    item: str
    argument: str | None = None


@dataclass(frozen=True, slots=True)
class Act:
    """A command to the fleet. `arguments` has `database`, `mode`, `client`, or `key` and `value`."""

    name: str
    arguments: tuple[tuple[str, str], ...] = ()
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """Something a driver asks that has one fixed row."""

    column: str
    value: str | int
    tag: str


@dataclass(frozen=True, slots=True)
class Nothing:
    """Understood and without effect. `opens`: a transaction block begins (True) or ends (False)."""

    tag: str
    opens: bool | None = None
    notice: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Not understood."""

    text: str
    hint: str
    sqlstate: str = "42601"


Command = Show | Act | Answer | Nothing | Unknown

_TOKEN = re.compile(
    r"""\s+ | --[^\n]* | /\*.*?(?:\*/|\Z) | (?P<end>;) | (?P<equals>=|::) | '(?P<text>(?:[^']|'')*)'"""
    r""" | "(?P<quoted>(?:[^"]|"")*)" | (?P<word>[^\s;='"]+) | (?P<bad>.)""",
    re.VERBOSE | re.DOTALL,
)
_BLOCK_VERBS: Final = {
    "begin": True, "start": True, "commit": False, "end": False, "rollback": False, "abort": False,
}  # fmt: skip
_BLOCK_TAGS: Final = {"start": "START TRANSACTION", "end": "COMMIT", "abort": "ROLLBACK"}
_SILENT_VERBS: Final = {
    "deallocate": "DEALLOCATE ALL", "discard": "DISCARD ALL", "reset": "RESET", "close": "CLOSE CURSOR ALL",
    "unlisten": "UNLISTEN",
}  # fmt: skip


def parse_commands(text: str, *, version: str) -> list[Command]:
    """The commands of one text, none if it is empty. `version` answers SELECT version()."""
    if len(text) > TEXT_BYTES_MAX:
        return [Unknown("the command is too long", "", "54000")]
    commands: list[Command] = []
    for words in _statements(text):
        commands.append(_command(words, version))
    return commands


@dataclass(frozen=True, slots=True)
class _Word:
    value: str
    plain: bool

    @property
    def key(self) -> str:
        return self.value.lower() if self.plain else self.value


def _statements(text: str) -> list[list[_Word]]:
    statements: list[list[_Word]] = [[]]
    for token in _TOKEN.finditer(text):
        kind = token.lastgroup
        if kind == "end":
            statements.append([])
        elif kind == "word" or kind == "equals" or kind == "bad":
            statements[-1].append(_Word(token.group(), plain=True))
        elif kind == "quoted":
            statements[-1].append(_Word(token["quoted"].replace('""', '"'), plain=False))
        elif kind == "text":
            statements[-1].append(_Word(token["text"].replace("''", "'"), plain=False))
    return [statement for statement in statements if statement]


def _command(words: list[_Word], version: str) -> Command:
    verb, rest = words[0].key, words[1:]
    if verb == "show":
        return _show(rest)
    if verb == "set":
        return _set(rest)
    if verb == "select":
        return _select(rest, version)
    if verb == "shutdown":
        return _shutdown(rest)
    if verb in DATABASE_COMMANDS:
        return _act(verb, rest)
    if verb in _BLOCK_VERBS:
        return Nothing(_BLOCK_TAGS.get(verb, verb.upper()), opens=_BLOCK_VERBS[verb])
    if verb in _SILENT_VERBS:
        return Nothing(_SILENT_VERBS[verb])
    return Unknown(f'unknown command "{_shown(words[0])}"', nearest(verb, VERBS))


def _show(rest: list[_Word]) -> Command:
    if not rest:
        return Unknown("SHOW of what?", "SHOW HELP lists it.")
    item = rest[0].key
    if item == "help":
        return Show("help")
    if item in SHOW_ITEMS:
        if len(rest) > 2:
            return Unknown(f"too much after SHOW {item.upper()}", "")
        return Show(item, rest[1].value if len(rest) > 1 else None)
    if [word.key for word in rest] == ["transaction", "isolation", "level"]:
        item = "transaction_isolation"
    if item in _SESSION_VALUES:
        return Answer(item, _SESSION_VALUES[item], "SHOW")
    return Unknown(f'unknown item "{_shown(rest[0])}" of SHOW', nearest(item, SHOW_ITEMS, "SHOW "))


def _set(rest: list[_Word]) -> Command:
    words = rest[1:] if rest and rest[0].key in ("session", "local") and len(rest) > 1 else rest
    if not words:
        return Unknown("SET of what?", "SET key = value")
    key = words[0].key
    if key in CLIENT_PARAMETERS or key == "characteristics":
        return Nothing("SET")
    value = [word.value for word in words[1:]]
    if len(value) > 1 and value[0].lower() in ("=", "to"):
        del value[0]
    if len(value) != 1:
        return Unknown("SET takes one key and one value", "SET key = value")
    return Act("set", (("key", key), ("value", value[0])), f"SET {key}={value[0]}")


def _select(rest: list[_Word], version: str) -> Command:
    asked = "".join(word.key for word in rest).removeprefix("pg_catalog.")
    if re.fullmatch(r"-?\d{1,9}", asked):
        return Answer("?column?", int(asked), "SELECT 1")
    fixed = {
        "version()": ("version", version),
        "current_schema()": ("current_schema", ""),
        "current_database()": ("current_database", "pooler"),
    }
    if asked in fixed:
        return Answer(*fixed[asked], "SELECT 1")
    return Unknown("the console knows no queries", "SHOW HELP lists what it knows.", "0A000")


def _shutdown(rest: list[_Word]) -> Command:
    if not rest:
        return Act("shutdown", (("mode", "now"),), "SHUTDOWN")
    mode = rest[0].key
    if len(rest) > 1 or mode not in SHUTDOWN_MODES:
        hint = nearest(mode, SHUTDOWN_MODES, "SHUTDOWN ")
        return Unknown(f'unknown way of SHUTDOWN: "{_shown(rest[0])}"', hint)
    return Act("shutdown", (("mode", mode),), "SHUTDOWN")


def _act(verb: str, rest: list[_Word]) -> Command:
    takes = DATABASE_COMMANDS[verb]
    if len(rest) > (takes != _NONE) or (takes == _NEEDED and not rest):
        return Unknown(f"wrong number of names after {verb.upper()}", f"{verb.upper()} {takes}".rstrip())
    if not rest:
        return Act(verb, (), verb.upper())
    what = "client" if verb == "kill_client" else "database"
    return Act(verb, ((what, rest[0].value),), verb.upper())


def nearest(word: str, known: tuple[str, ...], before: str = "") -> str:
    """A hint naming the known word that is nearest; where none is near, how to see them all."""
    found = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"Did you mean {before}{found[0].upper()}?" if found else "SHOW HELP lists what is known."


def _shown(word: _Word) -> str:
    return word.value if len(word.value) <= 60 else f"{word.value[:57]}..."


def help_text() -> str:
    """What SHOW HELP says: a heading, and a line for each command."""
    shows = "|".join(item.upper() for item in SHOW_ITEMS)
    lines = ["Console usage", f"SHOW {shows}", "SHOW POOLS|STATS|... WORKERS: a row for each worker",
             "SET key = value"]
    lines += [f"{verb.upper()} {takes}".rstrip() for verb, takes in DATABASE_COMMANDS.items()]
    lines.append("SHUTDOWN [" + "|".join(mode.upper() for mode in SHUTDOWN_MODES) + "]")
    return "\n".join(lines)
