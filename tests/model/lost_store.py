"""What is in the store of the model of a lost ledger, and the production code run on it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from coordinator.ledger.access import Memory, Seen
from coordinator.ledger.limits import Limits
from coordinator.ledger.living import Living
from coordinator.ledger.proofs import Look, Row
from coordinator.ledger.record import (
    Alias,
    Kind,
    LedgerHead,
    LedgerState,
    Permit,
    Receipt,
    Seat,
    Session,
    Worker,
)
from coordinator.ledger.recovery import (
    Role,
    disagreement,
    not_heard,
    plan_living,
    plan_shown,
    receipt_name,
    without_permit,
)
from coordinator.ledger.reservation import Plan, grounds_from, grounds_reads, plan_reservation, window_at
from coordinator.ledger.rules import Code, Command, Refused, Write, decide, session_of
from coordinator.ledger.snapshot import LedgerSnapshot, reading, snapshot_from, snapshot_txn
from coordinator.rebuild import NotLost, order_rebuild
from coordinator.store.api import Entry, LeaseGone, Lost, Txn, Won
from coordinator.store.memory import Keyspace
from tests.ledger.ground import BACKEND, FLEET, KEYS, TAG, ask, epoch, policy
from tests.model.at_once import AtOnce, at_once

NO_HEAD, FIRST, RECOVERING, ACTIVE = range(4)
UNREGISTERED, UNHEARD, HEARD = range(3)  # a worker's key: none, its sessions not given slots yet, given
FREE = -1
WORKERS = "AB"
PROCESSES = 3  # of worker A, of worker B, of a worker that nobody remembers
SLOTS_MAX = 4  # what a server shows beyond the policy gets one, too
BASE, HEAD, WORKER, GENERATION, SLOT = 2_000_000, 500, 900, 100, 3_000  # canonical
SEEN = Seen("first", 1_000)
SECOND = LedgerHead("second", LedgerState.RECOVERING, "second00", rebuilt="1-x", tag_before=TAG,
                    generation_base=BASE)
HEADS = {FIRST: LedgerHead("first", LedgerState.ACTIVE, TAG), RECOVERING: SECOND,
         ACTIVE: replace(SECOND, state=LedgerState.ACTIVE)}
OURS = {Role("app", "app")}


class Image(NamedTuple):
    """What is in the store."""

    head: int
    base: int  # 1: an epoch and a policy
    keys: tuple[int, ...]  # per worker
    slots: tuple[int, ...]  # what stands in each (an id), or FREE
    receipts: tuple[int, ...]  # per process: 1: one was made for it


def old_permit(process: int) -> Permit:
    """Of the ledger that was lost."""
    return Permit(Kind.MAIN, process, GENERATION + process)


def process_of(session: Session) -> int:
    """Which of the processes it names, or -1."""
    return session.pid - 40 if 40 <= session.pid < 40 + PROCESSES else -1


class LostStore:
    """The production code's answers on images, remembered."""

    def __init__(self, slots: int) -> None:
        self.limits = Limits(slots)
        self._values: list[bytes] = []
        self._value_ids: dict[bytes, int] = {}
        self.sessions: list[Session] = []
        self.gives = cache(self._gives)
        self.shows = cache(self._shows)
        self.missing = cache(self._missing)
        self.disagrees = cache(self._disagrees)
        self.decided = cache(self._decided)
        self.reserved = cache(self._reserved)
        self.ordered = cache(self._ordered)
        self.unheard = cache(self._unheard)

    def standing(self, image: Image) -> list[Session]:
        return [self.sessions[value] for value in image.slots if value != FREE]

    def of_process(self, image: Image, process: int) -> list[Session]:
        """The permits that name it."""
        return [each for each in self.standing(image) if process_of(each) == process]

    # ---- what a coordinator knows

    @staticmethod
    def reads(seen: Seen, head: int, revision: int) -> Seen:
        """What it remembers after a read that showed this head at this revision."""
        memory = Memory(seen)
        memory.read(memory.floor, revision, HEADS.get(head))
        return replace(memory.seen, revision=SEEN.revision)

    @staticmethod
    def wins(seen: Seen, revision: int) -> Seen:
        """What it remembers after a write that won at this revision."""
        memory = Memory(seen)
        memory.wrote(memory.floor, revision, surely=True)
        return replace(memory.seen, revision=SEEN.revision)

    # ---- production decisions, each carried out

    def _reserved(self, worker: int, image: Image) -> Image | None:
        """The image after a reservation of the worker that lands on it; None: refused, or lost."""
        keyspace, wish = self.keyspace(image), ask("r9", WORKERS[worker], seats=10)
        window = window_at(KEYS, Kind.MAIN, self.limits.main, 0, 0)
        outcome = keyspace.txn(reading(*grounds_reads(wish, KEYS, self.limits, window)))
        assert isinstance(outcome, Lost)
        plan = plan_reservation(wish, grounds_from(outcome.reads, self.limits, window), KEYS, now_us=0)
        return self.carried_out(plan.txn, image) if isinstance(plan, Plan) else None

    def _ordered(self, seen: Seen, image: Image, revision: int) -> Image | None:
        """The image after the order to rebuild; None: it was refused."""
        keyspace = self.keyspace(image)
        keyspace.revision = revision
        try:
            ordered = at_once(order_rebuild(AtOnce(keyspace), FLEET, KEYS.database, seen, who="she",
                                            evidence="seen", now_us=lambda: 0))
        except NotLost:
            return None
        if ordered.again:
            return image
        assert ordered.head.generation_base > max(SEEN.revision, revision)
        assert ordered.head.state is LedgerState.RECOVERING
        return image._replace(head=RECOVERING)

    def _gives(self, worker: int, image: Image, permit: Permit) -> Image | None:
        """The image after the worker's session got its slot; None: there is none for it."""
        snapshot = self.snapshot(image)
        living = Living(permit, "app", "app", 10, 40 + worker, 5_000 + worker, BACKEND, 1)
        plan = plan_living(living, snapshot, KEYS, snapshot.head_revision, owner=WORKERS[worker],
                           host="host", now_us=0)
        return self.carried_out(plan.txn, image) if plan is not None else None

    def _shows(self, process: int, image: Image) -> Image | None:
        """The image after a session without a permit got one; None: somebody was faster."""
        snapshot = self.snapshot(image)
        plan = plan_shown(_row(process), BACKEND, snapshot, KEYS, snapshot.head_revision, 0)
        return self.carried_out(plan.txn, image)

    def _missing(self, image: Image, shown: tuple[int, ...]) -> tuple[int, ...]:
        rows = without_permit(self.snapshot(image), _look(shown), OURS)
        return tuple(row.pid - 40 for row in rows)

    def _disagrees(self, image: Image, shown: tuple[int, ...]) -> bool:
        return bool(disagreement(self.snapshot(image), [_look(shown)], OURS))

    def _unheard(self, image: Image) -> bool:
        return bool(not_heard(self.snapshot(image), KEYS.database))

    def _decided(self, command: Command, image: Image) -> Image | Code:
        """The image after a command on the permit that it names."""
        value = image.slots[command.permit.slot]
        decision = decide(self._entry(value) if value != FREE else None, command, KEYS, now_us=0)
        if isinstance(decision, Refused):
            return decision.code
        if not isinstance(decision, Write):
            return image
        after = self.carried_out(decision.txn, image)
        return after if after is not None else Code.CHANGED

    # ---- the reference store

    def snapshot(self, image: Image) -> LedgerSnapshot:
        outcome = self.keyspace(image).txn(snapshot_txn(KEYS, FLEET))
        assert isinstance(outcome, Lost)
        return snapshot_from(outcome.reads, outcome.revision, {1: self.limits})

    def carried_out(self, txn: Txn, image: Image) -> Image | None:
        keyspace = self.keyspace(image)
        try:
            outcome = keyspace.txn(txn)
        except LeaseGone:
            return None
        if not isinstance(outcome, Won):
            return None
        slots = tuple(self._value(keyspace.entries.get(KEYS.session(Kind.MAIN, slot)))
                      for slot in range(SLOTS_MAX))
        receipts = tuple(int(self._receipt(process) in keyspace.entries) for process in range(PROCESSES))
        return image._replace(slots=slots, receipts=receipts)

    def _receipt(self, process: int) -> str:
        return KEYS.receipt(receipt_name(SECOND, 40 + process, 5_000 + process))

    def value_of(self, session: Session) -> int:
        """A session as it is stored."""
        return self._value(Entry(KEYS.session(Kind.MAIN, session.slot), session.encode(), 1, 1))

    def _value(self, entry: Entry | None) -> int:
        if entry is None:
            return FREE
        known = self._value_ids.setdefault(entry.value, len(self._values))
        if known == len(self._values):
            self._values.append(entry.value)
            self.sessions.append(session_of(self._entry(known)))
        return known

    def _entry(self, value: int) -> Entry:
        """What was not rewritten since it was made has the revision of its receipt."""
        stored = Session.decode(self._values[value])
        made = GENERATION + 10 + max(0, process_of(stored))
        return Entry(KEYS.session(Kind.MAIN, stored.slot), self._values[value], made,
                     SLOT if stored.generation > 0 else made)

    def keyspace(self, image: Image) -> Keyspace:
        """The store that an image stands for."""
        keyspace = Keyspace()
        if image.head != NO_HEAD:
            _stand(keyspace, KEYS.ledger(), HEADS[image.head].encode(), HEAD + image.head)
        if image.base:
            _stand(keyspace, KEYS.epoch(), epoch(), 10)
            _stand(keyspace, KEYS.policy(1), policy(self.limits.main), 11)
            _stand(keyspace, KEYS.alias(), Alias(1).encode(), 12)
        for worker, name in enumerate(WORKERS):
            lease = keyspace.grant()
            if image.keys[worker] != UNREGISTERED:
                heard = {KEYS.database: SECOND.incarnation} if image.keys[worker] == HEARD else {}
                record = Worker(name, worker, worker, "host", "machine", "kernel", 1, 1, recovered=heard)
                _stand(keyspace, KEYS.worker(name), record.encode(), WORKER + image.keys[worker], lease)
        for value in image.slots:
            if value != FREE:
                entry, session = self._entry(value), self.sessions[value]
                keyspace.entries[entry.key] = entry
                if session.seat >= 0:
                    seat = Seat(session.kind, session.slot, session.request_id)
                    key = KEYS.seat(session.seats_of, session.user, session.seat)
                    _stand(keyspace, key, seat.encode(), SLOT)
        for process, made in enumerate(image.receipts):
            if made:
                _stand(keyspace, self._receipt(process), Receipt(Kind.MAIN, 0).encode(), SLOT)
        keyspace.revision = SLOT
        return keyspace


def _row(process: int) -> Row:
    return Row(40 + process, 5_000 + process, "app", "app", "app", "idle", "client backend")


def _look(shown: tuple[int, ...]) -> Look:
    return Look(BACKEND, may_see_all=True, is_node=True, rows=tuple(map(_row, shown)), anonymous=frozenset(),
                at_us=1, connection=1, authentication_timeout_seconds=60, is_local=False)


def _stand(keyspace: Keyspace, key: str, value: bytes, revision: int, lease: int = 0) -> None:
    keyspace.entries[key] = Entry(key, value, revision, revision, lease)
