"""The whole ledger of one database as it stood at one revision: what show, audit and reapers look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from coordinator.ledger.keys import DbKeys, FleetKeys, only, prefix_end
from coordinator.ledger.limits import Limits
from coordinator.ledger.record import (
    Alias,
    Epoch,
    Kind,
    LedgerHead,
    Permit,
    Receipt,
    Seat,
    Session,
    Worker,
    WorkerExit,
)
from coordinator.ledger.rules import session_of
from coordinator.store.api import Compare, Entry, Field, Txn


@dataclass(frozen=True, slots=True)
class Held:
    """One held slot: its session (generation filled in) and the mod revision that writes compare."""

    session: Session
    mod_revision: int

    @property
    def permit(self) -> Permit:
        return self.session.permit


@dataclass(frozen=True, slots=True)
class TakenSeat:
    """One seat of a pool: its key and what it says it belongs to."""

    key: str
    seat: Seat


@dataclass(frozen=True, slots=True)
class Given:
    """One stored answer to a reservation."""

    request_id: str
    receipt: Receipt
    generation: int  # the receipt's create revision, above its base
    lease: int


@dataclass(frozen=True, slots=True)
class Registered:
    """A live worker key, with the revision that reservations compare and the lease it is on."""

    worker: Worker
    mod_revision: int
    lease: int


@dataclass(frozen=True, slots=True)
class Died:
    """A worker's process is known dead; `mod_revision` goes into rules.Release.exit_revision."""

    exit: WorkerExit
    mod_revision: int


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """Everything of one ledger at `revision`. Workers and exits are keyed by boot id."""

    revision: int
    head: LedgerHead | None = None
    head_revision: int = 0  # its mod revision: what a write on its state compares
    epoch: Epoch | None = None
    alias: Alias | None = None
    sessions: tuple[Held, ...] = ()
    seats: tuple[TakenSeat, ...] = ()
    receipts: tuple[Given, ...] = ()
    policies: Mapping[int, bytes] = field(default_factory=dict)  # by generation, as stored
    limits: Mapping[int, Limits] = field(default_factory=dict)  # by generation
    workers: Mapping[str, Registered] = field(default_factory=dict)
    exits: Mapping[str, Died] = field(default_factory=dict)

    @property
    def active_limits(self) -> Limits | None:
        """The limits of the policy generation that grants; of two, the larger of each kind. None: none."""
        if self.alias is None or self.alias.granting not in self.limits:
            return None
        beside = self.limits.get(self.alias.taking_over)
        return replace(self.limits[self.alias.granting], beside=beside).with_beside()

    def held(self, kind: Kind) -> tuple[Held, ...]:
        """The held slots of one kind."""
        return tuple(held for held in self.sessions if held.session.kind is kind)

    def find(self, permit: Permit) -> Held | None:
        """The slot that holds exactly this permit."""
        return next((held for held in self.sessions if held.permit == permit), None)

    def of_owner(self, boot_id: str) -> tuple[Held, ...]:
        """The permits of one worker."""
        return tuple(held for held in self.sessions if held.session.owner == boot_id)


def reading(*ranges: tuple[str, str]) -> Txn:
    """A transaction that never wins and so only reads, all ranges at one revision."""
    return Txn((Compare(ranges[0][0], Field.MOD, -1),), reads=ranges)


def snapshot_txn(keys: DbKeys, fleet: FleetKeys) -> Txn:
    """Reads the ledger whole, at one revision."""
    prefixes = (keys.sessions(), keys.all_seats(), keys.receipts(), keys.policies(),
                fleet.workers(), fleet.worker_exits())
    return reading(only(keys.ledger()), only(keys.epoch()), only(keys.alias()),
                   *((prefix, prefix_end(prefix)) for prefix in prefixes))


def _head(entries: Sequence[Entry]) -> LedgerHead | None:
    return LedgerHead.decode(entries[0].value) if entries else None


def _last(entry: Entry) -> str:
    return entry.key.rpartition("/")[2]


def snapshot_from(
    reads: Sequence[Sequence[Entry]], revision: int, limits: Mapping[int, Limits]
) -> LedgerSnapshot:
    """The snapshot out of the answers to `snapshot_txn`. Raises UnknownSchema, ValueError."""
    head, epoch, alias, sessions, seats, receipts, policies, workers, exits = reads
    return LedgerSnapshot(
        revision=revision,
        head=_head(head),
        head_revision=head[0].mod_revision if head else 0,
        epoch=Epoch.decode(epoch[0].value) if epoch else None,
        alias=Alias.decode(alias[0].value) if alias else None,
        sessions=tuple(Held(session_of(e), e.mod_revision) for e in sessions),
        seats=tuple(TakenSeat(e.key, Seat.decode(e.value)) for e in seats),
        receipts=tuple(
            Given(_last(e), receipt := Receipt.decode(e.value), e.create_revision + receipt.base, e.lease)
            for e in receipts),
        policies={int(_last(e)): e.value for e in policies},
        limits=limits,
        workers={_last(e): Registered(_worker(e), e.mod_revision, e.lease) for e in workers},
        exits=dict(_died(exits)),
    )


def _worker(entry: Entry) -> Worker:
    """What cannot be read of a fleet's key is no fault of this ledger: of its worker it is known that it is
    there, and nothing else; so it has acknowledged no epoch, and is waited for."""
    try:
        return Worker.decode(entry.value)
    except ValueError:
        return Worker(_last(entry), 0, -1, "", "", "", 0, 0, schemas=())


def _died(entries: Sequence[Entry]) -> Iterator[tuple[str, Died]]:
    """A record that cannot be read proves no death."""
    for entry in entries:
        with suppress(ValueError):
            yield _last(entry), Died(WorkerExit.decode(entry.value), entry.mod_revision)
