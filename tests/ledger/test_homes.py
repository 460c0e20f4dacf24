"""Coordinators share every row of numbers out among them, each by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.ledger.homes import Home, home_among
from coordinator.store.api import Entry


def there(*created: int) -> list[Entry]:
    return [Entry(f"/reach/{number}", b"", revision, revision) for number, revision in enumerate(created)]


@given(st.integers(1, 50), st.integers(0, 2_000))
def test_shares_are_even_and_begin_one_after_another(hosts: int, count: int) -> None:
    firsts = [Home(rank, hosts).first_of(count) for rank in range(hosts)]
    assert firsts == sorted(firsts)
    shares = [after - before for before, after in zip(firsts, [*firsts[1:], count], strict=True)]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1


def test_who_comes_later_is_behind_those_that_were_there_and_moves_none_of_their_ranks() -> None:
    before = [home_among(there(7, 3, 5), f"/reach/{number}").rank for number in range(3)]
    after = [home_among(there(7, 3, 5, 9), f"/reach/{number}").rank for number in range(4)]
    assert before == [2, 0, 1]
    assert after == [2, 0, 1, 3]


def test_one_whose_key_is_not_there_yet_takes_the_place_after_the_last() -> None:
    assert home_among(there(3, 5), "/reach/new") == Home(2, 3)
    assert home_among([], "/reach/new") == Home(0, 1)
