"""What operators forced, kept for ever: `operator/<time-ordered id>`."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.record import Record, UnknownSchema
from coordinator.store.api import Entry, Put

ORDERED = "ordered"


@dataclass(frozen=True, slots=True)
class Attestation(Record):
    """Who forced what, with evidence. `database`: the ledger that it was about; an older entry says none.

    `outcome`: what came of it, where it can fail after it is on record; ORDERED until that is known.
    """

    name: ClassVar[str] = "operator"

    who: str
    what: str
    evidence: str
    at_us: int
    database: str = ""
    outcome: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def put(self, keys: FleetKeys) -> Put:
        """Under a new key, which sorts by time."""
        return Put(keys.operator(f"{self.at_us:020d}-{secrets.token_hex(3)}"), self.encode())


def attestations_of(entries: Iterable[Entry], database: str) -> list[Attestation]:
    """Those about one ledger, the oldest first; what cannot be read is left out."""
    found = []
    for entry in entries:
        try:
            each = Attestation.decode(entry.value)
        except (UnknownSchema, ValueError, TypeError):
            continue
        if each.database == database or (not each.database and database in each.what):
            found.append(each)
    return found
