"""The values under the ledger's keys, and the permit's identity.

Pure: msgpack maps with a `schema` field; fields this version does not know are kept when a value is
written back; a schema it does not know is refused. Times are integers in microseconds since 1970, as the
server itself reports them, so that they compare exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, ClassVar, Self

import msgpack

from coordinator.ledger.states import SessionState
from coordinator.ledger.stored_types import Shape, read_fields, shape_of

SCHEMA = 1
COMMAND_INDEX = -1  # of the `worker/` key of a command: it has permits of kind admin and no sessions to drain


class UnknownSchema(ValueError):
    """A value was written by a version this one cannot read: upgrade before going on.

    A ValueError, as of a value that is damaged: who can do without the one can do without the other.
    """


class Kind(StrEnum):
    """Which row of slots a permit belongs to."""

    MAIN = "main"
    RESERVE = "reserve"
    ADMIN = "admin"
    REPLICATION = "replication"


@dataclass(frozen=True, slots=True, order=True)
class Permit:
    """A permit's identity. `generation` is the create revision of its receipt: new for every reservation."""

    kind: Kind
    slot: int
    generation: int

    def __str__(self) -> str:
        return f"{self.kind}/{self.slot}.{self.generation}"

    @classmethod
    def parse(cls, text: str) -> Permit:
        """The inverse of str(). Raises ValueError naming the text."""
        kind, _, rest = text.partition("/")
        slot, _, generation = rest.partition(".")
        try:
            return cls(Kind(kind), int(slot), int(generation))
        except ValueError:
            raise ValueError(f"{text!r} is not a permit (kind/slot.generation)") from None

    def birth_tag(self, ledger_tag: str) -> str:
        """The application_name of the startup packet: at most 45 bytes (PostgreSQL cuts at 63)."""
        return f"pooler:{ledger_tag}:{self.kind[0]}{self.slot}.{self.generation}"


@dataclass(frozen=True, slots=True)
class Backend:
    """Which server process tree a session belongs to: what must match before a look counts."""

    address: str  # host:port as dialled
    system_identifier: str = ""
    timeline: int = 0
    postmaster_start_us: int = 0
    in_recovery: bool = False

    def same_server(self, other: Backend) -> bool:
        """Same node, same cluster, same postmaster."""
        return (self.address, self.system_identifier, self.postmaster_start_us) == (
            other.address, other.system_identifier, other.postmaster_start_us)


@dataclass(frozen=True, slots=True)
class Record:
    """Base of every stored value: subclasses add fields; `extra` carries what a newer version wrote."""

    name: ClassVar[str]

    def encode(self) -> bytes:
        """The msgpack map, with schema."""
        values: dict[str, Any] = dict(getattr(self, "extra", {}))
        for name in _shape(type(self)):
            values[name] = _plain(getattr(self, name))
        values["schema"] = SCHEMA
        packed: bytes = msgpack.packb(values)
        return packed

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Raises UnknownSchema for a newer schema; ValueError (only that) for what is not this record."""
        try:
            values = msgpack.unpackb(raw)
        except ValueError as fault:
            raise ValueError(f"not a {cls.name} record: {str(fault) or 'not a msgpack map'}") from None
        if not isinstance(values, dict) or type(values.get("schema")) is not int:
            raise ValueError(f"not a {cls.name} record: not a msgpack map with its schema")
        if values["schema"] > SCHEMA:
            raise UnknownSchema(f"{cls.name}: schema {values['schema']}, this version reads {SCHEMA}")
        known = _shape(cls)
        try:
            taken = read_fields(known, values)
            if hasattr(cls, "extra"):
                taken["extra"] = {k: v for k, v in values.items() if k not in known and k != "schema"}
            record = cls(**taken)
            record.check()
            return record
        except (ValueError, TypeError) as fault:  # a TypeError: a field is missing
            raise ValueError(f"not a {cls.name} record: {fault}") from None

    def check(self) -> None:
        """Raises ValueError for values that no record of this kind has, though each is of its type."""


_SHAPES: dict[type[Record], Shape] = {}


def _shape(record: type[Record]) -> Shape:
    """Its fields but `extra`, in their order."""
    shape = _SHAPES.get(record)
    if shape is None:
        shape = _SHAPES[record] = shape_of(record, frozenset({"extra"}))
    return shape


_AS_THEY_ARE = frozenset({int, str, bool, float, bytes, type(None)})


def pool_name(dbname: str, pool: str) -> str:
    """The first half of a pool's name in the ledger; the user is the other."""
    return f"{dbname}/{pool}" if pool else dbname


def _plain(value: Any) -> Any:
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, Backend):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, StrEnum):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def backend_from(values: Mapping[str, Any] | None) -> Backend | None:
    """A Backend from its stored map; unknown fields are dropped (the map is always written whole)."""
    if values is None:
        return None
    known = {f.name for f in fields(Backend)}
    return Backend(**{key: value for key, value in values.items() if key in known})


