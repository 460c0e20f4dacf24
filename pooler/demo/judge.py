"""What the demonstration may claim, judged from outside. Pure: figures in, verdicts out.

Sessions come from the servers' own logs, permits from etcd, transactions from the servers' own counters and
from what each client was told. A verdict that cannot fail is none: each check has a name that `--break` must
make fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from coordinator.ledger.states import SessionState
from pooler.demo.ledgerwatch import Seen, lives
from pooler.demo.serverlog import Interval, Refusal, overlap_max

BIRTH_TAG = "pooler:"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One check: whether it held, and the figures."""

    name: str
    held: bool
    text: str


@dataclass(frozen=True, slots=True)
class Writes:
    """What the token writers were told, and what stands in the table."""

    acknowledged: Mapping[str, float]  # token: when, seconds since 1970
    unknown: frozenset[str]
    refused: frozenset[str]
    found: Mapping[str, int]  # token: rows


@dataclass(frozen=True, slots=True)
class ServerSeen:
    """One server's log, already reduced to the fleet's own sessions."""

    name: str
    sessions: Sequence[Interval]
    refusals: Sequence[Refusal]


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a killed worker's permits."""

    permits: int
    unknown: int
    released: int
    unknown_after_seconds: float | None
    released_after_seconds: float | None
    proofs: Mapping[str, int] = field(default_factory=dict)


def judge_budget(servers: Sequence[ServerSeen], permits: int) -> Verdict:
    """Never more sessions than permits, on one server or on both together, and nobody was refused for it."""
    most = {server.name: overlap_max(server.sessions)[0] for server in servers}
    together = overlap_in_time([each for server in servers for each in server.sessions])
    refused = sum(len(server.refusals) for server in servers)
    each = ", ".join(f"{name} {count}" for name, count in most.items())
    text = f"most sessions at once {together} of {permits} permits ({each}); refused by a server {refused}"
    return Verdict("budget", max([together, *most.values()]) <= permits and refused == 0, text)


def judge_permits(servers: Sequence[ServerSeen], history: list[Seen], tag: str) -> Verdict:
    """Each real session was born under a permit of its own, and each OPEN permit had one session."""
    born = Counter(each.application_name for server in servers for each in server.sessions)
    granted, opened = set(), set()
    for _, seen in lives(history):
        for step in seen:
            if step.session is None or step.session.left_slots:
                continue  # one that was moved was born in the slot before
            if step.session.kind in ("main", "reserve"):
                name = step.session.permit.birth_tag(tag) if step.session.generation else _reserved(step, tag)
                granted.add(name)
                if step.session.state is SessionState.OPEN:
                    opened.add(name)
    without = born.keys() - granted
    twice = [name for name, count in born.items() if count > 1]
    unreal = opened - born.keys()
    text = (f"{sum(born.values())} sessions opened, {len(granted)} permits granted; sessions without a "
            f"permit {len(without)}, permits with two sessions {len(twice)}, OPEN without a session "
            f"{len(unreal)}")
    return Verdict("permits", not (without or twice or unreal), text)


def judge_writes(writes: Writes, start: float, end: float, wanted: int) -> Verdict:
    """Every acknowledged write is there once, nothing refused is, and enough were made around the drain."""
    lost = [token for token in writes.acknowledged if token not in writes.found]
    twice = [token for token, rows in writes.found.items() if rows > 1]
    stray = writes.found.keys() - writes.acknowledged.keys() - writes.unknown
    around = sum(1 for at in writes.acknowledged.values() if start <= at <= end)
    came = len(writes.unknown & writes.found.keys())
    text = (f"acknowledged {len(writes.acknowledged)}, lost {len(lost)}, twice {len(twice)}; {around} around "
            f"the drain; unknown {len(writes.unknown)} (looked up: {came} there, "
            f"{len(writes.unknown) - came} not); refused but there {len(stray)}")
    if lost:
        text += f"; lost: {', '.join(sorted(lost)[:3])}"
    return Verdict("writes", not (lost or twice or stray) and around >= wanted, text)


def judge_counts(told: Mapping[str, tuple[int, int]], counted: Mapping[str, int]) -> Verdict:
    """The clients' and the servers' own counts agree. `told`: tenant: (done, not known or refused)."""
    wrong = [tenant for tenant, (done, rest) in told.items()
             if not done <= counted.get(tenant, 0) <= done + rest]
    text = ", ".join(f"{tenant}: clients {done}, servers {counted.get(tenant, 0)} (unknown or refused {rest})"
                     for tenant, (done, rest) in told.items())
    return Verdict("counts", not wrong, text)


