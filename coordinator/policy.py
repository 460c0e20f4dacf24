"""`dbAdmissionPolicy.v1`: reading, defaults and the checks that need no server. Pure.

Every fault of a document is found at once, each with its path and, where two numbers disagree, both. A
generation is immutable: what is stored is the document as it was given.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import yaml

from coordinator.bounded_yaml import read_yaml
from coordinator.policy_bucket import BUCKET_MODES, BUCKET_PER, Bucket, told
from coordinator.resolved import RESOLVED, Resolved
from coordinator.session_table import DATABASE_BYTES_MAX
from coordinator.yaml_faults import plain, yaml_fault

SCHEMA_NAME = "dbAdmissionPolicy.v1"
FAIRNESS = ("weighted-deficit-v2",)
POOL_MODES = ("transaction", "session", "statement")
SLOTS_MAX = 100_000
FAILOVER_SHARE = 10  # one of so many main slots is kept for a failover, where nothing else is given
_UNITS_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|d)")


class PolicyRefused(ValueError):
    """The document is not a valid policy: `faults` has one line for each, with its path."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


@dataclass(frozen=True, slots=True)
class ExecutionClass:
    """How many tickets of one class execute, and how long the others may wait. Times in seconds."""

    permits: int
    max_queue: int
    queue_deadline_seconds: float
    max_wait_seconds: float
    aging_limit_seconds: float
    wait_budget_p99_seconds: float
    transaction_limit_seconds: float
    max_lend: int
    loan_ttl_seconds: float
    lend_stop_after_seconds: float
    lend_stop_queue: int
    bucket: Bucket | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant's share; `inflight` None: as many as its class has permits."""

    weight: int = 1
    inflight: int | None = None
    bucket: Bucket | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """A valid policy with every default filled in that needs no server; of the others, None.

    Two are equal that were given with the same meaning, whatever became of their defaults.
    """

    database: str
    generation: int
    server_session_permits: int
    admin_reserve: int
    classes: Mapping[str, ExecutionClass]
    fairness: str
    hard_connection_limit: int | None  # None: what the server has, read at publish
    replication_reserve: int
    reserve_permits: int
    failover_permits: int | None  # None: a tenth of the permits where there is a server to fail over to
    other_clients: int
    pool_mode: str
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    resolved: Resolved = field(default=Resolved(), compare=False)

    @property
    def failover_slots(self) -> int:
        """How many of the main slots are kept for a failover."""
        return self.resolved.failover_permits if self.failover_permits is None else self.failover_permits

    def resolve(self, *, can_fail_over: bool, hosts: Iterable[str] = (), role: str = "",
                room: int | None = None) -> Resolved:
        """What its open defaults become now. `room`: sessions that the server has for ordinary roles."""
        kept = self.server_session_permits // FAILOVER_SHARE if can_fail_over else 0
        return Resolved(
            kept if self.failover_permits is None else self.failover_permits,
            room if self.hard_connection_limit is None else self.hard_connection_limit, tuple(hosts), role)

    def for_workers(self) -> dict[str, Any]:
        """What a worker is told of it: the policy's own names."""
        return {
            "generation": self.generation,
            "serverSessionPermits": self.server_session_permits,
            "reservePermits": self.reserve_permits,
            "adminReserve": self.admin_reserve,
            "replicationReserve": self.replication_reserve,
            "failoverPermits": self.failover_slots,
            "poolMode": self.pool_mode,
            "executionClasses": {
                name: {"permits": each.permits, "maxQueue": each.max_queue,
                       "queueDeadlineSeconds": each.queue_deadline_seconds,
                       "maxWaitSeconds": each.max_wait_seconds,
                       "agingLimitSeconds": each.aging_limit_seconds,
                       "transactionLimitSeconds": each.transaction_limit_seconds, **told(each.bucket)}
                for name, each in self.classes.items()
            },
            "tenants": {name: {"weight": each.weight, "inflight": each.inflight, **told(each.bucket)}
                        for name, each in self.tenants.items()},
        }


def encode_policy(document: Mapping[str, Any], resolved: Resolved | None = None) -> bytes:
    """The value under `policy/<db>/gen/<n>`: the document as given, and what became of its defaults."""
    packed: bytes = msgpack.packb({**document, RESOLVED: resolved.encode()} if resolved else dict(document))
    return packed


def decode_document(raw: bytes) -> dict[str, Any]:
    """The document of a stored generation. Raises PolicyRefused for what is not one."""
    return {name: value for name, value in _stored_map(raw).items() if name != RESOLVED}


def decode_policy(raw: bytes) -> Policy:
    """The policy of a stored generation. Raises PolicyRefused for what a newer version wrote."""
    policy = parse_policy(decode_document(raw))
    try:
        return replace(policy, resolved=Resolved.parse(_stored_map(raw).get(RESOLVED) or {}))
    except ValueError as fault:
        raise PolicyRefused([f"{RESOLVED}: {fault}"]) from None


