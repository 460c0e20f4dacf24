"""Whether a ledger stays at its backend or goes on to another: decided from what was just seen. Pure.

Nothing here promotes a server, or stops one: it follows what somebody else did. A primary is followed only to
a server of the same cluster that is out of recovery on a later timeline, so that somebody has promoted it;
and only when the one of now has stopped being one, is out of reach, or Patroni names the other. A read pool
goes from standby to standby, and to a primary only from a server that is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from coordinator.ledger.record import Backend, Epoch, EpochState

AGE_SECONDS_MAX = 5.0  # what was seen longer ago says nothing of now
FIRST_START = "first start"  # as founding gives the reason of its epoch
LAST_RESORT = "no standby answers; all there"  # in the reason of an epoch at a primary that is read from
ENTER_LAG = 0.5  # of the limit: two standbys whose lags cross near it are not gone to and fro between
SETTLE_READ_SECONDS = 30.0  # a read pool that has just moved is not moved again for a lag
GONE_LOOKS_READ = 3  # looks in a row that failed before a read pool leaves: its clients lose what they run


@dataclass(frozen=True, slots=True)
class Glance:
    """What a server said of itself. `lag_seconds`: how far a standby is behind; None: it cannot say.

    `at`: our monotonic clock in seconds when it was asked.
    """

    backend: Backend
    at: float
    read_only: bool = False  # by its own configuration: nobody can write there
    lag_seconds: float | None = 0.0


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """A server that could not be asked: why, and how many times in a row."""

    why: str
    at: float
    times: int = 1


Seen = Glance | NoAnswer


@dataclass(frozen=True, slots=True)
class Cluster:
    """What Patroni says: the address of its leader, None while it has none."""

    leader: str | None
    at: float


@dataclass(frozen=True, slots=True)
class Stay:
    """The epoch's backend serves on. `reason`: what people should know all the same, or empty."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Advance:
    """The next epoch is to begin at `backend`."""

    backend: Backend
    reason: str


@dataclass(frozen=True, slots=True)
class Nobody:
    """The epoch's backend cannot serve as it should, and nobody else is seen that could."""

    reason: str


Verdict = Stay | Advance | Nobody


def decide(
    role: str, epoch: Epoch, looks: Mapping[str, Seen], patroni: Cluster | None, now: float, *,
    lag_seconds_max: float | None = None, since_advance_seconds: float = float("inf"),
) -> Verdict:
    """Where the ledger belongs.

    `looks` by address (host:port), of the configured hosts, the epoch's backend and Patroni's leader, as far
    as they were looked at. `lag_seconds_max`: of a standby that is to be read from; None: any, known or not.
    `since_advance_seconds`: how long ago this leader moved the ledger.
    """
    if epoch.state is not EpochState.ACTIVE:
        return Stay()  # whoever drains it decides where it goes
    fresh = {address: seen for address, seen in looks.items() if now - seen.at <= AGE_SECONDS_MAX}
    cluster = patroni if patroni is not None and now - patroni.at <= AGE_SECONDS_MAX else None
    if role == "write":
        return _decide_write(epoch, fresh, cluster)
    return _decide_read(epoch, fresh, lag_seconds_max, since_advance_seconds)


def needs_all(verdict: Verdict) -> bool:
    """Whether it is to be made again with looks at every host, not only at the epoch's backend."""
    return verdict != Stay()


# ---- a primary

def _decide_write(epoch: Epoch, looks: Mapping[str, Seen], cluster: Cluster | None) -> Verdict:
    here = epoch.backend.address
    why = _unfit_primary(epoch, looks.get(here))
    named = cluster.leader if cluster is not None else None
    if why and cluster is not None and named in (None, here):
        return Nobody(f"{why}; Patroni names {'it' if named else 'nobody'} all the same")
    elsewhere = named is not None and named != here and not _is_same(looks.get(here), looks.get(named))
    if not why and not elsewhere:
        return Stay(second_primary(epoch, looks))
    if not epoch.backend.system_identifier:
        return Nobody(f"{why or 'Patroni names another'}; which cluster {here} is was never seen")
    others = [each for each in looks if each != here] if named is None else [named]
    faults, fit = _primaries(epoch, looks, others)
    if fit:
        best = max(fit, key=lambda backend: backend.timeline)
        said = f"Patroni names {named}" if elsewhere and not why else why
        return Advance(best, f"{said}; {best.address} was promoted")
    if not why:
        return Stay(f"Patroni names {named}, but {'; '.join(faults)}")
    return Nobody("; ".join((why, *faults)))


def _unfit_primary(epoch: Epoch, seen: Seen | None) -> str:
    """Why the epoch's backend takes no writes, or empty; also while it was not looked at."""
    address, cluster = epoch.backend.address, epoch.backend.system_identifier
    match seen:
        case NoAnswer(why=why):
            return f"{address} does not answer ({why})"
        case Glance(backend=found) if cluster and found.system_identifier != cluster:
            return f"{address} is another cluster ({found.system_identifier})"
        case Glance(backend=found) if found.in_recovery:
            return f"{address} is in recovery"
        case Glance(read_only=True):
            return f"{address} is read-only"
    return ""


