"""How a console speaks: its version, its greeting, its columns, its words for what it refuses. Pure.

OWN is ours; `as_pgbouncer` has the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

from pooler.console.commands import Command, help_text, parse_commands
from pooler.console.tables import Rows, columns_for
from pooler.errors import PoolerError
from pooler.wire.messages import Column

VERSION = f"pooler {version('pooler')}"
# drivers choose their behaviour by the number; it is that of a current server, and the rest says what this is
SERVER_VERSION = f"17.0 ({VERSION})"
GREETED = (
    ("server_version", SERVER_VERSION), ("client_encoding", "UTF8"), ("server_encoding", "UTF8"),
    ("DateStyle", "ISO, MDY"), ("TimeZone", "UTC"), ("IntervalStyle", "postgres"),
    ("standard_conforming_strings", "on"), ("integer_datetimes", "on"), ("is_superuser", "off"),
    ("default_transaction_read_only", "off"), ("in_hot_standby", "off"),
)  # fmt: skip


def _as_it_is(_command: Command, error: PoolerError) -> PoolerError:
    return error


@dataclass(frozen=True, slots=True)
class Manner:
    """`reworded` gives the error that the user is told of one that a command met."""

    version: str
    greeted: tuple[tuple[str, str], ...]
    parse: Callable[[str], list[Command]]
    columns: Callable[[str, Rows], tuple[Column, ...]]
    reworded: Callable[[Command, PoolerError], PoolerError]
    help: Callable[[], str]


OWN = Manner(VERSION, GREETED, partial(parse_commands, version=VERSION), columns_for, _as_it_is, help_text)
