"""Execution permits in etcd: how many tickets of a class each worker may execute, and who may write that.

Pure. One key for each worker and class. Only the leader raises one: its transaction compares its own key, the
worker's, the target as it was read, the policy it counts by and the class's `raise`, which it bumps; so of
two raises that were counted on the same sum one fails. A worker only lowers its own, after it has stopped
using what it gives back. Registering again writes what it executes then, so whatever was decided on before
it loses. The leader takes a worker's permits back only from one reading that shows neither the worker's key
nor a session of it; of a process that is known dead, those above its sessions.

A loan is a permit of one class in a key of another: it counts with the class that lent it until it is gone
from that key, whatever its TTL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from urllib.parse import unquote

from coordinator.ledger.keys import DbKeys, FleetKeys, only, prefix_end
from coordinator.ledger.reading import read_or_none
from coordinator.ledger.record import COMMAND_INDEX, Alias, Record, Worker
from coordinator.ledger.snapshot import LedgerSnapshot, reading
from coordinator.ledger.strange import Sieve
from coordinator.store.api import Compare, Entry, Field, Put, Txn, absent, unchanged

RAISE = "raise"  # where a boot id stands in the key of a worker; no boot id is that
RAISES_MAX = 40  # workers in one transaction
RECALLS_MAX = 40
NOT_RECALLED = -1


@dataclass(frozen=True, slots=True)
class Gift:
    """So many permits more for one worker; `instead_of`: so many that this class lent it go back for them."""

    by: int
    instead_of: str = ""


@dataclass(frozen=True, slots=True)
class Share(Record):
    """`exec/<db>/<class>/<boot id>`: `own` permits of the class, `borrowed` ones by the class that lent them.

    `keep`: the leader wants back what is above that, as transactions end; NOT_RECALLED: nothing.
    """

    name: ClassVar[str] = "exec"

    own: int = 0
    borrowed: Mapping[str, int] = field(default_factory=dict)
    keep: int = NOT_RECALLED
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def permits(self) -> int:
        """How many tickets it may execute at a time."""
        return self.own + sum(self.borrowed.values())

    @property
    def kept(self) -> int:
        """How many it may still begin to execute on."""
        return self.permits if self.keep == NOT_RECALLED else min(self.keep, self.permits)

    def check(self) -> None:
        if any(each < 0 for each in (self.own, *self.borrowed.values())):
            raise ValueError("permits are below 0")

    def lowered(self, to: int) -> Share:
        """With at most `to`: what was lent goes back first."""
        over, borrowed = self.permits - to, dict(self.borrowed)
        if over <= 0:
            return self
        for lender in sorted(borrowed):
            given = min(borrowed[lender], over)
            borrowed[lender] -= given
            over -= given
        keep = NOT_RECALLED if self.keep >= to else self.keep
        left = {each: count for each, count in borrowed.items() if count}
        return replace(self, own=self.own - over, borrowed=left, keep=keep)

    def with_gift(self, gift: Gift, lender: str = "") -> Share:
        """With what was given: of its own class, or lent."""
        if lender:
            borrowed = {**self.borrowed, lender: self.borrowed.get(lender, 0) + gift.by}
            return replace(self, borrowed=borrowed, keep=NOT_RECALLED)
        if not gift.instead_of:
            return replace(self, own=self.own + gift.by, keep=NOT_RECALLED)
        left = {**self.borrowed, gift.instead_of: self.borrowed[gift.instead_of] - gift.by}
        return replace(self, own=self.own + gift.by, borrowed={k: v for k, v in left.items() if v})


@dataclass(frozen=True, slots=True)
class Raised(Record):
    """`exec/<db>/<class>/raise`: how often permits of the class were given."""

    name: ClassVar[str] = "raise"

    count: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class HeldShare:
    """A share as it was read: what a write on it compares."""

    share: Share
    mod_revision: int = 0  # 0: there is none


@dataclass(frozen=True, slots=True, order=True)
class Seat:
    """Whose share of what."""

    execution_class: str
    boot_id: str


@dataclass(frozen=True, slots=True)
class Shares:
    """Every share of one ledger as it stood at `revision`, with what a raise stands on."""

    revision: int = 0
    alias_revision: int = 0
    generation: int = 0  # of the policy that grants
    held: Mapping[Seat, HeldShare] = field(default_factory=dict)
    raised: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # by class: count, mod revision
    workers: Mapping[str, int] = field(default_factory=dict)  # create revision of each key; no commands
    hears: frozenset[str] = frozenset()  # the workers that keep to their shares
    unread: bool = False  # a share cannot be read, which may be of any class: nothing is given

    def of(self, seat: Seat) -> Share:
        """How it stands; an empty one where there is none."""
        held = self.held.get(seat)
        return held.share if held is not None else Share()

    def given(self, execution_class: str) -> int:
        """Permits of this class that are out, loans included."""
        return sum(each.share.own if seat.execution_class == execution_class
                   else each.share.borrowed.get(execution_class, 0) for seat, each in self.held.items())

    def lent(self, execution_class: str) -> int:
        """Permits of this class that other classes have."""
        return sum(each.share.borrowed.get(execution_class, 0) for each in self.held.values())


WrittenShares = dict[tuple[str, str], tuple[Share, int]]  # by ledger and class, with its revision


def seat_of(key: str, keys: DbKeys) -> Seat | None:
    """Whose share has this key; None for a class's `raise`. Raises ValueError for what is neither."""
    execution_class, slash, boot_id = key.removeprefix(keys.shares()).partition("/")
    if not (slash and boot_id and execution_class) or "/" in boot_id:
        raise ValueError("its key names no class and worker")
    return None if boot_id == RAISE else Seat(unquote(execution_class), boot_id)