@dataclass(frozen=True, slots=True)
class Session(Record):
    """One session permit: the value under `session/<db>/<kind>/<slot>`."""

    name: ClassVar[str] = "session"

    kind: Kind
    slot: int
    generation: int  # as the reserving txn writes it, 0 or the negative base: see rules.session_of
    state: SessionState
    owner: str  # boot id of the worker
    host: str
    dbname: str
    user: str
    seat: int  # the pool's own numbered seat, deleted with the slot; -1: none (admin)
    request_id: str
    epoch: int
    policy_generation: int
    backend: Backend | None = None
    pid: int = 0
    backend_start_us: int = 0
    abandoned: bool = False
    terminating: bool = False
    ticket: str = ""
    tenant: str = ""  # of that ticket, where its worker's table told
    state_since_us: int = 0  # shown, never compared
    machine: str = ""  # of its owner, and which start of that machine: a later one proves the owner dead
    kernel_boot: str = ""
    pool: str = ""  # whose seats it has one of, where several pools have sessions of one role in one database
    left_slots: tuple[str, ...] = ()  # where it stood before it was moved to this one, in order, as kind/slot
    siblings: tuple[int, ...] = ()  # slots of its kind that were granted with it, under the same generation
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def seats_of(self) -> str:
        """With the user: whose seats it has one of."""
        return pool_name(self.dbname, self.pool)

    @property
    def permit(self) -> Permit:
        """The identity of this permit."""
        return Permit(self.kind, self.slot, self.generation)

    @property
    def former_permits(self) -> tuple[Permit, ...]:
        """Those it had before it was moved to this slot, in order: its worker may still know it by any."""
        slots = (each.partition("/") for each in self.left_slots)
        return tuple(Permit(Kind(kind), int(slot), self.generation) for kind, _, slot in slots)

    def check(self) -> None:
        """See Record.check."""
        if self.left_slots:
            _ = self.former_permits

    def moved(self, state: SessionState, now_us: int, **changes: Any) -> Session:
        """A copy in another state."""
        return replace(self, state=state, state_since_us=now_us, **changes)


@dataclass(frozen=True, slots=True)
class Receipt(Record):
    """What was answered to a reservation: granted (with its slot) or voided."""

    name: ClassVar[str] = "receipt"

    kind: Kind
    slot: int
    voided: bool = False
    base: int = 0  # LedgerHead.generation_base: added to the create revision
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)



@dataclass(frozen=True, slots=True)
class Seat(Record):
    """One of a pool's own numbered seats: which slot sits in it."""

    name: ClassVar[str] = "seat"

    kind: Kind
    slot: int
    request_id: str
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)



@dataclass(frozen=True, slots=True)
class Worker(Record):
    """A live worker: `worker/<boot id>`, on the worker's lease."""

    name: ClassVar[str] = "worker"

    boot_id: str
    index: int
    ordinal: int
    host: str
    machine_id: str
    kernel_boot_id: str
    pid: int
    pid_start: int  # clock ticks since boot, /proc/<pid>/stat field 22
    cancel_address: str = ""
    schemas: tuple[int, ...] = (SCHEMA,)
    epochs: Mapping[str, int] = field(default_factory=dict)  # last epoch acknowledged, by database
    recovered: Mapping[str, str] = field(default_factory=dict)  # incarnation that has its sessions
    shares: bool = False  # it keeps to its shares of execution permits
    registered: int = 0  # rises when a worker re-puts its key: fails every older reservation still in a pipe
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)



@dataclass(frozen=True, slots=True)
class WorkerExit(Record):
    """`worker-exit/<boot id>`: its process was seen to end."""

    name: ClassVar[str] = "worker-exit"

    boot_id: str
    how: str  # "exit code 0", "signal 9"
    seen_by: str
    at_us: int
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)


class LedgerState(StrEnum):
    RECOVERING = "RECOVERING"
    ACTIVE = "ACTIVE"


@dataclass(frozen=True, slots=True)
class LedgerHead(Record):
    """`ledger/<db>`: which incarnation of the ledger this is."""

    name: ClassVar[str] = "ledger"

    incarnation: str
    state: LedgerState
    tag: str  # 8 characters, in every birth tag
    rebuilt: str = ""  # of a ledger that took a lost one's place: the `operator/` entry, ordered by time
    tag_before: str = ""  # what was reserved and not opened in that one was to be born under it
    generation_base: int = 0  # above every generation of that one: etcd's revisions may come again
    frozen: str = ""  # who forbade that it grows, until it is thawed
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)



class EpochState(StrEnum):
    ACTIVE = "ACTIVE"
    DRAINING = "DRAINING"


@dataclass(frozen=True, slots=True)
class Epoch(Record):
    """`epoch/<db>`: which backend the sessions of now belong to."""

    name: ClassVar[str] = "epoch"

    number: int
    state: EpochState
    backend: Backend
    since_us: int
    reason: str
    drain_timeout_seconds: float = 0.0  # while DRAINING: after this the busy sessions are cancelled
    target: Backend | None = None  # while DRAINING: which server the command promotes
    promotes: bool = False  # while DRAINING: the promotion of `target` was or is about to be ordered
    failover: bool = False  # its predecessor may have sessions yet that no proof ended: see failoverPermits
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)



@dataclass(frozen=True, slots=True)
class Alias(Record):
    """`policy/<db>/alias`: which policy generations grant.

    `shadow` decides beside the active one, and grants `takeover_fraction` of the requests itself. `previous`
    was active before. Under `withdrawn` nothing is granted any more, and its sessions are given up; if that
    is the active one, `previous` grants meanwhile. 0: none.
    """

    name: ClassVar[str] = "alias"

    active: int
    shadow: int = 0
    takeover_fraction: float = 0.0
    previous: int = 0
    withdrawn: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def granting(self) -> int:
        """The generation that grants whatever no takeover takes; 0: none."""
        return self.previous if self.active and self.active == self.withdrawn else self.active

    @property
    def taking_over(self) -> int:
        """The generation that grants a fraction of the requests beside that one; 0: none."""
        return self.shadow if self.takeover_fraction > 0 and self.shadow != self.withdrawn else 0

