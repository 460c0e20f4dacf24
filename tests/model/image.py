"""The ledger's part of a model state, and the production code run on it.

A model state holds an *image*: small values that stand for what is in the store. Every write is a transaction
made by the production `decide` / `plan_reservation`, carried out by the reference Keyspace built from the
image, and read back. Revisions are canonical: all that ever matters is whether a remembered one still stands,
so a key that stands has one fixed revision, and a write that compares a revision which is over is hopeless.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from coordinator.ledger.record import Backend, Kind, Permit, Receipt, Seat, Session
from coordinator.ledger.reservation import (
    Limits,
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
SLOT_KEY = KEYS.session(Kind.MAIN, 0)


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
    """What is in the store: the slot's value (an id), receipts, worker keys and exit records."""

    slot: int
    receipts: tuple[int, ...]  # per request: 0 none, 1 granted, 2 voided
    keys: tuple[int, ...]  # per owner: 1 registered
    exits: tuple[int, ...]  # per owner: 0 not yet, 1 on record, 2 removed


class Op(NamedTuple):
    """One write: what, of which request, with which proof or flag."""

    name: str
    request: int
    flag: str = ""


Tamper = Callable[[Op, Txn], Txn]  # what a mutant does to a transaction
Blind = Callable[[Op, Session], Session]  # what a mutant takes a session for before it decides


class Production:
    """The production code's answers on images, remembered: they are pure.

    `owners[r]` is the owner of request r.
    """

    def __init__(
        self, owners: tuple[int, ...], tamper: Tamper | None = None, blind: Blind | None = None
    ) -> None:
        self.owners = owners
        self._tamper = tamper or (lambda op, txn: txn)
        self._blind = blind
        self._values: list[bytes] = []
        self._value_ids: dict[bytes, int] = {}
        self.sessions: list[Session] = []  # by value id
        self.request_of: list[int] = []  # by value id
        self.txns: list[Txn] = []
        self._txn_ids: dict[Txn, int] = {}
        self.decision = cache(self._decision)
        self.carried_out = cache(self._carried_out)

    def permit(self, request: int) -> Permit:
        return Permit(Kind.MAIN, 0, GENERATION + request)

    # ---- production decisions

    def _decision(self, op: Op, slot: int, exit_on_record: bool) -> int | Code | None:
        """The transaction (its id) for `op` on the slot as it stands; None: it is so already."""
        if op.name in ("reserve", "void"):
            return self._txn_id(self._tamper(op, self._registered_txn(op)))
        entry = self.entry(slot) if slot != FREE else None
        if entry is not None and self._blind is not None:
            entry = replace(entry, value=self._blind(op, self.sessions[slot]).encode())
        decision = decide(entry, self._command(op, exit_on_record), KEYS, now_us=0)
        if isinstance(decision, Refused):
            return decision.code
        return None if isinstance(decision, Already) else self._txn_id(self._tamper(op, decision.txn))

    def _command(self, op: Op, exit_on_record: bool) -> Command:
        permit = self.permit(op.request)
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
            case "terminating":
                return Terminating(permit, seen_revision=SLOT)
            case "release":
                return Release(permit, Proof(op.flag), Actor.OWNER)
            case "reap":
                died = EXIT + self.owners[op.request] if exit_on_record else 0
                return Release(permit, Proof(op.flag), Actor.BACKEND_REAPER, seen_revision=SLOT,
                               exit_revision=died)
        raise AssertionError(op.name)

    def _registered_txn(self, op: Op) -> Txn:
        """A reservation or a void, as planned on an empty ledger by a registered owner."""
        keyspace = self.keyspace(Image(FREE, (0,) * len(self.owners), (1, 1), (0, 0)))
        owner = OWNERS[self.owners[op.request]]
        if op.name == "void":
            return plan_void(f"r{op.request}", Kind.MAIN, keyspace.entries[KEYS.worker(owner)], KEYS)
        wish, limits = ask(f"r{op.request}", owner, seats=10), Limits(1)
        window = window_at(KEYS, Kind.MAIN, 1, 0, 0)
        outcome = keyspace.txn(reading(*grounds_reads(wish, KEYS, limits, window)))
        assert isinstance(outcome, Lost)
        plan = plan_reservation(wish, grounds_from(outcome.reads, limits, window), KEYS, now_us=0)
        assert isinstance(plan, Plan)
        return plan.txn

    def hopeless(self, txn: int, kind: str) -> bool:
        """It compares the revision of the slot (`session`) or of a registration (`worker`), which is over."""
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
        slot = keyspace.entries.get(SLOT_KEY)
        receipts = []
        for request in range(len(self.owners)):
            entry = keyspace.entries.get(KEYS.receipt(f"r{request}"))
            receipts.append(1 + Receipt.decode(entry.value).voided if entry else 0)
        return image._replace(
            slot=self._value_id(slot.value) if slot else FREE, receipts=tuple(receipts))

    def keyspace(self, image: Image) -> Keyspace:
        """The store that an image stands for."""
        keyspace = found(1)
        for owner, name in enumerate(OWNERS):
            lease = register(keyspace, name)
            if image.keys[owner]:
                _stand(keyspace, KEYS.worker(name), WORKER + owner)
            else:
                keyspace.expire(lease)
            if image.exits[owner] == 1:
                record_exit(keyspace, name)
                _stand(keyspace, KEYS.worker_exit(name), EXIT + owner)
        if image.slot != FREE:
            session, entry = self.sessions[image.slot], self.entry(image.slot)
            seat = KEYS.seat(session.dbname, session.user, session.seat)
            raw = Seat(session.kind, 0, session.request_id).encode()
            keyspace.entries |= {SLOT_KEY: entry, seat: Entry(seat, raw, SLOT, SLOT)}
        for request, receipt in enumerate(image.receipts):
            if receipt:
                key, made = KEYS.receipt(f"r{request}"), GENERATION + request
                raw = Receipt(Kind.MAIN, 0, voided=receipt == 2).encode()
                keyspace.entries[key] = Entry(key, raw, made, made)
        keyspace.revision = SLOT
        return keyspace

    def entry(self, value: int) -> Entry:
        """The slot's key with this value; one still as reserved has its receipt's revision."""
        raw, created = self._values[value], GENERATION + self.request_of[value]
        written = Session.decode(raw).generation != 0
        return Entry(SLOT_KEY, raw, created, SLOT if written else created)

    def _value_id(self, raw: bytes) -> int:
        known = self._value_ids.get(raw)
        if known is None:
            known = self._value_ids[raw] = len(self._values)
            self._values.append(raw)
            self.request_of.append(int(Session.decode(raw).request_id[1:]))
            self.sessions.append(session_of(self.entry(known)))
        return known

    def _txn_id(self, txn: Txn) -> int:
        known = self._txn_ids.setdefault(txn, len(self.txns))
        if known == len(self.txns):
            self.txns.append(txn)
        return known


def _stand(keyspace: Keyspace, key: str, revision: int) -> None:
    old = keyspace.entries[key]
    keyspace.entries[key] = Entry(key, old.value, revision, revision, old.lease)
