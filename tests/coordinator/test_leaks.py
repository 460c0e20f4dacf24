"""A permit that no pool of its worker holds is found by two words of that worker."""

from __future__ import annotations

from coordinator.leaks import Reports
from coordinator.ledger.record import Kind, Permit

ONE, TWO = ("db", Permit(Kind.MAIN, 1, 7)), ("db", Permit(Kind.MAIN, 2, 9))
CYCLE_US = 5_000_000


def test_a_permit_missing_from_two_words_in_a_row_is_leaked_since_the_first_of_them() -> None:
    reports = Reports()
    assert not reports.heard("a", {ONE, TWO}, {ONE, TWO}, 0)
    assert not reports.heard("a", {TWO}, {ONE, TWO}, CYCLE_US)
    assert reports.leaked({"a"}) == {}
    assert reports.heard("a", {TWO}, {ONE, TWO}, 2 * CYCLE_US)
    assert reports.leaked({"a"}) == {ONE: CYCLE_US}


def test_one_that_is_told_of_again_in_between_was_in_somebodys_hand() -> None:
    reports = Reports()
    for said in ({TWO}, {ONE, TWO}, {TWO}):
        assert not reports.heard("a", said, {ONE, TWO}, CYCLE_US)
    assert reports.leaked({"a"}) == {}


def test_a_leak_is_news_once_and_over_when_the_permit_is() -> None:
    reports = Reports()
    news = [reports.heard("a", set(), {ONE}, n * CYCLE_US) for n in range(4)]
    assert news == [False, True, False, False]
    assert not reports.heard("a", set(), set(), 4 * CYCLE_US)
    assert reports.leaked({"a"}) == {}


def test_what_a_worker_that_is_gone_said_counts_no_more() -> None:
    reports = Reports()
    for now in (0, CYCLE_US):
        reports.heard("a", set(), {ONE}, now)
        reports.heard("b", set(), {TWO}, now)
    assert reports.leaked({"b"}) == {TWO: 0}
    assert not reports.heard("a", set(), {ONE}, 2 * CYCLE_US)  # a first word again
