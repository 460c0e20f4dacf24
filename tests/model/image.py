"""The ledger's part of a model state, and the production code run on it.

A model state holds an *image*: small values that stand for what is in the store. Every write is a transaction
made by the production `decide` / `plan_reservation`, carried out by the reference Keyspace built from the
image, and read back. Revisions are canonical: all that ever matters is whether a remembered one still stands,
so a key that stands has one fixed revision, and a write that compares a revision which is over is hopeless.
What stands in a slot and what is on its way are numbers here; `Production.turned` gives those of the same
things with slots or owners exchanged, made by the production code once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from coordinator.ledger.limits import Limits
from coordinator.ledger.record import Backend, Kind, Permit, Receipt, Seat, Session
from coordinator.ledger.reservation import (
    Plan,
    grounds_from,
    grounds_reads,
    plan_reservation,
    plan_void,
    window_at,
)
from coordinator.ledger.rules import (
    Already,
    Closing,
    Code,
    Command,
    Connecting,
    MarkOwnerGone,
    Open,
    Reassert,
    Refused,
    Release,
    Relocate,
    Terminating,
    Unknown,
    decide,
    session_of,
)
from coordinator.ledger.snapshot import reading
from coordinator.ledger.states import Actor, Proof
from coordinator.store.api import Entry, Field, LeaseGone, Lost, Txn, Won
from coordinator.store.memory import Keyspace
from tests.ledger.ground import BACKEND, KEYS, ask, found, record_exit, register

SLOT, WORKER, EXIT = 1_000, 900, 910  # canonical revisions: of a rewritten slot, of worker and exit keys
GENERATION = 100  # of request 0; a reservation's slot has its receipt's create revision until it is rewritten
FREE = -1  # no session in the slot
OWNERS = "AB"
ANY = -1  # the slot of a write that is about no slot


def pid_of(request: int) -> int:
    """Its server process, if it gets one."""
    return 42 + request


def backend_of(restarts: int) -> Backend:
    """The server after so many restarts."""
    return replace(BACKEND, postmaster_start_us=BACKEND.postmaster_start_us + 100_000 * restarts)


def start_of(request: int, restarts: int) -> int:
    """backend_start of a process born after so many restarts."""
    return backend_of(restarts).postmaster_start_us + 5_000 + request


class Image(NamedTuple):
    """What is in the store: the slots' values (ids), receipts, worker keys and exit records."""

    slots: tuple[int, ...]
    receipts: tuple[int, ...]  # per request: 0 none, 1 granted, 2 voided
    keys: tuple[int, ...]  # per owner: 1 registered
    exits: tuple[int, ...]  # per owner: 0 not yet, 1 on record, 2 removed


class Op(NamedTuple):
    """One write: what, of which request, with which proof or flag."""

    name: str
    request: int
    flag: str = ""


class Basis(NamedTuple):
    """What a transaction was made from."""

    op: Op
    slot: int
    value: int
    exit_on_record: bool


class Turn(NamedTuple):
    """A renaming of what the protocol treats alike: two slots, two owners with one request each."""

    slots: bool
    owners: bool

    def slot(self, slot: int) -> int:
        return 1 - slot if self.slots and slot != ANY else slot

    def request(self, request: int) -> int:
        return 1 - request if self.owners else request


Tamper = Callable[[Op, Txn], Txn]  # what a mutant does to a transaction
Blind = Callable[[Op, Session], Session]  # what a mutant takes a session for before it decides


