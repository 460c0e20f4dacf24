"""What coordinators note beside a ledger, for each other and for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from coordinator.ledger.record import Record


@dataclass(frozen=True, slots=True)
class GrowthStop(Record):
    """`growth/<db>`: why nothing is granted to clients, though slots are free."""

    name: ClassVar[str] = "growth"

    why: str
    since_us: int
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class ShadowCount(Record):
    """`shadow/<db>/<generation>/<host>`: how that generation's decisions compare with the active one's."""

    name: ClassVar[str] = "shadow"

    only_active: int = 0
    only_shadow: int = 0
    both: int = 0
    since_us: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)
