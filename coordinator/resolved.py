"""What became of a policy's open defaults when a generation of it was published. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.ledger.stored_types import WrongType, read_fields, shape_of

RESOLVED = "resolved"  # beside the fields of a stored document: no field of it has this name
_NAMES = {"failoverPermits": "failover_permits", "hardConnectionLimit": "hard_connection_limit"}


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a document left to the moment of its publication, and where it was published for.

    `hard_connection_limit` None: no server was seen. `hosts` and `role` are those of the databases that the
    publisher's config has on this ledger.
    """

    failover_permits: int = 0
    hard_connection_limit: int | None = None
    hosts: tuple[str, ...] = ()
    role: str = ""

    def encode(self) -> dict[str, Any]:
        """Beside the document, under `resolved`."""
        return {"failoverPermits": self.failover_permits, "hardConnectionLimit": self.hard_connection_limit,
                "hosts": list(self.hosts), "role": self.role}

    @classmethod
    def parse(cls, values: object) -> Resolved:
        """The inverse; what is absent has its default. Raises ValueError for what it is not."""
        if not isinstance(values, Mapping):
            raise WrongType("not a map of fields")
        return cls(**read_fields(_SHAPE, {_NAMES.get(name, name): each for name, each in values.items()}))


_SHAPE = shape_of(Resolved)
