"""What coordinators note beside a ledger, for each other and for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from coordinator.ledger.record import Kind, Record


@dataclass(frozen=True, slots=True)
class GrowthStop(Record):
    """`growth/<db>`: why nothing is granted to clients, though slots are free."""

    name: ClassVar[str] = "growth"

    why: str
    since_us: int
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Want(Record):
    """`want/<db>/<request id>`: a worker waits for a session of this pool, and none of its host can give one.

    The leader writes into it which worker of all hosts is to give one up: `op` is how that one is asked
    (`shed`, `spare`), `holder` its boot id (empty: nobody is asked yet), and from which of its pools.
    """

    name: ClassVar[str] = "want"

    pool: str  # record.pool_name
    user: str
    kind: Kind
    reason: str  # what it was refused for: `full`, `seats_full`
    boot_id: str
    host: str
    since_us: int  # shown, never compared
    held: int = 0  # sessions of the pool that the worker had then: shown; the leader counts them itself
    op: str = ""
    holder: str = ""
    holder_pool: str = ""
    holder_user: str = ""
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
