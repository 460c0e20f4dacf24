"""Metrics in Prometheus' text format, made at the scrape from one snapshot; the hot path counts plain ints.

Names are `pooler_<noun>_<unit>`. Labels come from the configuration (database, user) or from fixed words,
never from what a client sends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from pooler.observe.snapshot import HistogramValue, PoolStatistics, WorkerStatistics

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
BOUNDS_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip


class Histogram:
    """Counts per bucket of a duration, and their sum."""

    __slots__ = ("bounds", "counts", "sum_seconds")

    def __init__(self, bounds: tuple[float, ...] = BOUNDS_SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum_seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration; a bound belongs to its own bucket (`le`)."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum_seconds += seconds

    @property
    def count(self) -> int:
        """How many were observed."""
        return sum(self.counts)

    def value(self) -> HistogramValue:
        """What was counted so far."""
        return HistogramValue(self.bounds, tuple(self.counts), self.sum_seconds)


class WorkerCollector(Collector):
    """Asks for a snapshot at each scrape."""

    def __init__(self, statistics: Callable[[], WorkerStatistics]) -> None:
        self._statistics = statistics

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: a scrape must not happen at registration."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Every metric of the worker."""
        worker = self._statistics()
        yield from _pool_gauges(worker.pools)
        yield from _pool_counters(worker.pools)
        yield from _pool_scaling(worker.pools)
        yield _histogram("wait", "Time that granted tickets had waited.", worker.pools, lambda p: p.waits)
        yield _histogram(
            "transaction", "Length of transactions.", worker.pools, lambda p: p.transaction_times
        )
        yield from _worker_metrics(worker)


