"""Metrics: histograms count exactly, and the page is made from the snapshot at the scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from pooler.observe.metrics import BOUNDS_SECONDS, Histogram, WorkerMetrics, cumulative
from pooler.observe.snapshot import PoolStatistics, Totals, WorkerStatistics
from pooler.pool.gate import ScalingCounts


def worker(**pool: object) -> WorkerStatistics:
    made = PoolStatistics(database="orders", user="app", pool_mode="transaction", **pool)  # type: ignore[arg-type]
    return WorkerStatistics(worker="w0", version="0.1.0", started_at_us=1_000_000, pools=(made,),
                            permits={"open": 3}, permits_refused={"full": 2},
                            ledger_reachable={"a/write": False})


def families(statistics: WorkerStatistics) -> dict[str, Metric]:
    page = WorkerMetrics(lambda: statistics).render().decode()
    return {family.name: family for family in text_string_to_metric_families(page)}


def value(found: dict[str, Metric], family: str, sample: str, **labels: str) -> float:
    (match,) = (s for s in found[family].samples if s.name == sample and labels.items() <= s.labels.items())
    return float(match.value)


@given(st.lists(st.floats(0, 100, allow_nan=False), max_size=50))
def test_a_histogram_counts_each_duration_in_the_first_bucket_that_holds_it(seconds: list[float]) -> None:
    histogram = Histogram()
    for each in seconds:
        histogram.observe(each)
    buckets = cumulative(histogram.value())
    assert buckets[-1] == ("+Inf", len(seconds))
    for (bound, count), limit in zip(buckets, BOUNDS_SECONDS, strict=False):
        assert float(bound) == limit
        assert count == sum(1 for each in seconds if each <= limit)
    assert histogram.value().sum_seconds == pytest.approx(sum(seconds))
    assert all(before[1] <= after[1] for before, after in pairwise(buckets))


def test_a_duration_equal_to_a_bound_is_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.0)
    assert histogram.counts == [1, 0, 0]
    assert bisect_left((1.0, 2.0), 1.0) == 0


def test_the_page_says_what_the_snapshot_says() -> None:
    waits = Histogram()
    waits.observe(0.02)
    found = families(worker(clients_waiting=4, sessions_idle=2, longest_wait_us=1_500_000, errors=7,
                            totals=Totals(transactions=11, query_us=2_000_000), waits=waits.value(),
                            residues={"temp": 5}))
    names = {"database": "orders", "user": "app"}
    assert value(found, "pooler_pool_clients", "pooler_pool_clients", state="waiting", **names) == 4
    assert value(found, "pooler_pool_sessions", "pooler_pool_sessions", state="idle", **names) == 2
    longest = "pooler_pool_longest_wait_seconds"
    assert value(found, longest, longest, **names) == 1.5
    assert value(found, "pooler_transactions", "pooler_transactions_total", **names) == 11
    assert value(found, "pooler_query_seconds", "pooler_query_seconds_total", **names) == 2
    assert value(found, "pooler_wait_seconds", "pooler_wait_seconds_count", **names) == 1
    assert value(found, "pooler_wait_seconds", "pooler_wait_seconds_bucket", le="0.025", **names) == 1
    assert value(found, "pooler_wait_seconds", "pooler_wait_seconds_bucket", le="0.01", **names) == 0
    assert value(found, "pooler_session_state_left", "pooler_session_state_left_total", kind="temp") == 5
    assert value(found, "pooler_permits", "pooler_permits", state="open") == 3
    assert value(found, "pooler_permits_refused", "pooler_permits_refused_total", reason="full") == 2
    assert value(found, "pooler_ledger_reachable", "pooler_ledger_reachable", ledger="a/write") == 0
    assert value(found, "pooler_start_time_seconds", "pooler_start_time_seconds") == 1


def test_how_a_pool_grew_has_a_gauge_and_counters_by_type() -> None:
    counts = ScalingCounts(inflight_creates=2, creates_started=9, burst_gate_waits=4, replenish_deferred=1)
    page = WorkerMetrics(lambda: worker(scaling=asdict(counts))).render().decode()
    labels = 'database="orders",type="{}",user="app"'
    assert f"pooler_pool_scaling{{{labels.format('inflight_creates')}}} 2.0" in page
    for name, count in (("creates_started", 9), ("burst_gate_waits", 4), ("burst_gate_budget_exhausted", 0),
                        ("anticipation_wakes_notify", 0), ("anticipation_wakes_timeout", 0),
                        ("create_fallback", 0), ("replenish_deferred", 1)):
        assert f"pooler_pool_scaling_total{{{labels.format(name)}}} {count}.0" in page


def test_a_scrape_asks_anew_and_a_gauge_goes_back() -> None:
    snapshots: Iterator[WorkerStatistics] = iter([worker(longest_wait_us=5_000_000), worker()])
    metrics = WorkerMetrics(lambda: next(snapshots))
    line = 'pooler_pool_longest_wait_seconds{database="orders",user="app"}'
    assert f"{line} 5.0" in metrics.render().decode()
    assert f"{line} 0.0" in metrics.render().decode()


def test_every_name_is_the_poolers_and_labels_are_escaped() -> None:
    odd = PoolStatistics(database='a"b\\c\n', user="app", pool_mode="session")
    found = families(WorkerStatistics(worker="w0", version="1", started_at_us=0, pools=(odd,)))
    assert all(name.startswith("pooler_") for name in found)
    assert value(found, "pooler_pool_clients", "pooler_pool_clients", database='a"b\\c\n', state="idle") == 0


def test_what_tenants_with_a_bucket_took_and_were_refused_is_counted_by_ledger() -> None:
    found = families(replace(worker(), tenants_admitted_cost={("shop/write", "a"): 3.0},
                             tenants_refused_cost={("shop/write", "a"): 1.5}))
    labels = {"ledger": "shop/write", "tenant": "a"}
    for word, cost in (("admitted", 3.0), ("refused", 1.5)):
        name = f"pooler_tenant_{word}_cost"
        assert value(found, name, name + "_total", **labels) == cost