def _stored_map(raw: bytes) -> dict[Any, Any]:
    try:
        document = msgpack.unpackb(raw)
    except ValueError as fault:
        raise PolicyRefused([f"not a stored policy: {str(fault) or 'not a msgpack map'}"]) from None
    if not isinstance(document, dict):
        raise PolicyRefused(["not a map of fields"])
    return document


def load_policy(text: str) -> tuple[Policy, dict[str, Any]]:
    """The policy of a YAML text, and its document. Raises PolicyRefused."""
    try:
        document = read_yaml(text)
    except yaml.YAMLError as fault:
        raise PolicyRefused([f"it is not YAML: {yaml_fault(fault)}"]) from None
    if not isinstance(document, dict):
        raise PolicyRefused(["not a map of fields"])
    return parse_policy(document), document


def parse_duration(text: object) -> float | None:
    """Seconds of `10s`, `100ms`, `5m` (or 0); None when it is not a duration with its unit."""
    if text == 0 and not isinstance(text, bool):
        return 0.0
    found = _DURATION.fullmatch(text) if isinstance(text, str) else None
    return float(found[1]) * _UNITS_SECONDS[found[2]] if found else None


def parse_policy(document: Mapping[str, Any]) -> Policy:
    """The policy of a document. Raises PolicyRefused with every fault."""
    reader = _Fields("", document, [])
    policy = _read_policy(reader)
    if not reader.faults:
        reader.faults.extend(_contradictions(policy))
    if reader.faults:
        raise PolicyRefused(reader.faults)
    return policy


def _read_policy(reader: _Fields) -> Policy:
    reader.choice("schema", (SCHEMA_NAME,))
    slots = reader.integer("serverSessionPermits", 1, SLOTS_MAX)
    failover = reader.integer("failoverPermits", 0, SLOTS_MAX, -1)
    policy = Policy(
        database=reader.text("database", DATABASE_BYTES_MAX),
        generation=reader.integer("generation", 1, 2**31),
        server_session_permits=slots,
        admin_reserve=reader.integer("adminReserve", 0, SLOTS_MAX),
        classes={each.last: _read_class(each) for each in reader.maps("executionClasses", required=True)},
        fairness=reader.choice("fairness", FAIRNESS),
        hard_connection_limit=reader.integer("hardConnectionLimit", 1, SLOTS_MAX, 0) or None,
        replication_reserve=reader.integer("replicationReserve", 0, SLOTS_MAX, 0),
        reserve_permits=reader.integer("reservePermits", 0, SLOTS_MAX, 0),
        failover_permits=None if failover < 0 else failover,
        other_clients=reader.integer("otherClients", 0, SLOTS_MAX, 0),
        pool_mode=reader.choice("poolMode", POOL_MODES, "transaction"),
        tenants={each.last: _read_tenant(each) for each in reader.maps("tenants")},
    )
    reader.close()
    return policy


