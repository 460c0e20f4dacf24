"""A policy as a flat list of values: shown with their sources, and held side by side."""

from __future__ import annotations

import pytest

from coordinator.policy import Policy, load_policy
from coordinator.policy_values import difference_text, differences, duration_text, values_of

DOCUMENT = """
schema: dbAdmissionPolicy.v1
database: orders-primary/write
generation: 27
serverSessionPermits: 180
adminReserve: 12
executionClasses:
  interactive: {permits: 130, maxQueue: 800, queueDeadline: 30s}
  batch.night: {permits: 50, maxQueue: 100, bucket: {rate: 5, burst: 10}}
tenants: {web: {weight: 3}, jobs: {inflight: 4}}
fairness: weighted-deficit-v2
"""


def policy(text: str = DOCUMENT) -> Policy:
    return load_policy(text)[0]


def test_every_value_in_effect_has_its_path_and_its_source() -> None:
    read, document = load_policy(DOCUMENT)
    values = {each.path: (each.value, each.given) for each in values_of(read, document)}
    assert {path: values[path] for path in (
        "database", "serverSessionPermits", "reservePermits", "failoverPermits", "hardConnectionLimit",
        "executionClasses.interactive.queueDeadline", "executionClasses.interactive.agingLimit",
        "executionClasses.interactive.waitBudgetP99", "executionClasses.batch.night.permits",
        "executionClasses.batch.night.bucket.rate", "executionClasses.batch.night.bucket.cost",
        "tenants.web.weight", "tenants.web.inflight", "tenants.jobs.inflight", "tenants.jobs.weight")} == {
        "database": ("orders-primary/write", True), "serverSessionPermits": (180, True),
        "reservePermits": (0, False), "failoverPermits": (0, False), "hardConnectionLimit": (None, False),
        "executionClasses.interactive.queueDeadline": ("30s", True),
        "executionClasses.interactive.agingLimit": ("15s", False),
        "executionClasses.interactive.waitBudgetP99": ("100ms", False),
        "executionClasses.batch.night.permits": (50, True),
        "executionClasses.batch.night.bucket.rate": (5.0, True),
        "executionClasses.batch.night.bucket.cost": (1.0, False),
        "tenants.web.weight": (3, True), "tenants.web.inflight": (130, False),
        "tenants.jobs.inflight": (4, True), "tenants.jobs.weight": (1, False)}
    assert all(isinstance(value, str | int | float | None) for value, _ in values.values())
    assert "executionClasses.interactive.bucket" not in values


def test_what_means_the_same_differs_in_nothing() -> None:
    assert differences(policy(), policy(DOCUMENT + "otherClients: 0\npoolMode: transaction\n")) == []


def test_a_difference_names_the_path_and_both_values() -> None:
    text = DOCUMENT.replace("permits: 50", "permits: 40").replace("30s", "20s") + "failoverPermits: 3\n"
    other = policy(text)
    assert difference_text(other, policy(), "in force") == [
        "executionClasses.interactive.queueDeadline 20s (in force: 30s)",
        "executionClasses.interactive.maxWait 20s (in force: 30s)",
        "executionClasses.interactive.agingLimit 10s (in force: 15s)",
        "executionClasses.batch.night.permits 40 (in force: 50)",
        "executionClasses.batch.night.maxLend 20 (in force: 25)",
        "failoverPermits 3 (in force: none)"]


def test_a_class_or_bucket_that_only_one_has_differs_in_all_its_values() -> None:
    other = policy(DOCUMENT.replace(", bucket: {rate: 5, burst: 10}", ""))
    assert {path for path, *_ in differences(other, policy())} == {
        f"executionClasses.batch.night.bucket.{name}"
        for name in ("rate", "burst", "cost", "mode", "per", "startFull")}


@pytest.mark.parametrize(("seconds", "text"), [
    (0, "0s"), (10.0, "10s"), (0.1, "100ms"), (300.0, "5m"), (90.0, "90s"), (3600.0, "1h"), (86400.0, "1d"),
    (0.0005, "500us"), (1.5, "1500ms")])
def test_a_duration_is_told_as_a_document_would(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