def class_of(key: str, keys: DbKeys) -> str:
    """The class that a key of shares is of."""
    return unquote(key.removeprefix(keys.shares()).partition("/")[0])


def shares_txn(keys: DbKeys) -> Txn:
    """Reads what `shares_from` takes, at one revision."""
    workers = keys.worker("")
    return reading((keys.shares(), prefix_end(keys.shares())), only(keys.alias()),
                   (workers, prefix_end(workers)))


def shares_from(reads: Sequence[Sequence[Entry]], revision: int, keys: DbKeys, sieve: Sieve) -> Shares:
    """The shares out of the answers to `shares_txn`; what cannot be read is named in `sieve`."""
    held: dict[Seat, HeldShare] = {}
    raised: dict[str, tuple[int, int]] = {}
    unread = False
    for entry in reads[0]:
        try:
            seat = seat_of(entry.key, keys)
            if seat is None:
                raised[class_of(entry.key, keys)] = (Raised.decode(entry.value).count, entry.mod_revision)
            else:
                held[seat] = HeldShare(Share.decode(entry.value), entry.mod_revision)
        except ValueError as fault:
            sieve.name(entry, str(fault))
            unread = True
    stored = reads[1][0] if reads[1] else None
    alias = read_or_none(Alias, stored)
    found = {entry.key.rpartition("/")[2]: (entry, worker) for entry in reads[2]
             if (worker := read_or_none(Worker, entry)) is not None and worker.index != COMMAND_INDEX}
    return Shares(revision, stored.mod_revision if stored else 0, alias.granting if alias else 0, held,
                  raised, {boot_id: entry.create_revision for boot_id, (entry, _) in found.items()},
                  frozenset(boot_id for boot_id, (_, worker) in found.items() if worker.shares), unread)


# ---- the leader's


def raise_txn(
    fence: Compare, shares: Shares, given: Mapping[Seat, Gift], giver: str, keys: DbKeys
) -> Txn:
    """Gives permits of the class `giver` to these workers: in their share of that class, or lent to another.

    At most RAISES_MAX at once.
    """
    count, revision = shares.raised.get(giver, (0, 0))
    counter = keys.raised(giver)
    compares = [fence, _as_read(keys.alias(), shares.alias_revision), _as_read(counter, revision)]
    puts = [Put(counter, Raised(count + 1).encode())]
    for seat, gift in given.items():
        key = keys.share(seat.execution_class, seat.boot_id)
        held = shares.held.get(seat, HeldShare(Share()))
        compares += [_as_read(key, held.mod_revision),
                     Compare(keys.worker(seat.boot_id), Field.CREATE, shares.workers[seat.boot_id])]
        after = held.share.with_gift(gift, "" if giver == seat.execution_class else giver)
        puts.append(Put(key, after.encode()))
    return Txn(tuple(dict.fromkeys(compares)), tuple(puts))


