"""Where a ledger belongs: what was seen, case by case, and what may never come of anything that is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ledger.record import Backend, Epoch, EpochState
from coordinator.topology import (
    AGE_SECONDS_MAX,
    FIRST_START,
    GONE_LOOKS_READ,
    SETTLE_READ_SECONDS,
    Advance,
    Cluster,
    Glance,
    NoAnswer,
    Nobody,
    Seen,
    Stay,
    Verdict,
    decide,
)

NOW = 1_000.0
A = Backend("a:5432", "7001", 1, 100)
B = Backend("b:5432", "7001", 1, 101, in_recovery=True)
C = Backend("c:5432", "7001", 1, 102, in_recovery=True)
B2 = replace(B, timeline=2, in_recovery=False)  # promoted
C2 = replace(C, timeline=2)  # follows it
A_STANDBY = replace(A, timeline=2, postmaster_start_us=200, in_recovery=True)
A_AGAIN = replace(A, postmaster_start_us=200)
OTHER = replace(B2, system_identifier="8001")
GONE = NoAnswer("refused", NOW)
LONG_GONE = NoAnswer("refused", NOW, GONE_LOOKS_READ)


def saw(backend: Backend, lag: float | None = 0.0, **more: object) -> Glance:
    return Glance(backend, NOW, lag_seconds=lag, **more)  # type: ignore[arg-type]


def looks(**at: Seen) -> dict[str, Seen]:
    return {f"{name}:5432": seen for name, seen in at.items()}


def patroni(leader: str | None) -> Cluster:
    return Cluster(f"{leader}:5432" if leader else None, NOW)


def on(backend: Backend, state: EpochState = EpochState.ACTIVE) -> Epoch:
    return Epoch(3, state, backend, 0, "test")


def told(verdict: Verdict) -> str:
    """In one word and where to."""
    match verdict:
        case Advance(backend=backend):
            return f"to {backend.address[0]}"
        case Nobody():
            return "nobody"
        case Stay(reason=reason):
            return "stay and say" if reason else "stay"


WRITE: dict[str, tuple[dict[str, Seen], Cluster | None, str]] = {
    "all is well": (looks(a=saw(A), b=saw(B)), None, "stay"),
    "it was not looked at": ({}, None, "stay"),
    "it was started anew": (looks(a=saw(A_AGAIN), b=saw(B)), None, "stay"),
    "gone and one promoted": (looks(a=GONE, b=saw(B2), c=saw(C2)), None, "to b"),
    "gone and none promoted": (looks(a=GONE, b=saw(B), c=saw(C)), None, "nobody"),
    "gone and nobody answers": (looks(a=GONE, b=GONE), None, "nobody"),
    "gone and the others not looked at": (looks(a=GONE), None, "nobody"),
    "gone and another cluster promoted": (looks(a=GONE, b=saw(OTHER)), None, "nobody"),
    "gone and one out of recovery on the same timeline": (
        looks(a=GONE, b=saw(replace(B, in_recovery=False))), None, "nobody"),
    "gone and the promoted one read-only": (looks(a=GONE, b=saw(B2, read_only=True)), None, "nobody"),
    "back in recovery": (looks(a=saw(A_STANDBY), b=saw(B2)), None, "to b"),
    "read-only": (looks(a=saw(A, read_only=True), b=saw(B2)), None, "to b"),
    "another cluster at its address": (
        looks(a=saw(replace(A, system_identifier="9")), b=saw(B2)), None, "to b"),
    "of two promoted the later": (
        looks(a=GONE, b=saw(B2), c=saw(replace(C2, timeline=3, in_recovery=False))), None, "to c"),
    "two primaries": (looks(a=saw(A), b=saw(B2)), None, "stay and say"),
    "one server by two names": (
        {"a:5432": saw(A), "alias:5432": saw(replace(A, address="alias:5432"))}, None, "stay"),
    "Patroni names it": (looks(a=saw(A), b=saw(B)), patroni("a"), "stay"),
    "Patroni names another that was promoted": (looks(a=saw(A), b=saw(B2)), patroni("b"), "to b"),
    "Patroni names another that is not yet": (looks(a=saw(A), b=saw(B)), patroni("b"), "stay and say"),
    "Patroni names another that was not looked at": (looks(a=saw(A)), patroni("b"), "stay and say"),
    "Patroni names the same server by another address": (
        {"a:5432": saw(A), "alias:5432": saw(replace(A, address="alias:5432"))},
        Cluster("alias:5432", NOW), "stay"),
    "gone and Patroni has none": (looks(a=GONE, b=saw(B2)), patroni(None), "nobody"),
    "gone and Patroni still names it": (looks(a=GONE, b=saw(B2)), patroni("a"), "nobody"),
    "gone and Patroni names one of two": (
        looks(a=GONE, b=saw(B2), c=saw(replace(C2, timeline=3, in_recovery=False))), patroni("b"), "to b"),
    "gone and Patroni was last heard long ago": (
        looks(a=GONE, b=saw(B2)), Cluster("a:5432", NOW - AGE_SECONDS_MAX - 1), "to b"),
    "Patroni has none and it serves": (looks(a=saw(A)), patroni(None), "stay"),
}


@pytest.mark.parametrize("case", WRITE)
def test_a_primary(case: str) -> None:
    seen, cluster, expected = WRITE[case]
    assert told(decide("write", on(A), seen, cluster, NOW)) == expected


READ: dict[str, tuple[Backend, dict[str, Seen], float | None, str]] = {
    "all is well": (B, looks(b=saw(B, 1.0)), 10.0, "stay"),
    "it was not looked at": (B, {}, 10.0, "stay"),
    "behind": (B, looks(b=saw(B, 11.0), c=saw(C, 1.0)), 10.0, "to c"),
    "behind, and nobody minds": (B, looks(b=saw(B, 11.0), c=saw(C, 1.0)), None, "stay"),
    "behind and nobody else": (B, looks(b=saw(B, 11.0), a=saw(A)), 10.0, "nobody"),
    "behind and the other as well": (B, looks(b=saw(B, 11.0), c=saw(C, 12.0)), 10.0, "nobody"),
    "how far is not known": (B, looks(b=saw(B, None), c=saw(C, 1.0)), 10.0, "to c"),
    "how far is not known, and nobody minds": (B, looks(b=saw(B, None), c=saw(C, 1.0)), None, "stay"),
    "nor of the other": (B, looks(b=saw(B, 99.0), c=saw(C, None)), 10.0, "nobody"),
    "gone once": (B, looks(b=GONE, c=saw(C)), None, "stay"),
    "gone": (B, looks(b=LONG_GONE, c=saw(C)), None, "to c"),
    "gone and only a primary left": (B, looks(b=LONG_GONE, a=saw(A)), None, "to a"),
    "gone and a standby of another cluster": (
        B, looks(b=LONG_GONE, c=saw(replace(C, system_identifier="9"))), None, "nobody"),
    "gone and nobody answers": (B, looks(b=LONG_GONE, c=GONE), None, "nobody"),
    "another cluster at its address": (
        B, looks(b=saw(replace(B, system_identifier="9")), c=saw(C)), None, "to c"),
    "promoted": (B, looks(b=saw(B2), c=saw(C2)), 10.0, "to c"),
    "promoted and no standby left": (B, looks(b=saw(B2)), 10.0, "stay and say"),
    "was ordered to a primary, and a standby is there": (A, looks(a=saw(A), b=saw(B)), 10.0, "stay"),
    "the nearest": (
        B, looks(b=LONG_GONE, c=saw(C, 3.0), d=saw(replace(C, address="d:5432"), 1.0)), None, "to d"),
}


@pytest.mark.parametrize("case", READ)
def test_a_standby_to_read_from(case: str) -> None:
    backend, seen, lag_max, expected = READ[case]
    assert told(decide("read", on(backend), seen, None, NOW, lag_seconds_max=lag_max)) == expected


def test_a_primary_that_was_taken_for_want_of_a_standby_is_left_for_one() -> None:
    resort = decide("read", on(B), looks(b=LONG_GONE, a=saw(A)), None, NOW)
    assert isinstance(resort, Advance)
    for reason in (resort.reason, FIRST_START):
        epoch = replace(on(A), reason=reason)
        assert told(decide("read", epoch, looks(a=saw(A), b=saw(B)), None, NOW)) == "to b"
        assert told(decide("read", epoch, looks(a=saw(A)), None, NOW)) == "stay and say"


@pytest.mark.parametrize("role", ["write", "read"])
def test_an_epoch_that_drains_is_its_commands(role: str) -> None:
    seen = looks(a=LONG_GONE, b=saw(B2), c=saw(C2))
    assert decide(role, on(A, EpochState.DRAINING), seen, patroni("b"), NOW) == Stay()


@pytest.mark.parametrize("role", ["write", "read"])
def test_a_cluster_that_was_never_seen_goes_nowhere(role: str) -> None:
    never_seen = Epoch(1, EpochState.ACTIVE, Backend("a:5432"), 0, "taken on trust")
    assert told(decide(role, never_seen, looks(a=LONG_GONE, b=saw(B2), c=saw(C2)), None, NOW)) == "nobody"


def test_what_was_seen_long_ago_says_nothing() -> None:
    seen = looks(a=GONE, b=replace(saw(B2), at=NOW - AGE_SECONDS_MAX - 1))
    assert told(decide("write", on(A), seen, None, NOW)) == "nobody"
    assert decide("write", on(A), looks(a=replace(GONE, at=0.0), b=saw(B2)), None, NOW) == Stay(
        "b:5432 takes writes as well (timeline 2): two primaries")


# ---- whatever is seen

ADDRESSES = ("a:5432", "b:5432", "c:5432")
BACKENDS = st.builds(
    Backend, st.just(""), st.sampled_from(["7001", "8001"]), st.integers(1, 3), st.sampled_from([100, 200]),
    st.booleans())
AT = st.sampled_from([NOW, NOW - 2 * AGE_SECONDS_MAX])
GLANCES = st.builds(Glance, BACKENDS, AT, st.booleans(), st.sampled_from([None, 0.0, 5.0, 50.0]))
SEEN = st.one_of(GLANCES, st.builds(NoAnswer, st.just("refused"), AT, st.integers(1, 5)))


@st.composite
def anything(draw: st.DrawFn) -> dict[str, Seen]:
    found: dict[str, Seen] = {}
    for address in draw(st.sets(st.sampled_from(ADDRESSES))):
        seen = draw(SEEN)
        if isinstance(seen, Glance):
            seen = replace(seen, backend=replace(seen.backend, address=address))
        found[address] = seen
    return found


CLUSTERS = st.one_of(st.none(), st.builds(Cluster, st.sampled_from([None, *ADDRESSES]), AT))
LAGS = st.sampled_from([None, 10.0])


@given(anything(), CLUSTERS)
def test_a_write_pool_only_goes_to_a_fresh_primary_of_its_cluster_on_a_later_timeline(
    seen: dict[str, Seen], cluster: Cluster | None
) -> None:
    verdict = decide("write", on(A), seen, cluster, NOW)
    if isinstance(verdict, Advance):
        there = seen[verdict.backend.address]
        assert isinstance(there, Glance)
        assert there.at == NOW
        assert there.backend == verdict.backend != A
        assert verdict.backend.system_identifier == A.system_identifier
        assert verdict.backend.timeline > A.timeline
        assert not verdict.backend.in_recovery
        assert not there.read_only


@given(anything(), CLUSTERS)
def test_a_primary_that_serves_is_left_only_where_patroni_names_another(
    seen: dict[str, Seen], cluster: Cluster | None
) -> None:
    verdict = decide("write", on(A), {**seen, A.address: saw(A)}, cluster, NOW)
    if isinstance(verdict, Advance):
        assert cluster == Cluster(verdict.backend.address, NOW)


@given(anything(), LAGS)
def test_a_read_pool_only_goes_to_a_standby_near_enough_or_away_from_one_that_is_gone(
    seen: dict[str, Seen], lag_max: float | None
) -> None:
    verdict = decide("read", on(B), seen, None, NOW, lag_seconds_max=lag_max)
    if isinstance(verdict, Advance):
        there = seen[verdict.backend.address]
        assert isinstance(there, Glance)
        assert there.at == NOW
        assert verdict.backend.address != B.address
        assert verdict.backend.system_identifier == B.system_identifier
        if there.backend.in_recovery and lag_max is not None:
            assert there.lag_seconds is not None
            assert there.lag_seconds <= lag_max
        if not there.backend.in_recovery:
            here = seen[B.address]
            assert isinstance(here, NoAnswer) or here.backend.system_identifier != B.system_identifier


@given(anything(), CLUSTERS, LAGS, st.sampled_from(["write", "read"]))
def test_after_an_advance_nothing_that_was_seen_calls_for_another(
    seen: dict[str, Seen], cluster: Cluster | None, lag_max: float | None, role: str
) -> None:
    verdict = decide(role, on(A), seen, cluster, NOW, lag_seconds_max=lag_max)
    if isinstance(verdict, Advance):
        again = decide(role, on(verdict.backend), seen, cluster, NOW, lag_seconds_max=lag_max)
        standby_was_left = role == "read" and not verdict.backend.in_recovery
        assert not isinstance(again, Advance) or standby_was_left


LAG = st.sampled_from([None, 0.0, 4.9, 5.1, 9.9, 10.1, 20.0])


@given(st.lists(st.tuples(LAG, LAG, st.sampled_from([1.0, 20.0])), max_size=40))
def test_a_read_pool_is_not_moved_to_and_fro_between_standbys_whose_lags_cross(
    steps: list[tuple[float | None, float | None, float]]
) -> None:
    """It leaves past the limit, enters at half of it or less, and stays for a time in between."""
    limit, here, now, moved_at = 10.0, B, NOW, float("-inf")
    for lag_b, lag_c, seconds in steps:
        now += seconds
        lags = {B.address: lag_b, C.address: lag_c}
        seen: dict[str, Seen] = {
            each.address: Glance(each, now, lag_seconds=lags[each.address]) for each in (B, C)}
        verdict = decide("read", on(here), seen, None, now, lag_seconds_max=limit,
                         since_advance_seconds=now - moved_at)
        left, other = lags[here.address], lags[(C if here == B else B).address]
        is_late, is_near = left is None or left > limit, other is not None and other <= limit / 2
        assert isinstance(verdict, Advance) == (is_late and is_near and now - moved_at >= SETTLE_READ_SECONDS)
        if isinstance(verdict, Advance):
            here, moved_at = verdict.backend, now
        else:
            assert isinstance(verdict, Nobody) == is_late


def test_a_standby_within_the_limit_is_better_than_none() -> None:
    seen = looks(b=LONG_GONE, c=saw(C, 9.0), a=saw(A))
    assert told(decide("read", on(B), seen, None, NOW, lag_seconds_max=10.0)) == "to c"
