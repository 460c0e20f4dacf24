"""How a session permit comes into being: one transaction over slot, seat and receipt.

Pure. Everything the answer rests on is compared in the transaction itself (the owner's registration, the
ledger's incarnation, the epoch, the active policy, the absence of receipt, slot, seat and of any slot beyond
the policy's number), so what was read for it may be old: an old ground only makes the transaction lose.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from coordinator.ledger.keys import DbKeys, numbers_at, only, prefix_end
from coordinator.ledger.limits import Limits, generation_for
from coordinator.ledger.record import (
    Alias,
    Backend,
    Epoch,
    EpochState,
    Kind,
    LedgerHead,
    LedgerState,
    Receipt,
    Seat,
    Session,
    Worker,
    pool_name,
)
from coordinator.ledger.rules import Code, Refused
from coordinator.ledger.states import SessionState
from coordinator.store.api import Compare, Entry, Put, Txn, absent, nothing_in, unchanged

AFTER_DIGITS = chr(ord("9") + 1)
WINDOW = 64  # slots that one coordinator looks at at a time
# what one reservation after another stands on, and what seldom changes
_worker, _head = lru_cache(256)(Worker.decode), lru_cache(16)(LedgerHead.decode)
_epoch, _alias = lru_cache(16)(Epoch.decode), lru_cache(16)(Alias.decode)


@dataclass(frozen=True, slots=True)
class Reserve:
    """A wish for one session permit.

    `request_id` makes it idempotent; `seats` is the pool's size over the whole fleet (0: no seat is taken,
    for admin permits); `owner` is the boot id whose `worker/` key and lease stand behind it; `epoch` 0 means
    the current one; `address` is where the session will be, if that is not the epoch's backend (a command's
    look at another node of the cluster); `pool` tells pools of one role in one database apart.
    """

    request_id: str
    kind: Kind
    dbname: str
    user: str
    seats: int
    owner: str
    host: str
    epoch: int = 0
    address: str = ""
    pool: str = ""

    @property
    def seats_of(self) -> str:
        """With the user: whose seats it takes one of."""
        return pool_name(self.dbname, self.pool)


@dataclass(frozen=True, slots=True)
class Window:
    """A run of slots, in the order in which they are tried, and the key ranges that cover it."""

    slots: tuple[int, ...]
    ranges: tuple[tuple[str, str], ...]


def window_at(keys: DbKeys, kind: Kind, limit: int, home: int, turn: int) -> Window:
    """The `turn`-th run of at most WINDOW slots counted from `home`; empty once round the circle."""
    first, last = turn * WINDOW, min((turn + 1) * WINDOW, limit)
    slots = tuple((home + i) % limit for i in range(first, last)) if first < limit else ()
    ranges: list[tuple[str, str]] = []
    start = 0
    for i, slot in enumerate(slots):
        if i + 1 == len(slots) or slots[i + 1] != slot + 1:
            ranges.append((keys.session(kind, slots[start]), keys.session(kind, slot + 1)))
            start = i + 1
    return Window(slots, tuple(ranges))


def pick(order: Sequence[int], taken: Collection[int]) -> int | None:
    """The first number of `order` that is not taken."""
    return next((number for number in order if number not in taken), None)


@dataclass(frozen=True, slots=True)
class Grounds:
    """What was read for one reservation. `held` and `seats` are the numbers taken."""

    head: Entry | None
    epoch: Entry | None
    alias: Entry | None
    worker: Entry | None
    receipt: Entry | None
    beyond: bool  # a slot is held that no policy has that grants
    seats: frozenset[int]
    held: frozenset[int]
    limits: Limits
    window: Window


@dataclass(frozen=True, slots=True)
class Plan:
    """A transaction that takes `session`'s slot, its seat and writes the receipt."""

    txn: Txn
    session: Session


@dataclass(frozen=True, slots=True)
class Repeated:
    """The request was answered before: this receipt is the answer, nothing more is taken."""

    receipt: Receipt
    generation: int