class WorkerMetrics:
    """The page of one worker, with what the operating system knows of its process."""

    def __init__(self, statistics: Callable[[], WorkerStatistics]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(WorkerCollector(statistics))
        ProcessCollector(namespace="pooler", registry=self._registry)

    def render(self) -> bytes:
        """The page."""
        page: bytes = generate_latest(self._registry)
        return page


_POOL = ("database", "user")
_CLIENT_STATES = ("active", "waiting", "idle")
_SESSION_STATES = (
    "active", "idle", "used", "tested", "opening", "closing", "cancelling", "being_canceled"
)  # fmt: skip


def _pool_gauges(pools: Iterable[PoolStatistics]) -> Iterator[Metric]:
    by_state = (*_POOL, "state")
    clients = GaugeMetricFamily("pooler_pool_clients", "Clients of a pool by state.", labels=by_state)
    sessions = GaugeMetricFamily("pooler_pool_sessions", "Sessions of a pool by state.", labels=by_state)
    longest = GaugeMetricFamily(
        "pooler_pool_longest_wait_seconds", "How long the oldest waiting client waits now.", labels=_POOL
    )
    size = GaugeMetricFamily("pooler_pool_size_sessions", "Sessions the pool may have.", labels=_POOL)
    paused = GaugeMetricFamily("pooler_pool_paused", "1 while the pool is paused.", labels=_POOL)
    pinned = GaugeMetricFamily(
        "pooler_pool_clients_pinned", "Clients that keep a session for its state.", labels=_POOL
    )
    for pool in pools:
        names = (pool.database, pool.user)
        pinned.add_metric(names, pool.clients_pinned)
        for state in _CLIENT_STATES:
            clients.add_metric((*names, state), getattr(pool, f"clients_{state}"))
        for state in _SESSION_STATES:
            sessions.add_metric((*names, state), getattr(pool, f"sessions_{state}"))
        longest.add_metric(names, pool.longest_wait_us / 1e6)
        size.add_metric(names, pool.size_max)
        paused.add_metric(names, int(pool.paused))
    yield from (clients, pinned, sessions, longest, size, paused)


_POOL_COUNTERS: tuple[tuple[str, str, Callable[[PoolStatistics], float]], ...] = (
    ("pooler_transactions", "Transactions served.", lambda p: p.totals.transactions),
    ("pooler_queries", "Queries served.", lambda p: p.totals.queries),
    ("pooler_assignments", "Sessions given to clients.", lambda p: p.totals.server_assignments),
    ("pooler_received_bytes", "Bytes received from clients.", lambda p: p.totals.received_bytes),
    ("pooler_sent_bytes", "Bytes sent to clients.", lambda p: p.totals.sent_bytes),
    ("pooler_query_seconds", "Time spent in queries.", lambda p: p.totals.query_us / 1e6),
    ("pooler_client_parses", "Parse messages of clients.", lambda p: p.totals.client_parses),
    ("pooler_server_parses", "Parse messages sent to servers.", lambda p: p.totals.server_parses),
    ("pooler_binds", "Bind messages.", lambda p: p.totals.binds),
    ("pooler_logins", "Clients that logged in.", lambda p: p.totals.client_logins),
    ("pooler_errors", "Errors that servers reported.", lambda p: p.errors),
    ("pooler_sessions_opened", "Sessions opened.", lambda p: p.sessions_opened),
    ("pooler_sessions_closed", "Sessions closed.", lambda p: p.sessions_closed),
    ("pooler_sessions_lost", "Sessions that ended by themselves.", lambda p: p.sessions_lost),
)


def _pool_counters(pools: tuple[PoolStatistics, ...]) -> Iterator[Metric]:
    for name, text, value in _POOL_COUNTERS:
        family = CounterMetricFamily(name, text, labels=_POOL)
        for pool in pools:
            family.add_metric((pool.database, pool.user), value(pool))
        yield family
    left = CounterMetricFamily(
        "pooler_session_state_left", "State that clients left on sessions, by kind.", labels=(*_POOL, "kind")
    )
    for pool in pools:
        for kind, count in pool.residues.items():
            left.add_metric((pool.database, pool.user, kind), count)
    yield left


_SCALING_NOW = ("inflight_creates",)


def _pool_scaling(pools: tuple[PoolStatistics, ...]) -> Iterator[Metric]:
    by_type = ("user", "database", "type")
    now = GaugeMetricFamily("pooler_pool_scaling", "Sessions being opened.", labels=by_type)
    total = CounterMetricFamily("pooler_pool_scaling", "How pools grew.", labels=by_type)
    for pool in pools:
        for name, value in pool.scaling.items():
            (now if name in _SCALING_NOW else total).add_metric((pool.user, pool.database, name), value)
    yield from (now, total)


def _histogram(
    noun: str, text: str, pools: Iterable[PoolStatistics], value: Callable[[PoolStatistics], HistogramValue]
) -> Metric:
    family = HistogramMetricFamily(f"pooler_{noun}_seconds", text, labels=_POOL)
    for pool in pools:
        counted = value(pool)
        family.add_metric((pool.database, pool.user), cumulative(counted), counted.sum_seconds)
    return family


def cumulative(counted: HistogramValue) -> list[tuple[str, float]]:
    """Buckets as Prometheus wants them: (upper bound, how many were not above it)."""
    buckets: list[tuple[str, float]] = []
    total = 0
    bounds = [*(repr(bound) for bound in counted.bounds_seconds), "+Inf"]
    for bound, count in zip(bounds, counted.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets


def _worker_metrics(worker: WorkerStatistics) -> Iterator[Metric]:
    build = GaugeMetricFamily("pooler_build_info", "What runs.", labels=("version", "worker"))
    build.add_metric((worker.version, worker.worker), 1)
    yield build
    yield _gauge("start_time_seconds", "When the worker started, Unix time.", worker.started_at_us / 1e6)
    yield _gauge("logins_open", "Connections that have not logged in yet.", worker.logins_open)
    yield _gauge("clients_max", "Clients this worker may have.", worker.clients_max)
    yield _gauge("link_up", "1 while the coordinator answers.", int(worker.link_up))
    yield _gauge("prepared_statements", "Different prepared statements.", worker.prepared_statements)
    yield _gauge("prepared_text_bytes", "Text of prepared statements.", worker.prepared_text_bytes)
    yield _counter("links_lost", "How often the coordinator went away.", worker.links_lost)
    yield _counter("permits_granted", "Session permits granted.", worker.permits_granted)
    yield _counter("permits_gone", "Permits that the ledger no longer had.", worker.permits_gone)
    yield _counter("permits_unknown", "Permits given up without proof.", worker.permits_unknown)
    yield _by("permits", "Session permits held, by state.", "state", worker.permits, GaugeMetricFamily)
    yield _by("epoch_number", "The backend epoch served.", "ledger", worker.epochs, GaugeMetricFamily)
    yield _by("policy_generation", "The policy generation that grants.", "ledger",
              worker.policy_generations, GaugeMetricFamily)
    reachable = {ledger: int(up) for ledger, up in worker.ledger_reachable.items()}
    yield _by("ledger_reachable", "1 while it answers.", "ledger", reachable, GaugeMetricFamily)
    yield _by("permits_refused", "Permits refused.", "reason", worker.permits_refused, CounterMetricFamily)
    yield _by("logins_refused", "Clients refused.", "reason", worker.logins_refused, CounterMetricFamily)
    yield from _tenant_costs(worker)


def _tenant_costs(worker: WorkerStatistics) -> Iterator[Metric]:
    """Of tenants that the policy gives a bucket."""
    for word, text, costs in (
            ("admitted", "Tokens that requests of a tenant took.", worker.tenants_admitted_cost),
            ("refused", "Tokens that refused requests asked for.", worker.tenants_refused_cost)):
        family = CounterMetricFamily(f"pooler_tenant_{word}_cost", text, labels=("ledger", "tenant"))
        for (ledger, tenant), cost in costs.items():
            family.add_metric((ledger, tenant), cost)
        yield family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"pooler_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"pooler_{name}", text, value=value)


def _by(
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
) -> Metric:
    made = family(f"pooler_{name}", text, labels=(label,))
    for key, value in values.items():
        made.add_metric((key,), value)
    return made
