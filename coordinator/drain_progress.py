"""How far a drain has come: what is left of the old epoch, and who has not heard of the new one. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from coordinator.epoch import not_acknowledged
from coordinator.inspect import Activities
from coordinator.ledger.record import Epoch, Kind, Session, Worker
from coordinator.ledger.snapshot import LedgerSnapshot
from coordinator.ledger.states import SessionState
from coordinator.session_table import Activity


@dataclass(frozen=True, slots=True)
class Waits:
    """A worker that has not acknowledged the epoch of now: which it is, the last one it did, and why so."""

    worker: str
    host: str
    index: int
    pid: int
    epoch: int
    why: str

    def __str__(self) -> str:
        return f"worker {self.index} on {self.host} (pid {self.pid}, {self.worker}): {self.why}"

    def as_dict(self) -> dict[str, Any]:
        """For a JSON line."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Progress:
    """One look at the ledger during a drain. Admin sessions are not counted: they serve no client."""

    step: str
    epoch: int  # the one that drains
    idle: int
    busy: int
    other: int  # being opened or closed, or open at a worker whose table cannot be read
    unknown: tuple[str, ...]
    new_open: int
    waits_for: tuple[Waits, ...]
    longest: dict[str, Any] | None
    elapsed_seconds: float

    @property
    def not_acknowledged(self) -> tuple[str, ...]:
        """Boot ids of the workers that are waited for."""
        return tuple(each.worker for each in self.waits_for)

    @property
    def left(self) -> int:
        """Sessions of the old epoch that are not known to be gone."""
        return self.idle + self.busy + self.other + len(self.unknown)

    @property
    def only_unknown(self) -> bool:
        return bool(self.unknown) and self.left == len(self.unknown)

    def as_dict(self) -> dict[str, Any]:
        """For a JSON line."""
        return {
            "step": self.step, "epoch": self.epoch,
            "old": {"idle": self.idle, "busy": self.busy, "other": self.other, "unknown": len(self.unknown)},
            "new_open": self.new_open, "not_acknowledged": list(self.not_acknowledged),
            "waits_for": [each.as_dict() for each in self.waits_for],
            "longest": self.longest, "elapsed_seconds": round(self.elapsed_seconds, 3),
        }


def look_at(
    snapshot: LedgerSnapshot, db: str, epoch: int, activities: Activities, *, step: str, now_us: int,
    elapsed_seconds: float, lease_ttl_seconds: float,
) -> Progress:
    """The progress of draining every epoch up to `epoch`. `lease_ttl_seconds`: of a worker's lease."""
    sessions = [held.session for held in snapshot.sessions if held.session.kind is not Kind.ADMIN]
    old = [session for session in sessions if session.epoch <= epoch]
    counts = Counter(_activity(db, session, activities) for session in old)
    workers = {boot_id: registered.worker for boot_id, registered in snapshot.workers.items()}
    current = snapshot.epoch.number if snapshot.epoch else 0
    return Progress(
        step=step, epoch=epoch, idle=counts["idle"], busy=counts["busy"], other=counts["other"],
        unknown=tuple(str(s.permit) for s in old if s.state is SessionState.UNKNOWN),
        new_open=sum(s.state is SessionState.OPEN and s.epoch > epoch for s in sessions),
        waits_for=_waits_for(snapshot.epoch, db, workers, now_us, lease_ttl_seconds)
        if snapshot.epoch is not None and current > epoch else (),
        longest=_longest(db, old, activities, now_us), elapsed_seconds=elapsed_seconds,
    )


def _waits_for(
    epoch: Epoch, db: str, workers: dict[str, Worker], now_us: int, lease_ttl_seconds: float
) -> tuple[Waits, ...]:
    """A lease is renewed only on the worker's own heartbeat: one that outlasts its time says it lives."""
    left = lease_ttl_seconds - max(0, now_us - epoch.since_us) / 1_000_000
    found = []
    for boot_id in not_acknowledged(epoch.number, db, workers):
        worker = workers[boot_id]
        last = worker.epochs.get(db, 0)
        why = (f"it has not answered yet; if it is gone, its lease ends within {left:.1f} s" if left > 0 else
               f"it lives, for its lease was renewed since, but epoch {last} is the last it acknowledged")
        found.append(Waits(boot_id, worker.host, worker.index, worker.pid, last, why))
    return tuple(found)


def _activity(db: str, session: Session, activities: Activities) -> str:
    if session.state is SessionState.UNKNOWN:
        return "unknown"
    doing = activities.get((db, session.permit))
    if session.state is not SessionState.OPEN or doing is None:
        return "other"
    return "idle" if doing.activity is Activity.IDLE else "busy"


def _longest(
    db: str, sessions: list[Session], activities: Activities, now_us: int
) -> dict[str, Any] | None:
    """The oldest transaction that the drain waits for."""
    busy = [(doing.since_us, session) for session in sessions
            if (doing := activities.get((db, session.permit))) and doing.activity is Activity.BUSY]
    if not busy:
        return None
    since_us, session = min(busy, key=lambda each: each[0])
    return {"pid": session.pid, "user": session.user,
            "age_seconds": round(max(0, now_us - since_us) / 1_000_000, 3)}