def grounds_reads(ask: Reserve, keys: DbKeys, limits: Limits, window: Window) -> tuple[tuple[str, str], ...]:
    """The ranges of one reservation's grounds, in the order that `grounds_from` takes."""
    bound = limits.bound(ask.kind)
    seats = keys.seats(ask.seats_of, ask.user)
    return (
        only(keys.ledger()), only(keys.epoch()), only(keys.alias()), only(keys.worker(ask.owner)),
        only(keys.receipt(ask.request_id)), beyond_range(keys, ask.kind, bound), (seats, prefix_end(seats)),
        *window.ranges,
    )


def grounds_from(reads: Sequence[Sequence[Entry]], limits: Limits, window: Window) -> Grounds:
    """The grounds out of the answers to `grounds_reads`."""
    head, epoch, alias, worker, receipt, beyond, seats, *slots = reads
    return Grounds(
        head=_one(head), epoch=_one(epoch), alias=_one(alias), worker=_one(worker), receipt=_one(receipt),
        beyond=bool(beyond), seats=_numbers(seats), held=frozenset().union(*map(_numbers, slots)),
        limits=limits, window=window,
    )


def beyond_range(keys: DbKeys, kind: Kind, limit: int) -> tuple[str, str]:
    """Every slot of the kind with a number of `limit` or more; no number begins with anything but a digit."""
    return keys.session(kind, limit), keys.sessions(kind) + AFTER_DIGITS


def plan_reservation(
    ask: Reserve, grounds: Grounds, keys: DbKeys, now_us: int, *,
    home: int = 0, busy_slots: Collection[int] = (), busy_seats: Collection[int] = (),
) -> Plan | Repeated | Refused:
    """One transaction that reserves, or why not.

    `busy_*` are numbers that other reservations of this process are about to take: they only keep two of
    them from the same number. `home` is where the seats are counted from. A refusal is final for these
    grounds: nothing was written.
    """
    if grounds.receipt is not None:
        return _repeated(grounds.receipt)
    base = _standing(ask, grounds)
    if isinstance(base, Refused):
        return base
    worker, head, epoch_entry, alias_entry, epoch, alias = base
    owner = _worker(worker.value)
    if grounds.beyond:
        return Refused(Code.FULL, "slots beyond the policy's number are still held")
    usable = grounds.limits.usable(ask.kind, epoch.failover)
    slot = pick([each for each in grounds.window.slots if each < usable], grounds.held | set(busy_slots))
    if slot is None:
        return Refused(Code.FULL)
    seat = _pick_seat(ask, grounds, home, busy_seats)
    if seat is None:
        return Refused(Code.SEATS_FULL)
    session = Session(
        kind=ask.kind, slot=slot, generation=-_head(head.value).generation_base,
        state=SessionState.RESERVED, owner=ask.owner, host=ask.host,
        dbname=ask.dbname, user=ask.user, pool=ask.pool, seat=seat, request_id=ask.request_id,
        epoch=epoch.number,
        policy_generation=generation_for(alias, ask.request_id, ask.kind),
        backend=_backend(ask, epoch), state_since_us=now_us,
        machine=owner.machine_id, kernel_boot=owner.kernel_boot_id,
    )
    compares = (
        unchanged(worker.key, worker.mod_revision), unchanged(head.key, head.mod_revision),
        unchanged(epoch_entry.key, epoch_entry.mod_revision),
        unchanged(alias_entry.key, alias_entry.mod_revision),
        nothing_in(*beyond_range(keys, ask.kind, grounds.limits.bound(ask.kind))),
    )
    reads = grounds_reads(ask, keys, grounds.limits, grounds.window)
    return Plan(_reserving_txn(session, keys, compares, worker.lease, reads), session)


def plan_void(ask_id: str, kind: Kind, worker: Entry, keys: DbKeys) -> Txn:
    """Answer a request with `voided` unless it has an answer: no reservation of it can be made any more."""
    key = keys.receipt(ask_id)
    receipt = Receipt(kind=kind, slot=-1, voided=True)
    return Txn(
        (absent(key), unchanged(worker.key, worker.mod_revision)),
        puts=(Put(key, receipt.encode(), worker.lease),),
        reads=(only(key), only(worker.key)),
    )


