"""Failed logins of one address: what is slowed, what is not, and that the table stays small."""

from __future__ import annotations

import pytest

from pooler.net.failures import (
    ADDRESSES_MAX,
    DELAY_FIRST_SECONDS,
    FORGET_SECONDS,
    OUTSTANDING_MAX,
    FailedLogins,
)


def fail(failures: FailedLogins, times: int, source: str = "a", now: float = 0.0) -> list[float]:
    seconds = []
    for _ in range(times):
        seconds.append(failures.failed(source, now))
        failures.answered(source)
    return seconds


def test_the_first_failures_are_answered_at_once_and_then_ever_later() -> None:
    assert fail(FailedLogins(3, 1.0), 9) == [
        0, 0, 0, DELAY_FIRST_SECONDS, 0.25, 0.5, 1.0, 1.0, 1.0]


def test_another_address_is_not_slowed() -> None:
    failures = FailedLogins(0, 1.0)
    fail(failures, 5)
    assert fail(failures, 1, "b") == [DELAY_FIRST_SECONDS]


def test_a_quiet_address_is_forgiven_step_by_step() -> None:
    failures = FailedLogins(1, 1.0)
    assert fail(failures, 3) == [0, DELAY_FIRST_SECONDS, 0.25]
    assert fail(failures, 1, now=FORGET_SECONDS) == [0.25]
    assert fail(failures, 1, now=100 * FORGET_SECONDS) == [0]


def test_an_address_with_too_many_answers_outstanding_is_refused_until_one_is_out() -> None:
    failures = FailedLogins(0, 1.0)
    for _ in range(OUTSTANDING_MAX):
        assert not failures.refuses("a")
        failures.failed("a", 0.0)
    assert failures.refuses("a")
    assert not failures.refuses("b")
    failures.answered("a")
    assert not failures.refuses("a")


def test_the_table_is_bounded_and_the_quietest_goes_first() -> None:
    failures = FailedLogins(0, 1.0, addresses_max=10)
    for number in range(50):
        fail(failures, 1, f"s{number}")
        fail(failures, 1, "steady")
    assert len(failures) == 10
    assert fail(failures, 1, "steady") == [1.0]
    assert ADDRESSES_MAX <= 10_000


def test_with_no_delay_nothing_is_kept() -> None:
    failures = FailedLogins(0, 0.0)
    assert fail(failures, 100) == [0.0] * 100
    assert len(failures) == 0


@pytest.mark.parametrize(("host", "source"), [
    ("192.0.2.1", "192.0.2.1"), ("::ffff:192.0.2.1", "192.0.2.1"), ("unix", None),
    ("2001:db8::1", "2001:db8::/64"), ("2001:db8::ffff:2", "2001:db8::/64"), ("fe80::1%eth0", "fe80::/64")])
def test_addresses_of_one_ipv6_network_count_together(host: str, source: str | None) -> None:
    assert FailedLogins(0, 1.0).source(host) == source


def test_the_addresses_of_proxies_are_not_counted() -> None:
    failures = FailedLogins(0, 1.0)
    failures.set_limits(0, 1.0, ("192.0.2.0/25", "2001:db8::/32"))
    assert failures.source("192.0.2.127") is None
    assert failures.source("2001:db8::1") is None
    assert failures.source("192.0.2.128") == "192.0.2.128"
