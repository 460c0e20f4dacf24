"""What is in the store of the epoch model, and the production code run on it.

As in image.py: an image stands for a keyspace, every write is a transaction that production code made,
carried out by the reference Keyspace and read back, and revisions are canonical. Here the epoch's key
matters, so each write of it has a revision of its own; one that compares an older one has lost for good.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from coordinator.drain_progress import look_at
from coordinator.epoch import (
    EpochEntry,
    MayBePromoted,
    abandoned_drain,
    active_again,
    advanced,
    after_abandoned,
    allow_abort,
    draining,
    end_abandoned,
    is_promoted,
    not_acknowledged,
    note_promotion,
    ordering,
    read_command,
    swap_epoch,
)
from coordinator.ledger.limits import Limits
from coordinator.ledger.record import (
    Backend,
    Epoch,
    EpochState,
    Kind,
    LedgerHead,
    LedgerState,
    Permit,
    Seat,
    Session,
    Worker,
)
from coordinator.ledger.reservation import Plan, grounds_from, grounds_reads, plan_reservation, window_at
from coordinator.ledger.rules import Code, Command, Refused, Write, decide, session_of
from coordinator.ledger.snapshot import LedgerSnapshot, reading, snapshot_from, snapshot_txn
from coordinator.registry import Introduction, Local, Registry
from coordinator.store.api import Entry, Field, LeaseGone, Lost, Put, Txn, Won, absent
from coordinator.store.memory import Keyspace
from coordinator.view import View
from pooler.admission.ticket import Ticket
from pooler.pool.core import PoolCore
from pooler.pool.ledger_view import LedgerView
from tests.ledger.ground import BACKEND, FLEET, KEYS, TAG, ask, found
from tests.model.at_once import AtOnce, at_once
from tests.pool.fake_session import FakeSession

# what the epoch's key says: N grants, N drains, N+1 grants, N drains and its promotion was ordered
ONE, DRAINING, TWO, PROMOTING = 1, 2, 3, 4
DRAINS = (DRAINING, PROMOTING)
GONE = -1  # no worker key
FREE = -1  # no permit
OLD, NEW = BACKEND, replace(BACKEND, address="127.0.0.2:5432")
NEW_IN_RECOVERY = replace(NEW, in_recovery=True)
WORKERS = "AB"
EPOCH, WORKER, SLOT, GENERATION, COMMAND = 500, 900, 1_000, 100, 800  # canonical revisions


class Image(NamedTuple):
    """What is in the store. Request r takes slot r, if it gets one."""

    version: int  # how often the epoch's key was written
    epoch: int  # ONE, DRAINING, TWO, PROMOTING
    command: int  # 1: the drain's key is there
    keys: tuple[int, ...]  # per worker: the epoch that its key says it acknowledged, or GONE
    permits: tuple[int, ...]  # per request: what stands in its slot (an id), or FREE


Tamper = Callable[[str, Txn], Txn]  # what a mutant does to a transaction


def number_of(epoch: int) -> int:
    """The number of the epoch: N is 1."""
    return 2 if epoch == TWO else 1


def record_of(epoch: int) -> Epoch:
    """What the key holds; who wrote it, when and why is left out."""
    first = Epoch(1, EpochState.ACTIVE, OLD, since_us=0, reason="")
    if epoch == ONE:
        return first
    if epoch in DRAINS:
        drains = draining(first, timeout_seconds=1, now_us=0, reason="", target=NEW_IN_RECOVERY)
        return ordering(drains) if epoch == PROMOTING else drains
    return advanced(first, NEW, now_us=0, reason="")


@cache
def heard(epoch: int) -> LedgerView:
    """What a worker makes of it."""
    head = LedgerHead("first", LedgerState.ACTIVE, TAG)
    return LedgerView.parse("db", View("db", reachable=True, head=head, epoch=record_of(epoch)).for_workers())


@cache
def usable(epoch: int, under: int) -> bool:
    """Whether a worker that heard this gives a session of epoch `under` to anybody."""
    core = PoolCore[FakeSession](10, 10)
    core.epoch, core.serving = heard(epoch).epoch, heard(epoch).serving
    return core.usable(FakeSession(epoch=under), 0.0) and not core.blocked


@cache
def grants(epoch: int, under: int, *, own_lease: bool) -> bool:
    """Whether somebody who asks a pool that heard this, and has such a session, gets it."""
    core = PoolCore[FakeSession](10, 10)
    core.epoch, core.serving = heard(epoch).epoch, heard(epoch).serving
    core.grants_until = float("inf") if own_lease else 0.0
    session, ticket = FakeSession(epoch=under), Ticket(lambda given: None, lambda error: None)
    core.give(session, 0.0)
    ticket.start(1.0, float("inf"))
    return core.request(ticket) is session


def may_be_promoted(promoted: bool) -> bool:
    """What who ends a drain makes of the target."""
    return is_promoted(record_of(DRAINING), NEW if promoted else NEW_IN_RECOVERY)


class EpochStore:
    """The production code's answers on images, remembered: they are pure. `owners[r]`: whose request r is."""

    def __init__(self, owners: tuple[int, ...], tamper: Tamper | None = None) -> None:
        self.owners = owners
        self.txns: list[Txn] = []
        self._txn_ids: dict[Txn, int] = {}
        self._values: list[bytes] = []
        self._value_ids: dict[bytes, int] = {}
        self.sessions: list[Session] = []
        self._tamper = tamper or (lambda name, txn: txn)
        self.reserves = cache(self._reserves)
        self.moves = cache(self._moves)
        self.carried_out = cache(self._carried_out)
        self.decided = cache(self._decided)
        self.registered = cache(self._registered)
        self.acknowledged = cache(self._acknowledged)
        self.is_complete = cache(self._is_complete)
        self.left = cache(self._left)
        self.aborts = cache(self._aborts)
        self.notes = cache(self._notes)
        self.ends_abandoned = cache(self._ends_abandoned)

    # ---- sessions

    def permit(self, request: int) -> Permit:
        return Permit(Kind.MAIN, request, GENERATION + request)

    def _reserves(self, request: int, image: Image) -> int | None:
        """The transaction that reserves its slot now; None where production refuses."""
        keyspace, wish = self.keyspace(image), ask(f"r{request}", WORKERS[self.owners[request]], seats=10)
        limits = Limits(len(self.owners))
        window = window_at(KEYS, Kind.MAIN, limits.main, request, 0)
        outcome = keyspace.txn(reading(*grounds_reads(wish, KEYS, limits, window)))
        assert isinstance(outcome, Lost)
        plan = plan_reservation(
            wish, grounds_from(outcome.reads, limits, window), KEYS, now_us=0, home=request)
        if not isinstance(plan, Plan):
            return None
        assert plan.session.slot == plan.session.seat == request
        return self._txn_id("reserve", plan.txn)

    def _decided(self, request: int, command: Command, image: Image) -> Image | Code:
        """The image after the command, carried out at once; or why not."""
        decision = decide(self._entry(image.permits[request]), command, KEYS, now_us=0)
        if isinstance(decision, Refused):
            return decision.code
        if not isinstance(decision, Write):
            return image
        after = self._carried_out(self._txn_id(type(command).__name__, decision.txn), image)
        return after if after is not None else Code.CHANGED

    # ---- the epoch

    def _moves(self, name: str, image: Image) -> int:
        """The transaction of a move of the epoch, made on the image as it is."""
        record = record_of(image.epoch)
        before = EpochEntry(record, EPOCH + image.version)
        drain_key = KEYS.drain()

        def move(store: AtOnce) -> Coroutine[Any, Any, Any]:
            match name:
                case "stop":
                    return swap_epoch(store, KEYS, before, record_of(DRAINING), absent(drain_key),
                                      puts=(Put(drain_key, b"", _lease_of_command(store.keyspace)),))
                case "advance":
                    return swap_epoch(store, KEYS, before, record_of(TWO), deletes=(drain_key,))
                case "fail over":
                    return swap_epoch(store, KEYS, before, record_of(TWO))
                case "grant again":
                    again = active_again(record, now_us=0, reason="")
                    return swap_epoch(store, KEYS, before, again, deletes=(drain_key,))
            raise AssertionError(name)

        return self._withheld(name, move, image)

    def _aborts(self, image: Image) -> int | None:
        """An operator's transaction that gives the drain up; None: it is refused."""
        found, command = at_once(read_command(AtOnce(self.keyspace(image)), KEYS))
        try:
            allow_abort(found.epoch, command)
        except MayBePromoted:
            return None
        again = active_again(found.epoch, now_us=0, reason="")
        return self._withheld("abort", lambda store: swap_epoch(
            store, KEYS, found, again, deletes=(KEYS.drain(),)), image)

    def _notes(self, version: int, image: Image) -> tuple[bool, int | None]:
        """Whether it stands that the command promotes; else the transaction that notes it, if it may."""
        stopped = EpochEntry(record_of(DRAINING), EPOCH + version)
        store = AtOnce(self.keyspace(image), withholds=True)
        stands = at_once(note_promotion(store, KEYS, stopped, _lease_of_command(store.keyspace)))
        return stands is not None, self._txn_id("note", store.withheld[0]) if store.withheld else None

    def _ends_abandoned(self, image: Image, seen: Backend | None) -> int | None:
        """The leader's transaction for a drain whose command is gone, by what it saw of the target (None:
        nothing); None: there is none."""
        before = at_once(abandoned_drain(AtOnce(self.keyspace(image)), KEYS))
        if before is None or after_abandoned(before.epoch, seen, now_us=0) is None:
            return None
        return self._withheld("revive", lambda store: end_abandoned(
            store, KEYS, before, seen, 0, fence=absent("nobody else leads")), image)

    def _withheld(
        self, name: str, write: Callable[[AtOnce], Coroutine[Any, Any, Any]], image: Image
    ) -> int:
        store = AtOnce(self.keyspace(image), withholds=True)
        at_once(write(store))
        return self._txn_id(name, store.withheld[0])

    # ---- workers

    def _registered(self, worker: int, serves: int, acknowledged: int, image: Image) -> Image:
        """The image after the worker was registered; it serves epoch `serves` as it says hello, and this
        coordinator has heard it acknowledge one before (0: none)."""
        keyspace, local = self.keyspace(image), self._local(worker)
        local.serves = {KEYS.database: serves}
        local.acknowledged = {KEYS.database: acknowledged} if acknowledged else {}
        assert at_once(self._registry(keyspace)._register_once(local))
        return self._read_back(keyspace, image)

    def _acknowledged(self, worker: int, epoch: int, image: Image) -> Image:
        """The image after the worker said that it grants no session of an older epoch."""
        keyspace, local = self.keyspace(image), self._local(worker)
        at_once(self._registry(keyspace).acknowledge(local, KEYS.database, epoch))
        return self._read_back(keyspace, image)

    def _registry(self, keyspace: Keyspace) -> Registry:
        return Registry(AtOnce(keyspace), FLEET, [KEYS.database], host="host", machine_id="machine",
                        kernel_boot_id="kernel", ttl_seconds=5.0, now_us=lambda: 0)

    def _local(self, worker: int) -> Local:
        return Local(Introduction(WORKERS[worker], worker, 1, 1, "", (1,)))

    # ---- what is seen

    def snapshot(self, image: Image) -> LedgerSnapshot:
        outcome = self.keyspace(image).txn(snapshot_txn(KEYS, FLEET))
        assert isinstance(outcome, Lost)
        return snapshot_from(outcome.reads, outcome.revision, {1: Limits(len(self.owners))})

    def _is_complete(self, image: Image) -> bool:
        """Whether a command says that the advance is complete."""
        workers = {boot_id: each.worker for boot_id, each in self.snapshot(image).workers.items()}
        return image.epoch == TWO and not not_acknowledged(2, KEYS.database, workers)

    def _left(self, image: Image) -> tuple[int, int]:
        """What a drain of N still waits for: sessions that may live, and those of them that are unknown."""
        seen = look_at(self.snapshot(image), KEYS.database, 1, {}, step="", now_us=0, elapsed_seconds=0,
                       lease_ttl_seconds=5.0)
        return seen.left, len(seen.unknown)

    # ---- the reference store

    def _carried_out(self, txn: int, image: Image) -> Image | None:
        """The image after the transaction won; None: it lost."""
        keyspace = self.keyspace(image)
        try:
            outcome = keyspace.txn(self.txns[txn])
        except LeaseGone:
            return None
        return self._read_back(keyspace, image) if isinstance(outcome, Won) else None

    def _read_back(self, keyspace: Keyspace, image: Image) -> Image:
        entry = keyspace.entries[KEYS.epoch()]
        wrote = entry.mod_revision != EPOCH + image.version
        keys = []
        for name in WORKERS:
            key = keyspace.entries.get(KEYS.worker(name))
            keys.append(Worker.decode(key.value).epochs.get(KEYS.database, 0) if key else GONE)
        drain = keyspace.entries.get(KEYS.drain())
        return Image(
            image.version + wrote, _epoch_of(entry), int(drain is not None), tuple(keys),
            tuple(self._standing(keyspace, request) for request in range(len(self.owners))))

    def _standing(self, keyspace: Keyspace, request: int) -> int:
        entry = keyspace.entries.get(KEYS.session(Kind.MAIN, request))
        if entry is None:
            return FREE
        known = self._value_ids.setdefault(entry.value, len(self._values))
        if known == len(self._values):
            self._values.append(entry.value)
            self.sessions.append(session_of(replace(entry, mod_revision=GENERATION + request)))
        return known

    def keyspace(self, image: Image) -> Keyspace:
        """The store that an image stands for."""
        keyspace = found(len(self.owners))
        for worker, name in enumerate(WORKERS):
            lease = keyspace.grant()
            if image.keys[worker] != GONE:
                record = Worker(name, worker, worker, "host", "machine", "kernel", 1, 1,
                                epochs={KEYS.database: image.keys[worker]})
                _stand(keyspace, KEYS.worker(name), record.encode(), WORKER + worker, lease)
        command = _lease_of_command(keyspace)
        if image.command:
            _stand(keyspace, KEYS.drain(), b"", COMMAND, command)
        _stand(keyspace, KEYS.epoch(), record_of(image.epoch).encode(), EPOCH + image.version)
        for value in image.permits:
            entry = self._entry(value)
            if entry is not None:
                session = self.sessions[value]
                seat = KEYS.seat(session.dbname, session.user, session.seat)
                keyspace.entries[entry.key] = entry
                _stand(keyspace, seat, Seat(Kind.MAIN, session.slot, session.request_id).encode(), SLOT)
        keyspace.revision = SLOT
        return keyspace

    def _entry(self, value: int) -> Entry | None:
        if value == FREE:
            return None
        stored = Session.decode(self._values[value])
        created = GENERATION + stored.slot
        return Entry(KEYS.session(Kind.MAIN, stored.slot), self._values[value], created,
                     SLOT if stored.generation else created)

    def _txn_id(self, name: str, txn: Txn) -> int:
        changed = self._tamper(name, txn)
        known = self._txn_ids.setdefault(changed, len(self.txns))
        if known == len(self.txns):
            self.txns.append(changed)
        return known

    def is_over(self, txn: int, image: Image, put_again: int = -1) -> bool:
        """It compares an epoch that has moved on, or the key of a worker that was put again: it has lost."""
        mods = {each.key: each.revision for each in self.txns[txn].compares if each.field is Field.MOD}
        moved = mods.get(KEYS.epoch(), EPOCH + image.version) != EPOCH + image.version
        return moved or (put_again >= 0 and KEYS.worker(WORKERS[put_again]) in mods)


def _epoch_of(entry: Entry) -> int:
    record = Epoch.decode(entry.value)
    if record.number == 2:
        return TWO
    if record.state is EpochState.ACTIVE:
        return ONE
    return PROMOTING if record.promotes else DRAINING


def _lease_of_command(keyspace: Keyspace) -> int:
    """The lease of the draining command: after those of the workers, or a later test's own."""
    return max(keyspace.leases) if len(keyspace.leases) > len(WORKERS) else keyspace.grant()


def _stand(keyspace: Keyspace, key: str, value: bytes, revision: int, lease: int = 0) -> None:
    keyspace.entries[key] = Entry(key, value, revision, revision, lease)