class Production:
    """The production code's answers on images, remembered: they are pure.

    `owners[r]` is the owner of request r.
    """

    def __init__(
        self, owners: tuple[int, ...], slots: int = 1, tamper: Tamper | None = None,
        blind: Blind | None = None, *, moves: bool = False,
        siblings: bool = False,
    ) -> None:
        self.owners = owners
        self.moves = moves
        self.siblings = siblings
        self.slots = slots
        self._tamper = tamper or (lambda op, txn: txn)
        self._blind = blind
        self._values: list[bytes] = []
        self._value_ids: dict[bytes, int] = {}
        self.sessions: list[Session] = []  # by value id
        self.request_of: list[int] = []  # by value id
        self.txns: list[Txn] = []
        self._bases: list[Basis] = []  # by transaction id
        self._txn_ids: dict[Txn, int] = {}
        self.decision = cache(self._decision)
        self.carried_out = cache(self._carried_out)
        self.where = cache(self._where)
        self.turned_value = cache(self._turned_value)
        self.turned_txn = cache(self._turned_txn)

    def permit(self, request: int, slot: int) -> Permit:
        return Permit(Kind.MAIN, slot, self.generation(request))

    def generation(self, request: int) -> int:
        """The create revision of its receipt."""
        return GENERATION if self.siblings else GENERATION + request

    def _where(self, slots: tuple[int, ...]) -> tuple[int, ...]:
        """Which slot each request holds, or FREE. Raises ValueError if it holds two."""
        held = [self.request_of[value] for value in slots if value != FREE]
        if len(set(held)) != len(held):
            raise ValueError("a request holds two slots")
        holders = [FREE if value == FREE else self.request_of[value] for value in slots]
        return tuple(holders.index(r) if r in holders else FREE for r in range(len(self.owners)))

    def _seat(self, request: int, slot: int) -> int:
        """Where sessions move, the seat is not the slot's: another may have the slot that one has left."""
        return request if self.moves else slot

    # ---- production decisions

    def _decision(self, op: Op, slot: int, value: int, exit_on_record: bool) -> int | Code | None:
        """The transaction (its id) for `op` on the slot as it stands; None: it is so already."""
        basis = Basis(op, slot, value, exit_on_record)
        if op.name in ("reserve", "void"):
            return self._txn_id(self._tamper(op, self._registered_txn(op, slot)), basis)
        entry = self.entry(value) if value != FREE else None
        if entry is not None and self._blind is not None:
            entry = replace(entry, value=self._blind(op, self.sessions[value]).encode())
        decision = decide(entry, self._command(op, slot, exit_on_record), KEYS, now_us=0)
        if isinstance(decision, Refused):
            return decision.code
        if isinstance(decision, Already):
            return None
        return self._txn_id(self._tamper(op, decision.txn), basis)

    def _command(self, op: Op, slot: int, exit_on_record: bool) -> Command:
        permit = self.permit(op.request, slot)
        match op.name:
            case "connecting":
                return Connecting(permit)
            case "open":
                backend, start = backend_of(int(op.flag)), start_of(op.request, int(op.flag))
                return Open(permit, pid_of(op.request), start, backend)
            case "closing":
                return Closing(permit)
            case "unknown":
                return Unknown(permit, abandoned=op.flag == "abandoned")
            case "mark":
                return MarkOwnerGone(permit)
            case "reassert":
                return Reassert(permit)
            case "relocate":
                head = _founded(self.slots).entries[KEYS.ledger()]
                return Relocate(permit, Kind.MAIN, slot - 1, head.mod_revision)
            case "terminating":
                return Terminating(permit, seen_revision=SLOT)
            case "release":
                return Release(permit, Proof(op.flag), Actor.OWNER)
            case "reap":
                died = EXIT + self.owners[op.request] if exit_on_record else 0
                return Release(permit, Proof(op.flag), Actor.BACKEND_REAPER, seen_revision=SLOT,
                               exit_revision=died)
        raise AssertionError(op.name)

    def _registered_txn(self, op: Op, slot: int) -> Txn:
        """A reservation of this slot or a void, as planned on an empty ledger by a registered owner."""
        free = (FREE,) * self.slots
        keyspace = self.keyspace(Image(free, (0,) * len(self.owners), (1, 1), (0, 0)))
        owner = OWNERS[self.owners[op.request]]
        if op.name == "void":
            return plan_void(f"r{op.request}", Kind.MAIN, keyspace.entries[KEYS.worker(owner)], KEYS)
        wish, limits = ask(f"r{op.request}", owner, seats=10), Limits(self.slots)
        window = window_at(KEYS, Kind.MAIN, self.slots, slot, 0)
        outcome = keyspace.txn(reading(*grounds_reads(wish, KEYS, limits, window)))
        assert isinstance(outcome, Lost)
        seat = self._seat(op.request, slot)
        plan = plan_reservation(wish, grounds_from(outcome.reads, limits, window), KEYS, now_us=0, home=seat)
        assert isinstance(plan, Plan)
        assert (plan.session.slot, plan.session.seat) == (slot, seat)
        return _with_sibling(plan) if self.siblings else plan.txn

    def hopeless(self, txn: int, kind: str) -> bool:
        """It compares the revision of its slot (`session`) or of a registration (`worker`), which is over."""
        return any(each.field is Field.MOD and f"/{kind}/" in each.key for each in self.txns[txn].compares)

    # ---- the reference store

    def _carried_out(self, txn: int, image: Image) -> Image | None:
        """The image after the transaction won; None: it lost."""
        keyspace = self.keyspace(image)
        try:
            outcome = keyspace.txn(self.txns[txn])
        except LeaseGone:
            return None
        if not isinstance(outcome, Won):
            return None
        receipts = []
        for request in range(len(self.owners)):
            entry = keyspace.entries.get(KEYS.receipt(f"r{request}"))
            receipts.append(1 + Receipt.decode(entry.value).voided if entry else 0)
        slots = tuple(self._standing(keyspace, slot) for slot in range(self.slots))
        return image._replace(slots=slots, receipts=tuple(receipts))

    def _standing(self, keyspace: Keyspace, slot: int) -> int:
        entry = keyspace.entries.get(KEYS.session(Kind.MAIN, slot))
        return self._value_id(entry.value) if entry else FREE

    def keyspace(self, image: Image) -> Keyspace:
        """The store that an image stands for."""
        keyspace = _founded(self.slots).clone()
        for owner, name in enumerate(OWNERS):
            lease = register(keyspace, name)
            if image.keys[owner]:
                _stand(keyspace, KEYS.worker(name), WORKER + owner)
            else:
                keyspace.expire(lease)
            if image.exits[owner] == 1:
                record_exit(keyspace, name)
                _stand(keyspace, KEYS.worker_exit(name), EXIT + owner)
        for value in image.slots:
            if value != FREE:
                session, entry = self.sessions[value], self.entry(value)
                seat = KEYS.seat(session.dbname, session.user, session.seat)
                raw = Seat(session.kind, session.slot, session.request_id).encode()
                keyspace.entries |= {entry.key: entry, seat: Entry(seat, raw, SLOT, SLOT)}
        for request, receipt in enumerate(image.receipts):
            if receipt:
                key, made = KEYS.receipt(f"r{request}"), self.generation(request)
                raw = Receipt(Kind.MAIN, 0, voided=receipt == 2).encode()
                keyspace.entries[key] = Entry(key, raw, made, made)
        keyspace.revision = SLOT
        return keyspace

    def entry(self, value: int) -> Entry:
        """The slot's key with this value; one still as reserved has its receipt's revision."""
        raw, created = self._values[value], self.generation(self.request_of[value])
        stored = Session.decode(raw)
        key = KEYS.session(Kind.MAIN, stored.slot)
        return Entry(key, raw, created, SLOT if stored.generation else created)

    def _value_id(self, raw: bytes) -> int:
        known = self._value_ids.get(raw)
        if known is None:
            known = self._value_ids[raw] = len(self._values)
            self._values.append(raw)
            self.request_of.append(int(Session.decode(raw).request_id[1:]))
            self.sessions.append(session_of(self.entry(known)))
        return known

    def _txn_id(self, txn: Txn, basis: Basis) -> int:
        known = self._txn_ids.setdefault(txn, len(self.txns))
        if known == len(self.txns):
            self.txns.append(txn)
            self._bases.append(basis)
        return known

    # ---- the same with slots or owners exchanged

    def _turned_value(self, value: int, turn: Turn) -> int:
        if value == FREE:
            return FREE
        stored = Session.decode(self._values[value])
        request = turn.request(self.request_of[value])
        slot, owner = turn.slot(stored.slot), OWNERS[self.owners[request]]
        moved = replace(
            stored, slot=slot, seat=self._seat(request, slot), owner=owner, request_id=f"r{request}",
            generation=self.generation(request) if stored.generation else 0,
            pid=stored.pid and pid_of(request),
            backend_start_us=stored.backend_start_us
            and stored.backend_start_us + request - self.request_of[value])
        return self._value_id(moved.encode())

    def _turned_txn(self, txn: int, turn: Turn) -> int:
        op, slot, value, exit_on_record = self._bases[txn]
        made = self.decision(op._replace(request=turn.request(op.request)), turn.slot(slot),
                             self.turned_value(value, turn), exit_on_record)
        assert isinstance(made, int)
        assert not isinstance(made, Code)
        return made


def _with_sibling(plan: Plan) -> Txn:
    """The reservation as it is in a batch of both requests."""
    put, *others = plan.txn.puts
    assert put.key == KEYS.session(Kind.MAIN, plan.session.slot)
    session = replace(plan.session, siblings=(1 - plan.session.slot,))
    return replace(plan.txn, puts=(replace(put, value=session.encode()), *others))


@cache
def _founded(slots: int) -> Keyspace:
    return found(slots)


def _stand(keyspace: Keyspace, key: str, revision: int) -> None:
    old = keyspace.entries[key]
    keyspace.entries[key] = Entry(key, old.value, revision, revision, old.lease)