def _primaries(
    epoch: Epoch, looks: Mapping[str, Seen], addresses: Iterable[str]
) -> tuple[list[str], list[Backend]]:
    """Why those of `addresses` that could be none are not, and those that were promoted after the epoch's."""
    faults, fit = [], []
    for address in addresses:
        seen = looks.get(address)
        why = _no_successor(epoch, address, seen)
        if why:
            faults.append(why)
        elif isinstance(seen, Glance):
            fit.append(seen.backend)
    return faults, fit


def _no_successor(epoch: Epoch, address: str, seen: Seen | None) -> str:
    if not isinstance(seen, Glance):
        return f"{address} does not answer" if seen is not None else f"{address} was not looked at"
    found, before = seen.backend, epoch.backend
    if found.system_identifier != before.system_identifier:
        return f"{address} is another cluster"
    if found.in_recovery:
        return f"{address} is in recovery"
    if seen.read_only:
        return f"{address} is read-only"
    if found.timeline <= before.timeline:
        return f"{address} is on timeline {found.timeline}, which is not after {before.timeline}"
    return ""


def _is_same(one: Seen | None, other: Seen | None) -> bool:
    """Whether two addresses lead to one server."""
    if not isinstance(one, Glance) or not isinstance(other, Glance):
        return False
    return replace(one.backend, address="") == replace(other.backend, address="")


def second_primary(epoch: Epoch, looks: Mapping[str, Seen]) -> str:
    """Two servers of one cluster that both take writes: who is right, only people know."""
    here = looks.get(epoch.backend.address)
    for address, seen in looks.items():
        if (isinstance(seen, Glance) and address != epoch.backend.address and not _is_same(here, seen)
                and not seen.backend.in_recovery and epoch.backend.system_identifier
                and seen.backend.system_identifier == epoch.backend.system_identifier):
            return f"{address} takes writes as well (timeline {seen.backend.timeline}): two primaries"
    return ""


# ---- a standby to read from

def _decide_read(
    epoch: Epoch, looks: Mapping[str, Seen], lag_seconds_max: float | None, since_advance_seconds: float
) -> Verdict:
    here = epoch.backend.address
    seen = looks.get(here)
    gone = _is_gone(epoch, seen)
    why = gone or _too_late(here, seen, lag_seconds_max)
    is_primary = isinstance(seen, Glance) and not why and not seen.backend.in_recovery
    if not why and not (is_primary and _may_leave_primary(epoch)):
        return Stay()
    enter_max = lag_seconds_max if gone or lag_seconds_max is None else ENTER_LAG * lag_seconds_max
    standbys, primaries = _readable(epoch, looks, enter_max)
    if why and not gone and since_advance_seconds < SETTLE_READ_SECONDS:
        return Nobody(f"{why}; it has served for {since_advance_seconds:.0f} s only")
    if standbys:
        reason = why or f"{here} is a primary"
        return Advance(standbys[0], f"{reason}; {standbys[0].address} is a standby")
    if is_primary:
        return Stay(f"{here} is a primary, and no standby is seen")
    if gone and primaries:
        return Advance(primaries[0], f"{gone}; {LAST_RESORT} is {primaries[0].address}, a primary")
    return Nobody(why)


def _may_leave_primary(epoch: Epoch) -> bool:
    """It was taken for a standby, or for want of one: not where somebody ordered the drain to a primary."""
    return epoch.backend.in_recovery or epoch.reason == FIRST_START or LAST_RESORT in epoch.reason


def _is_gone(epoch: Epoch, seen: Seen | None) -> str:
    address, cluster = epoch.backend.address, epoch.backend.system_identifier
    match seen:
        case NoAnswer(why=why, times=times) if times >= GONE_LOOKS_READ:
            return f"{address} does not answer ({why})"
        case Glance(backend=found) if cluster and found.system_identifier != cluster:
            return f"{address} is another cluster ({found.system_identifier})"
    return ""


def _too_late(address: str, seen: Seen | None, lag_seconds_max: float | None) -> str:
    if not isinstance(seen, Glance) or not seen.backend.in_recovery or lag_seconds_max is None:
        return ""
    if seen.lag_seconds is None:
        return f"how far {address} is behind is not known"
    if seen.lag_seconds > lag_seconds_max:
        return f"{address} is {seen.lag_seconds:.1f} s behind"
    return ""


def _readable(
    epoch: Epoch, looks: Mapping[str, Seen], lag_seconds_max: float | None
) -> tuple[list[Backend], list[Backend]]:
    """The other servers of the cluster: standbys that are near enough, the nearest first, and primaries."""
    cluster, here = epoch.backend.system_identifier, epoch.backend.address
    others = [seen for address, seen in looks.items() if isinstance(seen, Glance) and address != here
              and cluster and seen.backend.system_identifier == cluster]
    near = [seen for seen in others if seen.backend.in_recovery
            and not _too_late(seen.backend.address, seen, lag_seconds_max)]
    near.sort(key=lambda seen: float("inf") if seen.lag_seconds is None else seen.lag_seconds)
    primaries = [seen.backend for seen in others if not seen.backend.in_recovery]
    primaries.sort(key=lambda backend: -backend.timeline)
    return [seen.backend for seen in near], primaries
