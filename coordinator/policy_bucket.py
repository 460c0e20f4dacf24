"""A token bucket of a policy: of one tenant or of one class. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BUCKET_MODES = ("delay", "reject")
BUCKET_PER = ("transaction", "connection")


@dataclass(frozen=True, slots=True)
class Bucket:
    """`rate` tokens a second, at most `burst` at once; `cost` is of a transaction, or (`per`) of the first
    one of each connection."""

    rate: float
    burst: float
    cost: float = 1.0
    mode: str = "delay"
    per: str = "transaction"
    start_full: bool = True


def told(bucket: Bucket | None) -> dict[str, Any]:
    """What a worker is told of it; nothing where there is none."""
    if bucket is None:
        return {}
    return {"bucket": {"rate": bucket.rate, "burst": bucket.burst, "cost": bucket.cost, "mode": bucket.mode,
                       "per": bucket.per, "startFull": bucket.start_full}}
