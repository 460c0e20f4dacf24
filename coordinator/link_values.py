"""How a permit travels over the link."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coordinator.ledger.record import Kind, Permit


def parse_permit(values: Iterable[Any]) -> Permit:
    """The permit of [kind, slot, generation]. Raises ValueError, TypeError."""
    kind, slot, generation = values
    return Permit(Kind(kind), int(slot), int(generation))


def permit_list(permit: Permit) -> list[Any]:
    """[kind, slot, generation]."""
    return [str(permit.kind), permit.slot, permit.generation]