def plan_take_back(plan: Plan, revision: int, keys: DbKeys) -> Txn:
    """Undo a reservation that was won at `revision`, if nobody touched it: the request is voided."""
    session = plan.session
    voided = Receipt(session.kind, -1, voided=True)
    puts = [Put(put.key, voided.encode(), put.lease) for put in plan.txn.puts
            if put.key == keys.receipt(session.request_id)]
    taken = [put.key for put in plan.txn.puts if put.key != keys.receipt(session.request_id)]
    return Txn((unchanged(keys.session(session.kind, session.slot), revision),), tuple(puts), tuple(taken))


def _reserving_txn(
    session: Session, keys: DbKeys, compares: tuple[Compare, ...], lease: int,
    reads: tuple[tuple[str, str], ...],
) -> Txn:
    slot, receipt = keys.session(session.kind, session.slot), keys.receipt(session.request_id)
    given = Receipt(session.kind, session.slot, base=-session.generation)
    puts = [Put(slot, session.encode()), Put(receipt, given.encode(), lease)]
    new = [slot, receipt]
    if session.seat >= 0:
        seat = keys.seat(session.seats_of, session.user, session.seat)
        puts.append(Put(seat, Seat(session.kind, session.slot, session.request_id).encode()))
        new.append(seat)
    return Txn((*compares, *map(absent, new)), puts=tuple(puts), reads=reads)


def _standing(
    ask: Reserve, grounds: Grounds
) -> tuple[Entry, Entry, Entry, Entry, Epoch, Alias] | Refused:
    """The keys a reservation stands on, or which of them forbids it."""
    if grounds.head is None:
        return Refused(Code.LEDGER_LOST, "the ledger's key is missing")
    if _head(grounds.head.value).state is not LedgerState.ACTIVE:
        return Refused(Code.LEDGER_LOST, "the ledger is recovering")
    if ask.kind is not Kind.ADMIN and (who := LedgerHead.decode(grounds.head.value).frozen):
        return Refused(Code.FROZEN, f"frozen by {who}: nothing more is granted until `pooler fleet thaw`")
    if grounds.epoch is None or grounds.alias is None:
        return Refused(Code.LEDGER_UNAVAILABLE, "no backend epoch or no policy is published")
    if grounds.worker is None:
        return Refused(Code.LEDGER_UNAVAILABLE, "the owner is not registered")
    epoch, alias = _epoch(grounds.epoch.value), _alias(grounds.alias.value)
    if not generation_for(alias, ask.request_id, ask.kind):
        return Refused(Code.LEDGER_UNAVAILABLE, "no policy is active")
    # an admin session looks at the server while it drains: it runs no transaction of a client
    if ask.kind is not Kind.ADMIN and epoch.state is not EpochState.ACTIVE:
        return Refused(Code.DRAINING)
    if ask.epoch not in (0, epoch.number):
        return Refused(Code.DRAINING, f"epoch {ask.epoch} is over")
    return grounds.worker, grounds.head, grounds.epoch, grounds.alias, epoch, alias


def _backend(ask: Reserve, epoch: Epoch) -> Backend:
    """Where it will connect: only what is known of that node, so that no look at another proves anything."""
    if ask.address in ("", epoch.backend.address):
        return epoch.backend
    return Backend(ask.address, epoch.backend.system_identifier, epoch.backend.timeline)


def _pick_seat(ask: Reserve, grounds: Grounds, home: int, busy: Collection[int]) -> int | None:
    if ask.seats == 0:
        return -1
    taken, beside = grounds.seats, set(busy) - grounds.seats
    if len(taken) + len(beside) >= ask.seats:
        return None
    order = ((home + i) % ask.seats for i in range(ask.seats))
    return next((seat for seat in order if seat not in taken and seat not in beside), None)


def _repeated(entry: Entry) -> Repeated | Refused:
    receipt = Receipt.decode(entry.value)
    if receipt.voided:
        return Refused(Code.VOIDED)
    return Repeated(receipt, entry.create_revision + receipt.base)


def _one(entries: Sequence[Entry]) -> Entry | None:
    return entries[0] if entries else None


def _numbers(entries: Sequence[Entry]) -> frozenset[int]:
    return numbers_at(entry.key for entry in entries)
