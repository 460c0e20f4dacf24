"""What PgBouncer refuses because of the state it is in, or because it is its console that is named. Pure.

Source: consoles of PgBouncer 1.18 and 1.24, asked.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

CONSOLE: Final = "pgbouncer"
_OF_CONSOLE: Final = {  # what cannot be done with the console's own database
    "pause": "cannot pause admin db", "kill": "cannot kill admin db",
    "reconnect": "cannot reconnect admin db", "wait_close": "cannot wait in admin db",
    "disable": "cannot disable admin db", "enable": "cannot disable admin db",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class State:
    """`paused`: databases that were named in a PAUSE or KILL; `halted`: PAUSE or SUSPEND of everything."""

    paused: Collection[str] = ()
    halted: bool = False
    leaving: bool = False


def why_not(command: str, database: str | None, state: State) -> str:
    """Why a command is refused, "" if it is not."""
    if database == CONSOLE and command in _OF_CONSOLE and not (state.halted and command in ("pause", "kill")):
        return f"{_OF_CONSOLE[command]}: {CONSOLE}"
    if command in ("pause", "kill", "suspend") and state.halted:
        return "already suspended/paused"
    if command == "suspend" and state.paused:
        return "cannot suspend with paused databases"
    if command == "resume":
        return _why_not_resume(database, state)
    return ""


def _why_not_resume(database: str | None, state: State) -> str:
    if database is not None:
        return "" if database in state.paused else f"database {database} is not paused"
    if state.leaving:
        return "pooler is shutting down"
    return "" if state.halted or state.paused else "pooler is not paused/suspended"
