"""Values of keys without which the rest can go on. Pure."""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

from coordinator.ledger.record import Record
from coordinator.store.api import Entry

_R = TypeVar("_R", bound=Record)


def read_or_none(record: type[_R], entry: Entry | None) -> _R | None:
    """What stands there; None where nothing that can be read does: one key is no reason to refuse all."""
    with suppress(ValueError):
        return record.decode(entry.value) if entry is not None else None
    return None
