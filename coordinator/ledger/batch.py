"""Several requests of one host in one transaction: what may share one, and what it is.

Pure. A batch takes requests in the order in which they came, each beside those before it, and ends with the
first that has no room left in the transaction. What they all rest on is compared once. All of a batch is
written at one revision, or nothing.

Permits of one transaction share their generation, which is that revision: so each says which slots its
siblings were given. Of n of them each moves once, into a slot of its own nth part of those that none of them
was given (siblings.py, docs/decisions/0018).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coordinator.ledger.keys import DbKeys
from coordinator.ledger.known import Span
from coordinator.ledger.record import Kind, Session, UnknownSchema
from coordinator.ledger.reservation import Grounds, Plan, Repeated, Reserve, plan_reservation
from coordinator.ledger.rules import Refused
from coordinator.store.api import TXN_OPERATIONS_MAX, Txn

RESERVATIONS_MAX = 40


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request, what was read for it, and what is to be read if the transaction is lost."""

    ask: Reserve
    grounds: Grounds
    reads: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """One transaction that carries out `plans`, and the `answers` of those that there is no plan for.

    Requests that are in neither wait for the next transaction. Both are by request id.
    """

    txn: Txn = field(default_factory=Txn)
    plans: Mapping[str, Plan] = field(default_factory=dict)
    answers: Mapping[str, Repeated | Refused | Exception] = field(default_factory=dict)


def plan_batch(
    wanted: Iterable[Wanted], keys: DbKeys, now_us: int, *, first_seat: Callable[[int], int],
    busy_slots: Collection[tuple[Kind, int]] = (), busy_seats: Collection[tuple[str, str, int]] = (),
    stops: bool = False,
) -> Batch:
    """Plans as many of the requests as fit, in their order.

    `first_seat` says where to look first among so many seats; `busy_*` are numbers that other reservations of
    this process are about to take. With `stops` nothing is planned behind a request that cannot be: on
    grounds that may be old a refusal is none, and nobody may overtake.
    """
    slots, seats = set(busy_slots), set(busy_seats)
    taken: dict[str, Plan] = {}
    answers: dict[str, Repeated | Refused | Exception] = {}
    sizes = _Sizes()
    looked: dict[tuple[str, str], int] = {}  # where to look for seats of a pool: those before it are taken
    for each in wanted:
        ask = each.ask
        pool = (ask.seats_of, ask.user)
        first = looked.get(pool, first_seat(ask.seats))
        if ask.request_id in taken or ask.request_id in answers:
            continue  # it finds the receipt the next time
        plan = _plan_beside(each, keys, now_us, first, slots, seats)
        if not isinstance(plan, Plan):
            if stops:
                break
            answers[ask.request_id] = plan
            continue
        if len(taken) == RESERVATIONS_MAX or not sizes.has_room_for(plan.txn):
            break
        sizes.add(plan.txn)
        taken[ask.request_id] = plan
        slots.add((ask.kind, plan.session.slot))
        seats.add((*pool, plan.session.seat))
        looked[pool] = max(0, plan.session.seat)
    plans = _as_siblings(taken)
    return Batch(join(plan.txn for plan in plans.values()), plans, answers)


def join(txns: Iterable[Txn]) -> Txn:
    """One transaction that wins if each of them would, and then writes what each of them would.

    Only for such as write different keys, none of which another of them compares.
    """
    parts = tuple(txns)
    return Txn(
        compares=tuple(dict.fromkeys(each for part in parts for each in part.compares)),
        puts=tuple(each for part in parts for each in part.puts),
        deletes=tuple(each for part in parts for each in part.deletes),
        reads=tuple(dict.fromkeys(each for part in parts for each in part.reads)),
    )


def fit_together(txns: Sequence[Txn], most: int) -> int:
    """How many of them, from the first on and at most `most`, make one transaction."""
    sizes = _Sizes()
    for count, txn in enumerate(txns[:most]):
        if not sizes.has_room_for(txn):
            return count
        sizes.add(txn)
    return min(len(txns), most)


class _Sizes:
    """How large a joined transaction is so far."""

    def __init__(self) -> None:
        self._compares: set[object] = set()
        self._reads: set[object] = set()
        self._writes = 0

    def has_room_for(self, txn: Txn) -> bool:
        sizes = (len(self._compares.union(txn.compares)), len(self._reads.union(txn.reads)),
                 self._writes + len(txn.puts) + len(txn.deletes))
        return max(sizes) <= TXN_OPERATIONS_MAX

    def add(self, txn: Txn) -> None:
        self._compares.update(txn.compares)
        self._reads.update(txn.reads)
        self._writes += len(txn.puts) + len(txn.deletes)


def _plan_beside(
    wanted: Wanted, keys: DbKeys, now_us: int, first_seat: int,
    slots: Collection[tuple[Kind, int]], seats: Collection[tuple[str, str, int]],
) -> Plan | Repeated | Refused | Exception:
    """A plan that leaves those numbers alone. What cannot be read of one request is that one's fault only."""
    ask, grounds = wanted.ask, wanted.grounds
    try:
        plan = plan_reservation(
            ask, grounds, keys, now_us, home=first_seat,
            busy_slots=[slot for kind, slot in slots if kind is ask.kind],
            busy_seats=[seat for *pool, seat in seats if pool == [ask.seats_of, ask.user]])
    except (UnknownSchema, ValueError) as fault:
        return fault
    return replace(plan, txn=replace(plan.txn, reads=wanted.reads)) if isinstance(plan, Plan) else plan


def _as_siblings(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Each of them says which slots the others of its kind are given."""
    by_kind: dict[Kind, list[int]] = {}
    for plan in plans.values():
        by_kind.setdefault(plan.session.kind, []).append(plan.session.slot)
    found = {}
    for request, plan in plans.items():
        siblings = tuple(slot for slot in by_kind[plan.session.kind] if slot != plan.session.slot)
        found[request] = _with(plan, replace(plan.session, siblings=siblings)) if siblings else plan
    return found


def _with(plan: Plan, session: Session) -> Plan:
    slot, *others = plan.txn.puts
    return Plan(replace(plan.txn, puts=(replace(slot, value=session.encode()), *others)), session)
