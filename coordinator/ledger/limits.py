"""Which policy generation grants a request, and how many slots it has for that.

Pure. While two generations grant, each takes of its own slots only, and nothing is granted while a slot is
held that neither has: so what is held by both together is never more than the larger of them allows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from coordinator.ledger.record import Alias, Kind


@dataclass(frozen=True, slots=True)
class Limits:
    """How many slots of each kind a policy generation has; of its main ones the topmost `failover` are only
    for epochs whose predecessor has sessions that no proof has ended yet.

    `beside` has those of another generation that grants at the same time.
    """

    main: int
    reserve: int = 0
    admin: int = 0
    replication: int = 0
    failover: int = 0
    beside: Limits | None = None

    def of(self, kind: Kind) -> int:
        """Slots of this kind."""
        count: int = getattr(self, kind.value)
        return count

    def usable(self, kind: Kind, failover: bool) -> int:
        """The slots of this kind that may be granted now are those below this number."""
        kept = self.failover if kind is Kind.MAIN and not failover else 0
        return self.of(kind) - kept

    def bound(self, kind: Kind) -> int:
        """While a slot of this number or more is held, nothing is granted."""
        return max(self.of(kind), self.beside.of(kind) if self.beside else 0)

    def with_beside(self) -> Limits:
        """Of each kind as many as the larger of the two has."""
        return Limits(self.bound(Kind.MAIN), self.bound(Kind.RESERVE), self.bound(Kind.ADMIN),
                      self.bound(Kind.REPLICATION), self.failover)


NOTHING = Limits(0)


def limits_of_policy(raw: bytes) -> Limits:
    """The limits of a stored policy generation (a msgpack map with the policy's own field names).

    Raises ValueError for what is not one.
    """
    try:
        policy: Mapping[str, Any] = msgpack.unpackb(raw)
    except ValueError as fault:
        raise ValueError(f"not a policy generation: {str(fault) or 'not a msgpack map'}") from None
    if not isinstance(policy, dict) or "serverSessionPermits" not in policy:
        raise ValueError("not a policy generation")
    return Limits(
        main=_count(policy, "serverSessionPermits"),
        reserve=_count(policy, "reservePermits"),
        admin=_count(policy, "adminReserve"),
        replication=_count(policy, "replicationReserve"),
        failover=_failover_permits(policy),
    )


def _count(policy: Mapping[str, Any], name: str) -> int:
    count = policy.get(name, 0)
    if type(count) is not int or count < 0:
        raise ValueError(f"not a policy generation: {name} is no count")
    return count


def _failover_permits(policy: Mapping[str, Any]) -> int:
    """As given, else as it was worked out when the generation was published."""
    if policy.get("failoverPermits") is not None:
        return _count(policy, "failoverPermits")
    resolved = policy.get("resolved") or {}
    if not isinstance(resolved, dict):
        raise ValueError("not a policy generation: what was resolved is not a map")
    return _count(resolved, "failoverPermits")


def share_of(request_id: str) -> float:
    """Where a request stands in the whole of them: from 0 to below 1, always the same for the same one."""
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:7]) / (1 << 56)


def generation_for(alias: Alias, request_id: str, kind: Kind) -> int:
    """The generation that grants this request, if any does; 0: none. A takeover takes sessions of clients
    only: those of commands and replication stay with the generation that grants the rest."""
    if alias.taking_over and kind in (Kind.MAIN, Kind.RESERVE) and (
            share_of(request_id) < alias.takeover_fraction):
        return alias.taking_over
    return alias.granting


def limits_for(
    alias: Alias, request_id: str, kind: Kind, limits: Mapping[int, Limits]
) -> Limits:
    """The limits by which this request is decided; `limits` has those of every generation that grants."""
    own = generation_for(alias, request_id, kind)
    others = [limits[each] for each in (alias.granting, alias.taking_over) if each != own and each in limits]
    found = limits.get(own, NOTHING)
    beside = others[0] if others else None
    return found if found.beside is beside else replace(found, beside=beside)
