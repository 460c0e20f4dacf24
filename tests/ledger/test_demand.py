"""What a host wants of execution permits: read as written, and written only where it may move a permit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from coordinator.ledger.demand import Classes, HostDemand, changes_allotment, demands_from, together
from coordinator.ledger.strange import Sieve
from coordinator.store.api import Entry

needs = some.dictionaries(some.sampled_from("xy"), some.dictionaries(
    some.sampled_from("AB"), some.dictionaries(some.sampled_from("tu"), some.integers(0, 9))))


def one(tickets: int, tenant: str = "t") -> Classes:
    return {"x": {"A": {tenant: tickets}}}


@given(needs)
def test_what_was_written_is_read_and_is_no_news(wanted: Classes) -> None:
    written = HostDemand("h", wanted)
    assert HostDemand.decode(written.encode()) == written
    assert not changes_allotment(wanted, wanted, {})


@pytest.mark.parametrize(("was", "wants", "has", "news"), [
    (0, 1, 5, True), (1, 0, 5, True), (4, 5, 5, False), (5, 6, 5, True), (6, 5, 5, True), (6, 9, 5, False),
    (3, 7, 9, True), (8, 2, 9, False), (8, 1, 9, True)])
def test_it_is_news_where_it_begins_ceases_crosses_a_share_or_is_another_size(
    was: int, wants: int, has: int, news: bool
) -> None:
    assert changes_allotment(one(was), one(wants), {("x", "A"): has}) is news


def test_another_tenant_is_news() -> None:
    assert changes_allotment(one(3), one(3, "u"), {("x", "A"): 9})


def test_the_own_host_and_what_cannot_be_read_are_left_out() -> None:
    entries = [Entry("demand/a", HostDemand("a", one(1)).encode(), 1, 1), Entry("demand/b", b"\xc1", 1, 1),
               Entry("demand/c", HostDemand("c", {"x": {"B": {"t": 2}}}).encode(), 1, 1)]
    sieve = Sieve()
    found = demands_from(entries, sieve, but="a")
    assert [each.key for each in sieve.strange] == ["demand/b"]
    assert together([*found, one(1)]) == {"x": {"A": {"t": 1}, "B": {"t": 2}}}
