"""What one worker knows of itself at one moment: the one source of tests, /metrics and SHOW.

The worker fills these; nothing else keeps a second count. Units are in the names; times of the clock are Unix
time in microseconds. The module `rows` turns them into what a SHOW prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """Counts per bucket, not cumulative; the last is for what exceeds every bound."""

    bounds_seconds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    sum_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counters of work done, since the start or over a period."""

    server_assignments: int = 0
    transactions: int = 0
    queries: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    transaction_us: int = 0
    query_us: int = 0
    wait_us: int = 0
    client_parses: int = 0
    server_parses: int = 0
    binds: int = 0
    client_logins: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __sub__(self, other: Totals) -> Totals:
        return Totals(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """One pool: a database as one user. Counts of now, and counters since the worker's start."""

    database: str
    user: str
    pool_mode: str
    clients_active: int = 0
    clients_waiting: int = 0
    clients_idle: int = 0
    clients_pinned: int = 0
    cancels_active: int = 0
    cancels_waiting: int = 0
    sessions_active: int = 0
    sessions_cancelling: int = 0
    sessions_being_canceled: int = 0
    sessions_idle: int = 0
    sessions_used: int = 0
    sessions_tested: int = 0
    sessions_opening: int = 0
    sessions_closing: int = 0
    longest_wait_us: int = 0
    size_max: int = 0
    paused: bool = False
    load_balance_hosts: str | None = None
    totals: Totals = Totals()
    errors: int = 0
    sessions_opened: int = 0
    sessions_closed: int = 0
    sessions_lost: int = 0
    residues: Mapping[str, int] = field(default_factory=dict)
    scaling: Mapping[str, int] = field(default_factory=dict)  # see gate.ScalingCounts
    waits: HistogramValue = HistogramValue()
    transaction_times: HistogramValue = HistogramValue()


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketRow:
    """What CLIENTS and SERVERS have in common."""

    user: str
    database: str
    state: str
    address: str
    port: int
    local_address: str
    local_port: int
    connected_at_us: int
    requested_at_us: int | None = None
    wait_us: int = 0
    close_needed: bool = False
    pointer: str = ""
    link: str = ""
    remote_pid: int = 0
    tls: str = ""
    replication: str = "none"
    application_name: str | None = None
    prepared_statements: int = 0
    id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRow(SocketRow):
    """One client. States: active, idle, waiting, active_cancel_req, waiting_cancel_req."""

    tenant: str = ""
    class_name: str = ""
    service: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRow(SocketRow):
    """One session. States: active, idle, used, tested, new, active_cancel, being_canceled."""

    permit: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseRow:
    """One configured database and what of it is in use in this worker."""

    name: str
    host: str | None
    port: int
    database: str
    force_user: str | None = None
    pool_size: int = 0
    min_pool_size: int = 0
    reserve_pool_size: int = 0
    server_lifetime_seconds: int | None = None
    pool_mode: str | None = None
    load_balance_hosts: str | None = None
    max_connections: int = 0
    current_connections: int = 0
    max_client_connections: int = 0
    current_client_connections: int = 0
    paused: bool = False
    disabled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UserRow:
    """One user known to this worker."""

    name: str
    pool_size: int | None = None
    reserve_pool_size: int | None = None
    pool_mode: str | None = None
    max_user_connections: int = 0
    current_connections: int = 0
    max_user_client_connections: int = 0
    current_client_connections: int = 0


@dataclass(frozen=True, slots=True)
class StatsRow:
    """Work done for one database: since the start, and in the last whole period."""

    database: str
    totals: Totals
    period: Totals
    period_seconds: float


@dataclass(frozen=True, slots=True)
class ConfigRow:
    """One effective setting. `source`: default, file or runtime."""

    key: str
    value: str | None
    default: str | None
    changeable: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatistics:
    """One worker at one moment."""

    worker: str
    version: str
    started_at_us: int
    state: str = "active"  # active, paused, draining
    pools: tuple[PoolStatistics, ...] = ()
    stats: tuple[StatsRow, ...] = ()
    clients_max: int = 0
    logins_open: int = 0
    logins_refused: Mapping[str, int] = field(default_factory=dict)
    prepared_statements: int = 0
    prepared_text_bytes: int = 0
    link_up: bool = True
    links_lost: int = 0
    ledger_reachable: Mapping[str, bool] = field(default_factory=dict)
    epochs: Mapping[str, int] = field(default_factory=dict)
    policy_generations: Mapping[str, int] = field(default_factory=dict)
    permits: Mapping[str, int] = field(default_factory=dict)  # by state
    permits_granted: int = 0
    permits_refused: Mapping[str, int] = field(default_factory=dict)  # by reason
    permits_gone: int = 0
    permits_unknown: int = 0
    tenants_admitted_cost: Mapping[tuple[str, str], float] = field(default_factory=dict)  # (ledger, tenant)
    tenants_refused_cost: Mapping[tuple[str, str], float] = field(default_factory=dict)
