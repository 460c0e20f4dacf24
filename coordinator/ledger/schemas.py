"""Which schema the ledger's values are written in while versions are mixed. Pure.

A worker publishes the schemas that it reads. A newer one is written only when every live worker reads it, and
who does not read what is written already is not let in: so a roll goes one worker at a time, in either
direction, and no value is ever met by somebody who cannot read it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from coordinator.ledger.record import SCHEMA


class NoCommonSchema(Exception):
    """Some live worker reads nothing that this version writes: says which."""


def schema_to_write(
    readers: Mapping[str, Collection[int]], writable: Iterable[int] = range(1, SCHEMA + 1)
) -> int:
    """The newest of the schemas this version can write that every live worker reads.

    `readers`: what each reads, by boot id; without any, the newest. Raises NoCommonSchema.
    """
    newest_first = sorted(writable, reverse=True)
    for schema in newest_first:
        if all(schema in reads for reads in readers.values()):
            return schema
    behind = sorted(boot_id for boot_id, reads in readers.items() if not set(reads) & set(newest_first))
    raise NoCommonSchema(f"schemas {newest_first} are not read by {', '.join(behind) or 'all workers'}")


def why_unread(reads: Collection[int], written: int = SCHEMA) -> str:
    """Why a worker that reads these may not be let in; empty if it may."""
    if written in reads:
        return ""
    return f"it reads schemas {sorted(reads)}, the ledger is written in {written}: it needs another version"
