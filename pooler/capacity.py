"""The capacity worksheet: what a server has for ordinary sessions, what pools in each process would take of
it in the worst moment of a rollout, what a fleet takes, and how many workers a lost zone leaves. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil


@dataclass(frozen=True, slots=True)
class Server:
    """Sessions of one PostgreSQL server. `margin`: kept free for operators, a policy's adminReserve.

    Roles without the right to reserved connections leave both reserves free (superuser_reserved_connections,
    reserved_connections): https://www.postgresql.org/docs/current/runtime-config-connection.html
    """

    max_connections: int
    superuser_reserved: int
    reserved: int
    other_clients: int
    margin: int

    @property
    def hard_connection_limit(self) -> int:
        """Sessions that roles without special rights can have there."""
        return self.max_connections - self.superuser_reserved - self.reserved

    @property
    def ordinary(self) -> int:
        """Sessions that remain for the application; below 0 where the others already want more."""
        return self.hard_connection_limit - self.other_clients - self.margin


@dataclass(frozen=True, slots=True)
class LocalPools:
    """Pools that every process keeps for itself: each knows its own limit and no other's.

    `surge`: replicas that run beside the old ones during a rollout; `size` and `overflow` are one pool's.
    """

    replicas: int
    surge: int
    processes: int
    pools: int
    size: int
    overflow: int

    @property
    def steady(self) -> int:
        return self.replicas * self._each

    @property
    def overlap(self) -> int:
        """Sessions in the worst moment: old replicas still drain while new ones are connected."""
        return (self.replicas + self.surge) * self._each

    @property
    def _each(self) -> int:
        return self.processes * self.pools * (self.size + self.overflow)


@dataclass(frozen=True, slots=True)
class FleetShare:
    """What one ledger lets all workers of all hosts have together, whatever the number of replicas."""

    db: str
    permits: int
    reserve: int
    admin: int
    other_clients: int

    @property
    def sessions(self) -> int:
        """At most, commands of operators included."""
        return self.permits + self.reserve + self.admin


def proposed(server: Server) -> FleetShare:
    """The budget that fits this server where no policy is there yet."""
    return FleetShare("proposed", max(server.ordinary, 0), 0, server.margin, server.other_clients)


def wanted_of(server: Server, shares: Sequence[FleetShare]) -> int:
    """What these ledgers and everybody else may have at that server together."""
    return sum(share.sessions for share in shares) + server.other_clients


def waiting(share: FleetShare, asked: int) -> int:
    """Of so many connections that want a session at the same instant, those that wait for one."""
    return max(asked - share.permits, 0)


@dataclass(frozen=True, slots=True)
class Sample:
    """One point of a load test of one worker."""

    tps: Fraction
    p99_seconds: float
    errors: float


@dataclass(frozen=True, slots=True)
class Zones:
    """What is asked of the workers: `forecast_tps` of all of them together when `lost` of `count` zones are
    gone, each worker at `headroom` (0 to 1) of what it was tested at."""

    forecast_tps: Fraction
    count: int
    lost: int
    headroom: Fraction

    @property
    def left(self) -> int:
        return self.count - self.lost


@dataclass(frozen=True, slots=True)
class Workers:
    """So many in each zone, and what is left of them when zones are lost."""

    per_zone: int
    count: int
    left_tps: Fraction


def tested_tps(samples: Sequence[Sample], p99_seconds_max: float, errors_max: float) -> Fraction | None:
    """The highest point of the test that kept both limits, if any: nothing is said of points between."""
    return max((each.tps for each in samples
                if each.p99_seconds <= p99_seconds_max and each.errors <= errors_max), default=None)


def naive(zones: Zones, tested: Fraction) -> Workers:
    """The forecast by what one worker was tested at, spread over the zones: what a zone's loss is not in."""
    per_zone = ceil(Fraction(ceil(zones.forecast_tps / tested), zones.count))
    return Workers(per_zone, per_zone * zones.count, per_zone * zones.left * tested)


def planned(zones: Zones, tested: Fraction) -> Workers:
    """Enough in the zones that are left, each below what it was tested at by the headroom."""
    each = tested * zones.headroom
    per_zone = ceil(zones.forecast_tps / (each * zones.left))
    return Workers(per_zone, per_zone * zones.count, per_zone * zones.left * each)
