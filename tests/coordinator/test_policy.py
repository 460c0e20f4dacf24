"""The policy document: the shortest one is valid, every fault is named at once with its numbers."""

from __future__ import annotations

import pytest

from coordinator.policy import (
    PolicyRefused,
    decode_policy,
    encode_policy,
    load_policy,
    parse_duration,
    parse_policy,
)

DOCUMENT = """
schema: dbAdmissionPolicy.v1
database: orders-primary/write
generation: 27
serverSessionPermits: 180
adminReserve: 12
executionClasses:
  interactive: {permits: 130, maxQueue: 800}
  batch: {permits: 50, maxQueue: 100}
fairness: weighted-deficit-v2
"""


def test_the_short_document_is_valid_and_gets_its_defaults() -> None:
    policy, _ = load_policy(DOCUMENT)
    interactive = policy.classes["interactive"]
    assert (policy.server_session_permits, policy.failover_permits) == (180, None)
    assert policy.pool_mode == "transaction"
    assert (policy.hard_connection_limit, policy.reserve_permits, policy.other_clients) == (None, 0, 0)
    assert (interactive.queue_deadline_seconds, interactive.max_wait_seconds) == (10.0, 10.0)
    assert (interactive.aging_limit_seconds, interactive.max_lend) == (5.0, 65)
    assert (interactive.wait_budget_p99_seconds, interactive.transaction_limit_seconds) == (0.1, 300.0)
    assert (interactive.loan_ttl_seconds, interactive.lend_stop_after_seconds) == (5.0, 0.02)


def test_what_is_stored_reads_back_as_the_same_policy() -> None:
    policy, document = load_policy(DOCUMENT)
    assert decode_policy(encode_policy(document)) == policy


@pytest.mark.parametrize(("name", "fits"), [
    ("d" * 122 + "/write", True), ("d" * 123 + "/write", False), ("ä" * 61 + "/write", True),
    ("ä" * 62 + "/write", False),
])
def test_a_ledgers_name_fits_the_session_tables(name: str, fits: bool) -> None:
    text = DOCUMENT.replace("orders-primary/write", name)
    if fits:
        assert load_policy(text)[0].database == name
    else:
        with pytest.raises(PolicyRefused, match=r"database: .* is longer than 128 bytes"):
            load_policy(text)


def test_a_text_that_is_no_yaml_is_refused_by_line_with_the_cure() -> None:
    told = "it is not YAML: line 3, column 1: .*: indent with spaces, not tabs"
    with pytest.raises(PolicyRefused, match=told):
        load_policy("schema: dbAdmissionPolicy.v1\ntenants:\n\ta: {}\n")


def test_a_bucket_is_told_to_workers_as_it_is_in_effect_and_where_there_is_none_nothing() -> None:
    policy, _ = load_policy("""
schema: dbAdmissionPolicy.v1
database: shop/write
generation: 1
serverSessionPermits: 10
adminReserve: 1
executionClasses:
  quick: {permits: 5, maxQueue: 10}
  batch: {permits: 5, maxQueue: 10, bucket: {rate: 0.5, burst: 2, per: connection, startFull: false}}
tenants: {acme: {bucket: {rate: 2, burst: 3, cost: 1.5, mode: reject}}}
fairness: weighted-deficit-v2
""")
    told = policy.for_workers()
    assert "bucket" not in told["executionClasses"]["quick"]
    assert told["executionClasses"]["batch"]["bucket"] == {
        "rate": 0.5, "burst": 2.0, "cost": 1.0, "mode": "delay", "per": "connection", "startFull": False}
    assert told["tenants"]["acme"]["bucket"] == {
        "rate": 2.0, "burst": 3.0, "cost": 1.5, "mode": "reject", "per": "transaction", "startFull": True}


@pytest.mark.parametrize(("given", "fault"), [
    ("startFull: 1", "bucket.startFull: 1 is not true or false"),
    ("per: query", "bucket.per: 'query' is not one")])
def test_a_wrong_word_of_a_bucket_is_named(given: str, fault: str) -> None:
    with pytest.raises(PolicyRefused, match=fault):
        load_policy(f"tenants: {{acme: {{bucket: {{rate: 1, burst: 1, {given}}}}}}}\n")


def test_every_fault_is_named_at_once_with_its_path() -> None:
    with pytest.raises(PolicyRefused) as refused:
        load_policy(
            """
schema: dbAdmissionPolicy.v2
database: ""
generation: 0
serverSessionPermitz: 10
adminReserve: many
executionClasses:
  batch: {permits: 5, maxQueue: 10, queueDeadline: 10, bucket: {rate: -1, burst: 2, mode: drop}}
tenants: {acme: {weight: 0}}
fairness: fifo
poolMode: tx
"""
        )
    text = "\n".join(refused.value.faults)
    for part in (
        "schema: 'dbAdmissionPolicy.v2' is not one of", "database: ''", "generation: 0 is not between 1",
        "serverSessionPermits: is missing", "adminReserve: 'many' is not a whole number",
        "serverSessionPermitz: is not a field; did you mean serverSessionPermits?",
        "executionClasses.batch.queueDeadline: 10 is not a duration",
        "executionClasses.batch.bucket.rate: -1",
        "executionClasses.batch.bucket.mode: 'drop'", "tenants.acme.weight: 0", "fairness: 'fifo'",
        "poolMode: 'tx'",
    ):
        assert part in text
    assert len(refused.value.faults) == 12


@pytest.mark.parametrize(
    ("change", "numbers"),
    [
        ({"serverSessionPermits": 170}, ("180", "170")),
        ({"hardConnectionLimit": 190}, ("192", "190")),
        ({"failoverPermits": 181}, ("181", "180")),
        ({"tenants": {"a": {"inflight": 131}}}, ("131", "130")),
        ({"executionClasses": {"x": {"permits": 3, "maxQueue": 1, "maxLend": 4}}}, ("4", "3")),
    ],
)
def test_a_contradiction_names_both_numbers(change: dict[str, object], numbers: tuple[str, str]) -> None:
    _, document = load_policy(DOCUMENT)
    with pytest.raises(PolicyRefused) as refused:
        parse_policy({**document, **change})
    assert len(refused.value.faults) == 1
    assert all(number in refused.value.faults[0] for number in numbers)


@pytest.mark.parametrize(
    ("text", "seconds"), [("10s", 10.0), ("100ms", 0.1), ("5m", 300.0), (0, 0.0), ("1.5h", 5400.0),
                          ("10", None), (10, None), ("", None), (False, None), ("-1s", None)],
)
def test_a_duration_needs_its_unit(text: object, seconds: float | None) -> None:
    assert parse_duration(text) == (seconds if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("text", ["[1]", "a: [", "", "just words"])
def test_what_is_no_map_is_refused(text: str) -> None:
    with pytest.raises(PolicyRefused):
        load_policy(text)


def test_classes_and_tenants_are_told_apart_by_their_whole_names() -> None:
    text = DOCUMENT.replace("interactive:", "day.web:").replace("batch:", "night.web:")
    text += "tenants: {7: {weight: 2}}"
    policy, _ = load_policy(text)
    assert [*policy.classes] == ["day.web", "night.web"]
    assert policy.tenants["7"].weight == 2
    with pytest.raises(PolicyRefused, match=r"tenants\.x: is not a map of fields"):
        load_policy(DOCUMENT + "tenants: {x: 1}")
