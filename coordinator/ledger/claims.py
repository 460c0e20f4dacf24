"""Whose a session at a server is when several ledgers of one fleet have sessions there. Pure.

A session is a ledger's by a permit that names its server process, by the word of a living worker, or by the
birth tag it bears. A worker's word is kept in etcd from when it is asked for its sessions, for a ledger that
was lost has no permits. What nobody claims is whoever's finds it first: then it has a permit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, ClassVar
from urllib.parse import unquote

from coordinator.ledger.keys import FleetKeys, prefix_end
from coordinator.ledger.proofs import Row
from coordinator.ledger.reading import read_or_none
from coordinator.ledger.record import LedgerHead, Record, Session
from coordinator.ledger.snapshot import reading
from coordinator.ledger.states import SessionState
from coordinator.store.api import Entry, Txn

Process = tuple[int, int]  # pid and backend_start in µs: as nothing else was or will be


@dataclass(frozen=True, slots=True)
class Told(Record):
    """`claim/<boot id>`, on the worker's lease: the server processes it holds, by ledger."""

    name: ClassVar[str] = "claim"

    boot_id: str
    processes: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Claims:
    """What one or several ledgers say is theirs.

    `firm` are the processes that somebody holds or held, and not only such as a rebuild found at the server;
    `births` is how the names of sessions begin that are born under their permits.
    """

    processes: frozenset[Process] = frozenset()
    firm: frozenset[Process] = frozenset()
    births: tuple[str, ...] = ()

    def __or__(self, other: Claims) -> Claims:
        return Claims(self.processes | other.processes, self.firm | other.firm, self.births + other.births)

    def has(self, row: Row) -> bool:
        """Whether this session is theirs."""
        known = row.backend_start_us is not None and (row.pid, row.backend_start_us) in self.processes
        return known or row.application_name.startswith(self.births)


NO_CLAIMS = Claims()


@dataclass(frozen=True, slots=True)
class FleetClaims:
    """The claims of every ledger of a fleet. `unread`: records that cannot be read and may claim more."""

    by_ledger: Mapping[str, Claims] = field(default_factory=dict)
    unread: int = 0

    def besides(self, *ledgers: str) -> Claims:
        """Those of all other ledgers."""
        return reduce(Claims.__or__, (
            claims for db, claims in self.by_ledger.items() if db not in ledgers), NO_CLAIMS)


def claims_txn(fleet: FleetKeys) -> Txn:
    """Reads what `claims_from` takes, at one revision."""
    return reading(*((prefix, prefix_end(prefix))
                     for prefix in (fleet.ledgers(), fleet.every_session(), fleet.claims())))


def claims_from(reads: Sequence[Sequence[Entry]], fleet: FleetKeys) -> FleetClaims:
    """Out of the answers to `claims_txn`. What cannot be read is counted: it is no reason to refuse all."""
    heads, sessions, tolds = reads
    found: dict[str, Claims] = defaultdict(Claims)
    unread = 0
    for entry in heads:
        head = read_or_none(LedgerHead, entry)
        found[unquote(entry.key.removeprefix(fleet.ledgers()))] |= _born_under(head)
    held: dict[str, list[Session]] = defaultdict(list)
    for entry in sessions:
        session = read_or_none(Session, entry)
        unread += session is None
        db = unquote(entry.key.removeprefix(fleet.every_session()).partition("/")[0])
        held[db] += [session] if session is not None and session.pid else []
    for db, those in held.items():
        found[db] |= _held_by(those)
    for entry in tolds:
        told = read_or_none(Told, entry)
        unread += told is None
        for db, processes in told.processes.items() if told is not None else ():
            living = frozenset((pid, start) for pid, start in processes)
            found[db] |= Claims(living, living)
    return FleetClaims(dict(found), unread)


def _born_under(head: LedgerHead | None) -> Claims:
    tags = (head.tag, head.tag_before) if head is not None else ()
    return Claims(births=tuple(f"pooler:{tag}:" for tag in tags if tag))


def _held_by(sessions: Iterable[Session]) -> Claims:
    firm = {(each.pid, each.backend_start_us): each.state is not SessionState.UNKNOWN or bool(each.owner)
            for each in sessions}
    return Claims(frozenset(firm), frozenset(process for process, is_firm in firm.items() if is_firm))


def told_of(heard: Mapping[str, Iterable[Mapping[str, Any]]], boot_id: str) -> Told:
    """The record of what a worker answered to `recover`, by ledger."""
    return Told(boot_id, {
        db: tuple((each["pid"], each["backend_start_us"]) for each in sessions)
        for db, sessions in heard.items()})
