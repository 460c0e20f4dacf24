"""The whole ledger of one database as it stood at one revision: what show, audit and reapers look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from coordinator.ledger.keys import DbKeys, FleetKeys, only, prefix_end
from coordinator.ledger.limits import Limits
from coordinator.ledger.notes import Want
from coordinator.ledger.record import (
    Alias,
    Epoch,
    Kind,
    LedgerHead,
    Permit,
    Receipt,
    Record,
    Seat,
    Session,
    Worker,
    WorkerExit,
)
from coordinator.ledger.strange import Sieve, Strange, held_by_nobody, number_of, session_at, slot_of
from coordinator.store.api import Compare, Entry, Field, Txn

_R = TypeVar("_R", bound=Record)


@dataclass(frozen=True, slots=True)
class Held:
    """One held slot: its session (generation filled in) and the mod revision that writes compare.

    `unreadable` says why it is not known whose it is: the slot is held, and nothing frees it.
    """

    session: Session
    mod_revision: int
    unreadable: str = ""

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
class Wanted:
    """One standing want: its key, when it came, and what a write on it compares and keeps."""

    key: str
    want: Want
    create_revision: int
    mod_revision: int
    lease: int

    @classmethod
    def read(cls, entry: Entry) -> Wanted:
        """Raises UnknownSchema, ValueError."""
        want = Want.decode(entry.value)
        return cls(entry.key, want, entry.create_revision, entry.mod_revision, entry.lease)


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
    wants: tuple[Wanted, ...] = ()
    strange: tuple[Strange, ...] = ()  # keys that cannot be read; all but slots are left out of the rest

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
                fleet.workers(), fleet.worker_exits(), keys.wants())
    return reading(only(keys.ledger()), only(keys.epoch()), only(keys.alias()),
                   *((prefix, prefix_end(prefix)) for prefix in prefixes))


def _last(entry: Entry) -> str:
    return entry.key.rpartition("/")[2]


def snapshot_from(
    reads: Sequence[Sequence[Entry]], revision: int,
    limits_of: Mapping[int, Limits] | Callable[[bytes], Limits],
) -> LedgerSnapshot:
    """The snapshot out of the answers to `snapshot_txn`. `limits_of`: by generation, or what reads them.

    What cannot be read is in `strange`. Raises UnknownSchema, ValueError where the ledger's head, its epoch
    or its alias cannot be: without these nothing is known of it.
    """
    head, epoch, alias, sessions, seats, receipts, policies, workers, exits, wants = reads
    sieve = Sieve()
    numbered = dict(sieve.each(policies, lambda e: (number_of(e), e)))
    limits = limits_of if isinstance(limits_of, Mapping) else dict(sieve.each(
        numbered.values(), lambda e: (number_of(e), limits_of(e.value))))
    return LedgerSnapshot(
        revision=revision,
        head=_only(LedgerHead, head),
        head_revision=head[0].mod_revision if head else 0,
        epoch=_only(Epoch, epoch),
        alias=_only(Alias, alias),
        sessions=tuple(held for e in sessions if (held := _held(e, sieve)) is not None),
        seats=tuple(seat for e in seats if (seat := _seat(e, sieve)) is not None),
        receipts=tuple(sieve.each(receipts, _given)),
        policies={number: entry.value for number, entry in numbered.items()},
        limits=limits,
        workers={_last(e): each for e in workers if (each := _registered(e, sieve)) is not None},
        exits=dict(sieve.each(exits, _died)),  # a record that cannot be read proves no death
        wants=tuple(sieve.each(wants, Wanted.read)),
        strange=tuple(sieve.strange),
    )


def _only(record: type[_R], entries: Sequence[Entry]) -> _R | None:
    try:
        return record.decode(entries[0].value) if entries else None
    except ValueError as fault:
        raise type(fault)(f"{entries[0].key}: {fault}") from None


def _held(entry: Entry, sieve: Sieve) -> Held | None:
    try:
        return Held(session_at(entry), entry.mod_revision)
    except ValueError as fault:
        sieve.name(entry, str(fault))
        is_slot = bool(Sieve().each((entry,), slot_of))
        return Held(held_by_nobody(entry), entry.mod_revision, str(fault)) if is_slot else None


def _seat(entry: Entry, sieve: Sieve) -> TakenSeat | None:
    """One that cannot be read is taken all the same."""
    try:
        _ = number_of(entry)
        return TakenSeat(entry.key, Seat.decode(entry.value))
    except ValueError as fault:
        sieve.name(entry, str(fault))
        is_seat = bool(Sieve().each((entry,), number_of))
        return TakenSeat(entry.key, Seat(Kind.MAIN, -1, "")) if is_seat else None


def _given(entry: Entry) -> Given:
    receipt = Receipt.decode(entry.value)
    return Given(_last(entry), receipt, entry.create_revision + receipt.base, entry.lease)


def _registered(entry: Entry, sieve: Sieve) -> Registered | None:
    """What cannot be read of a fleet's key is no fault of this ledger: of its worker it is known that it is
    there, and nothing else; so it has acknowledged no epoch, and is waited for. Every worker's key is on a
    lease: one without is no worker's."""
    try:
        return Registered(Worker.decode(entry.value), entry.mod_revision, entry.lease)
    except ValueError as fault:
        sieve.name(entry, str(fault))
        unread = Worker(_last(entry), 0, -1, "", "", "", 0, 0, schemas=())
        return Registered(unread, entry.mod_revision, entry.lease) if entry.lease else None


def _died(entry: Entry) -> tuple[str, Died]:
    return _last(entry), Died(WorkerExit.decode(entry.value), entry.mod_revision)