def _read_class(reader: _Fields) -> ExecutionClass:
    permits = reader.integer("permits", 1, SLOTS_MAX)
    deadline = reader.duration("queueDeadline", 10.0)
    wait = reader.duration("maxWait", deadline)
    found = ExecutionClass(
        permits=permits,
        max_queue=reader.integer("maxQueue", 0, 10_000_000),
        queue_deadline_seconds=deadline,
        max_wait_seconds=wait,
        aging_limit_seconds=reader.duration("agingLimit", wait / 2),
        wait_budget_p99_seconds=reader.duration("waitBudgetP99", 0.1),
        transaction_limit_seconds=reader.duration("transactionLimit", 300.0),
        max_lend=reader.integer("maxLend", 0, SLOTS_MAX, permits // 2),
        loan_ttl_seconds=reader.duration("loanTtl", 5.0),
        lend_stop_after_seconds=reader.duration("lendStopAfter", 0.02),
        lend_stop_queue=reader.integer("lendStopQueue", 0, 10_000_000, 1),
        bucket=_read_bucket(reader),
    )
    reader.close()
    return found


def _read_tenant(reader: _Fields) -> Tenant:
    found = Tenant(
        weight=reader.integer("weight", 1, 1_000_000, 1),
        inflight=reader.integer("inflight", 1, SLOTS_MAX, 0) or None,
        bucket=_read_bucket(reader),
    )
    reader.close()
    return found


def _read_bucket(parent: _Fields) -> Bucket | None:
    reader = parent.map("bucket")
    if reader is None:
        return None
    found = Bucket(
        rate=reader.number("rate"), burst=reader.number("burst"), cost=reader.number("cost", 1.0),
        mode=reader.choice("mode", BUCKET_MODES, "delay"),
        per=reader.choice("per", BUCKET_PER, "transaction"),
        start_full=reader.flag("startFull", default=True),
    )
    reader.close()
    return found


def _contradictions(policy: Policy) -> list[str]:
    """Where two numbers of a well-formed document disagree: both are named."""
    faults = []
    slots, permits = policy.server_session_permits, sum(c.permits for c in policy.classes.values())
    if permits > slots:
        faults.append(f"executionClasses: {permits} permits over all classes, "
                      f"but serverSessionPermits is {slots}")
    wanted = slots + policy.reserve_permits + policy.admin_reserve + policy.other_clients
    if policy.hard_connection_limit is not None and wanted > policy.hard_connection_limit:
        faults.append(f"serverSessionPermits + reservePermits + adminReserve + otherClients is {wanted}, "
                      f"but hardConnectionLimit is {policy.hard_connection_limit}")
    if (policy.failover_permits or 0) > slots:
        faults.append(f"failoverPermits is {policy.failover_permits}, but serverSessionPermits is {slots}")
    for name, each in policy.classes.items():
        if each.max_lend > each.permits:
            faults.append(f"executionClasses.{name}.maxLend is {each.max_lend}, "
                          f"but its permits are {each.permits}")
    for name, tenant in policy.tenants.items():
        most = max((each.permits for each in policy.classes.values()), default=0)
        if tenant.inflight is not None and tenant.inflight > most:
            faults.append(f"tenants.{name}.inflight is {tenant.inflight}, "
                          f"but the largest class has {most} permits")
    return faults


class _Fields:
    """One map of the document: reads each field, notes what is wrong and goes on with a stand-in."""

    def __init__(self, path: str, values: Mapping[str, Any], faults: list[str], last: str = "") -> None:
        self._path = path
        self.last = last  # its own name in the map around it: one with dots in it is no path
        self._values = values
        self._known: list[str] = []
        self.faults = faults

    def _at(self, name: str) -> str:
        return f"{self._path}.{plain(name)}" if self._path else plain(name)

    def _fault(self, name: str, what: str) -> None:
        self.faults.append(f"{self._at(name)}: {what}")

    def _take(self, name: str, default: Any) -> Any:
        self._known.append(name)
        value = self._values.get(name)
        if value is None and default is None:
            self._fault(name, "is missing")
        return default if value is None else value

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self._take(name, default)
        if value is None or (value == default and name not in self._values):
            return low if default is None else default
        if isinstance(value, bool) or not isinstance(value, int):
            self._fault(name, f"{value!r} is not a whole number")
        elif not low <= value <= high:
            self._fault(name, f"{value} is not between {low} and {high}")
        else:
            return value
        return low

    def number(self, name: str, default: float | None = None) -> float:
        value = self._take(name, default)
        if value is None:
            return 1.0
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            self._fault(name, f"{value!r} is not a number above 0")
            return 1.0
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._take(name, default)
        if not isinstance(value, bool):
            self._fault(name, f"{value!r} is not true or false")
        return value is True

    def duration(self, name: str, default: float) -> float:
        value = self._take(name, "")
        if value == "":
            return default
        seconds = parse_duration(value)
        if seconds is None:
            self._fault(name, f"{value!r} is not a duration with its unit (100ms, 10s, 5m)")
        return default if seconds is None else seconds

    def text(self, name: str, bytes_max: int) -> str:
        value = self._take(name, None)
        if value is not None and (not isinstance(value, str) or not value):
            self._fault(name, f"{value!r} is not a name")
        elif value is not None and len(value.encode(errors="replace")) > bytes_max:
            self._fault(name, f"{value[:20]!r}… is longer than {bytes_max} bytes")
        return value if isinstance(value, str) else ""

    def choice(self, name: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        value = self._take(name, default)
        if value is not None and value not in allowed:
            self._fault(name, f"{value!r} is not one of {', '.join(allowed)}")
        return value if value in allowed else allowed[0]

    def map(self, name: str) -> _Fields | None:
        value = self._take(name, "")
        if value == "":
            return None
        if not isinstance(value, dict):
            self._fault(name, "is not a map of fields")
            return None
        return _Fields(self._at(name), value, self.faults, name)

    def maps(self, name: str, *, required: bool = False) -> list[_Fields]:
        """The maps by name under `name`."""
        values = self.map(name)
        if values is None or not values._values:
            if required:
                self._fault(name, "needs at least one entry")
            return []
        return [each for key, value in values._values.items()
                if (each := values._named(str(key), value)) is not None]

    def _named(self, name: str, value: Any) -> _Fields | None:
        if not isinstance(value, dict):
            self._fault(name, "is not a map of fields")
            return None
        return _Fields(self._at(name), value, self.faults, name)

    def close(self) -> None:
        """Names what is not a field of this map, with the nearest that is."""
        for name in self._values:
            if name not in self._known:
                near = difflib.get_close_matches(str(name), self._known, 1)
                self._fault(str(name), "is not a field" + (f"; did you mean {near[0]}?" if near else ""))
