"""What PAUSE and WAIT_CLOSE wait for: the rows that tell it of one worker, and what all workers' rows say.

Pure. The console asks again until it is so; a worker tells how things are and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pooler.relay.server import ServerConn
    from pooler.serve.registry import Registry

ITEM = "stillness"  # asked of workers as a SHOW is; nobody can type it


def close_needed(server: ServerConn) -> bool:
    """Whether a session serves nobody any more once it is free: retired, of another generation or epoch."""
    core = server.pool.core
    return bool(server.retire) or server.closing or (
        (server.generation, server.epoch) != (core.generation, core.epoch))


def stillness_rows(registry: Registry) -> list[dict[str, Any]]:
    """One row per database: whether it is paused, sessions in use, sessions that are to close."""
    rows: dict[str, dict[str, Any]] = {}

    def row(name: str) -> dict[str, Any]:
        return rows.setdefault(
            name, {"database": name, "paused": int(registry.is_paused(name)), "in_use": 0, "to_close": 0})

    for name in registry.settings.databases:
        row(name)
    for pool in registry.by_name(None):
        row(pool.plan.name)["in_use"] += len(pool.core.active)
    for server in registry.parts.servers:
        row(server.pool.plan.name)["to_close"] += close_needed(server)
    return list(rows.values())


@dataclass(frozen=True, slots=True)
class Look:
    """What the workers said together. `unheard`: those that did not, and why; `busy`: sessions waited for."""

    busy: int = 0
    resumed: bool = False
    unheard: Mapping[str, str] | None = None


def look_at(
    command: str, database: str | None, workers: Collection[str], answers: Sequence[Mapping[str, Any]]
) -> Look:
    """`workers`: who took the command, and so must be heard of. A worker that was replaced since counts."""
    rows: list[Mapping[str, Any]] = []
    unheard = dict.fromkeys(workers, "it is not linked to the coordinator")
    for answer in answers:
        worker = str(answer["worker"])
        found = (answer.get("value") or {}).get("rows")
        if not found:
            unheard[worker] = str(answer.get("error") or "it does not tell")
            continue
        unheard.pop(worker, None)
        rows += [each for each in found if database in (None, each["database"])]
    if command == "wait_close":
        return Look(sum(each["to_close"] for each in rows), unheard=unheard)
    paused = sum(each["paused"] for each in rows)
    busy = sum(each["in_use"] for each in rows) or len(rows) - paused  # one that starts takes the pause over
    return Look(busy, resumed=bool(rows) and not paused and not unheard, unheard=unheard)