def judge_drain(exit_code: int, old: ServerSeen, new: ServerSeen, ended: Sequence[str]) -> Verdict:
    """The drain said so, and no session of the old server outlived the first of the new one."""
    last = max((each.end for each in old.sessions if each.end is not None), default=None)
    first = min((each.start for each in new.sessions), default=None)
    still = sum(1 for each in old.sessions if each.end is None)
    in_order = last is not None and first is not None and last <= first and not still
    text = (f"exit {exit_code}; the old server's last session ended {_clock(last)}, "
            f"the new one's first began {_clock(first)}")
    if ended:
        text += f"; {'; '.join(ended)}"
    return Verdict("drain", exit_code == 0 and in_order, text)


def judge_fate(fate: Fate) -> Verdict:
    """The killed worker's permits were unknown first and released with a proof each."""
    proofs = ", ".join(f"{name} {count}" for name, count in sorted(fate.proofs.items())) or "none logged"
    text = (f"{fate.permits} permits: {fate.unknown} SESSION_UNKNOWN after "
            f"{_seconds(fate.unknown_after_seconds)}, {fate.released} released after "
            f"{_seconds(fate.released_after_seconds)} with proof ({proofs})")
    whole = fate.permits > 0 and fate.unknown == fate.released == fate.permits
    return Verdict("kill", whole and sum(fate.proofs.values()) >= fate.permits, text)


def judge_leaks(open_permits: Mapping[str, int], pooled: Mapping[str, int]) -> Verdict:
    """Every OPEN permit is a session that its worker's pool still knows. Both by pool (user@database)."""
    leaked = {pool: count - pooled.get(pool, 0) for pool, count in open_permits.items()
              if count > pooled.get(pool, 0)}
    text = (f"{sum(open_permits.values())} OPEN permits, {sum(pooled.values())} sessions in pools; leaked "
            f"{sum(leaked.values())}")
    return Verdict("leak", not leaked, text + "".join(f"; {pool} {count}" for pool, count in leaked.items()))


def judge_volume(done: int, wanted: int, workers: int, wanted_workers: int) -> Verdict:
    """Enough was moved, through every worker."""
    return Verdict("volume", done >= wanted and workers >= wanted_workers,
                   f"{done} transactions through {workers} workers")


def fate_of(keys: Collection[str], owner: str, history: list[Seen], since: float,
            proofs: Mapping[str, str]) -> Fate:
    """What became of the permits under `keys` that `owner` held at `since`. `proofs`: permit: proof."""
    unknown_at, released_at, kinds = [], [], Counter[str]()
    for _, seen in lives([each for each in history if each.key in keys]):
        mine = [each for each in seen if each.session is not None and each.session.owner == owner]
        if not mine or (seen[-1].session is None and seen[-1].at < since):
            continue
        unknown_at += [each.at for each in mine if each.session is not None
                       and each.session.state is SessionState.UNKNOWN][:1]
        if seen[-1].session is None:
            released_at.append(seen[-1].at)
            last = mine[-1].session
            proof = proofs.get(str(last.permit)) if last is not None else None
            kinds.update([proof] if proof else [])
    return Fate(len(keys), len(unknown_at), len(released_at), _after(unknown_at, since),
                _after(released_at, since), dict(kinds))


def overlap_in_time(sessions: Sequence[Interval]) -> int:
    """The most at one moment by the servers' clocks: ends before starts of the same millisecond."""
    steps = [(each.start, 1) for each in sessions]
    steps += [(each.end, -1) for each in sessions if each.end is not None]
    count = most = 0
    for _, step in sorted(steps):
        count += step
        most = max(most, count)
    return most


def _reserved(step: Seen, tag: str) -> str:
    """The tag of a permit as its reservation wrote it: its generation is that write's own revision."""
    assert step.session is not None
    return f"{BIRTH_TAG}{tag}:{step.session.kind[0]}{step.session.slot}.{step.revision}"


def _after(times: Sequence[float], since: float) -> float | None:
    return max(times) - since if times else None


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f} s"


def _clock(at: datetime | None) -> str:
    return "none" if at is None else at.strftime("%H:%M:%S.%f")[:-3]


def figures(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """For --json."""
    return [{"check": each.name, "held": each.held, "text": each.text} for each in verdicts]