def recall_txn(fence: Compare, shares: Shares, keep: Mapping[Seat, int], keys: DbKeys) -> Txn:
    """Asks these workers to give back what they have above so many (NOT_RECALLED: to give back nothing any
    more); raises nothing. At most RECALLS_MAX at once."""
    compares, puts = [fence], []
    for seat, kept in keep.items():
        key, held = keys.share(seat.execution_class, seat.boot_id), shares.held[seat]
        compares.append(unchanged(key, held.mod_revision))
        puts.append(Put(key, replace(held.share, keep=kept).encode()))
    return Txn(tuple(compares), tuple(puts))


def taken_back(
    snapshot: LedgerSnapshot, held: Mapping[Seat, HeldShare]
) -> dict[Seat, int]:
    """What is to be left of the shares of workers that are gone; `snapshot` and `held` are of one reading.

    Nothing of one that has neither a key nor a session; of one that is known dead, its sessions: each of them
    may execute a ticket until it is proven gone. One that is only silent keeps what it has.
    """
    sessions: dict[str, int] = {}
    for each in snapshot.sessions:
        sessions[each.session.owner] = sessions.get(each.session.owner, 0) + 1
    if "" in sessions or any(each.unreadable for each in snapshot.sessions):
        return {}  # whose that is, nobody knows
    left = {}
    for seat, standing in held.items():
        if seat.boot_id in snapshot.workers:
            continue
        bound = sessions.get(seat.boot_id, 0)
        if not bound or (seat.boot_id in snapshot.exits and bound < standing.share.permits):
            left[seat] = bound
    return left


def take_back_txn(
    fence: Compare, held: Mapping[Seat, HeldShare], left: Mapping[Seat, int], keys: DbKeys
) -> Txn:
    """Writes what `taken_back` found, if each share is as it was read: who registered since has moved it."""
    compares, puts, deletes = [fence], [], []
    for seat, bound in left.items():
        key = keys.share(seat.execution_class, seat.boot_id)
        compares.append(unchanged(key, held[seat].mod_revision))
        if bound:
            puts.append(Put(key, held[seat].share.lowered(bound).encode()))
        else:
            deletes.append(key)
    return Txn(tuple(compares), tuple(puts), tuple(deletes))


# ---- the worker's, by its coordinator


def lower_txn(seat: Seat, entry: Entry, to: int, keys: DbKeys) -> Txn | None:
    """Gives back what a worker does not use any more above `to`; None where the ledger has no more of it.

    Raises UnknownSchema, ValueError.
    """
    share = Share.decode(entry.value)
    if share.permits <= to:
        return None
    return Txn((unchanged(entry.key, entry.mod_revision),), (Put(entry.key, share.lowered(to).encode()),),
               reads=(only(entry.key),))


def registering(
    entries: Iterable[Entry], executing: Mapping[tuple[str, str], int], keys: DbKeys
) -> tuple[list[Compare], list[Put]]:
    """What the transaction that registers a worker again compares and writes of its shares in this ledger.

    Each is put again also where nothing changes: a take-back that was decided before it must lose. Where a
    share cannot be read it is as if it had none.
    """
    compares, puts = [], []
    for entry in entries:
        seat = seat_of(entry.key, keys)
        if seat is None:
            continue
        try:
            share = Share.decode(entry.value)
        except ValueError:
            share = Share()
        to = executing.get((keys.database, seat.execution_class), 0)
        compares.append(unchanged(entry.key, entry.mod_revision))
        puts.append(Put(entry.key, replace(share.lowered(to), keep=NOT_RECALLED).encode()))
    return compares, puts


def written_shares(
    puts: Iterable[Put], fleet: FleetKeys, databases: Iterable[str], revision: int
) -> WrittenShares:
    """Which shares these are, by ledger and class, with the revision they were written at."""
    found: WrittenShares = {}
    ledgers = [fleet.db(db) for db in databases]
    for put in puts:
        for keys in ledgers:
            seat = seat_of(put.key, keys) if put.key.startswith(keys.shares()) else None
            if seat is not None:
                found[keys.database, seat.execution_class] = Share.decode(put.value), revision
    return found


def _as_read(key: str, mod_revision: int) -> Compare:
    return unchanged(key, mod_revision) if mod_revision else absent(key)
