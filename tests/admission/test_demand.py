"""What a worker's clients want, and when it is told: more at once, less as it has stayed so."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from pooler.admission.classes import FOREVER
from pooler.admission.demand import Lingering, demand_of, message, sums
from tests.admission.yard import Yard

FALL_SECONDS = 0.125  # as all times here: exact


def wanted(**tickets: int) -> dict[str, dict[str, list[int]]]:
    return {"x": {tenant: [1, 0, count] for tenant, count in tickets.items() if count}}


moves = some.lists(some.tuples(
    some.fixed_dictionaries({"t": some.integers(0, 4), "u": some.integers(0, 4)}),
    some.sampled_from([0.015625, 0.0625, 0.125, 0.5])), max_size=30)


@given(moves)
def test_who_wants_more_is_told_at_once_and_in_the_end_all_is_as_it_is(
    steps: list[tuple[dict[str, int], float]]
) -> None:
    linger, at, told, now = Lingering(FALL_SECONDS), 0.0, wanted(), wanted()
    for tickets, seconds in [*steps, ({"t": 1, "u": 0}, 0.0)]:
        now, at = wanted(**tickets), at + seconds
        news, again = linger.look(now, at)
        told = told if news is None else news
        assert all(count <= sums(told)[key] for key, count in sums(now).items())
    looks = 0
    while again != FOREVER:
        at, looks = at + again, looks + 1
        news, again = linger.look(now, at)
        told = told if news is None else news
        assert looks <= 3  # nothing goes on by itself
    assert sums(told) == sums(now)


def test_a_pause_is_no_news_and_an_end_is() -> None:
    linger = Lingering(FALL_SECONDS)
    assert linger.look(wanted(t=2), 0.0) == (wanted(t=2), FOREVER)
    assert linger.look(wanted(t=1), 1.0) == (None, FALL_SECONDS)
    assert linger.look(wanted(t=2), 1.0625) == (None, FOREVER)
    assert linger.look(wanted(), 2.0) == (None, FALL_SECONDS)
    assert linger.look(wanted(), 2.0 + FALL_SECONDS) == (wanted(), FOREVER)


def test_a_move_between_the_queue_and_execution_is_no_news() -> None:
    linger = Lingering(FALL_SECONDS)
    linger.look({"x": {"t": [1, 2, 1]}}, 0.0)
    assert linger.look({"x": {"t": [1, 1, 2]}}, 1.0) == (None, FOREVER)


def test_of_each_tenant_counts_who_waits_and_who_executes() -> None:
    yard = Yard({"generation": 1, "executionClasses": {"a": {"permits": 1}, "b": {"permits": 2}},
                 "tenants": {"heavy": {"weight": 3}}}, 4)
    clients = [yard.asks(tenant) for tenant in ("heavy", "heavy", "light", "heavy")]
    yard.asks("light", "b")
    found = demand_of(yard.book)
    assert found == {"a": {"heavy": [3, 2, 1], "light": [1, 1, 0]}, "b": {"light": [1, 0, 1]}}
    assert message(yard.book, found, 2.0)["a"]["oldest_seconds"] == 2.0
    assert message(yard.book, found, 2.0)["b"]["oldest_seconds"] == 0.0
    yard.end(clients[0])
    assert demand_of(yard.book)["a"] == {"heavy": [3, 1, 1], "light": [1, 1, 0]}


def test_a_class_tells_of_a_move_once_until_it_is_armed_again() -> None:
    yard = Yard({"generation": 1, "executionClasses": {"a": {"permits": 2}}}, 4)
    moves = list[str]()
    yard.classes.listen(lambda ledger, klass: moves.append(klass.name))
    (klass,) = yard.book.classes.values()
    clients = [yard.asks("t"), yard.asks("t")]
    assert moves == ["a"]
    klass.arm()
    yard.asks("t")  # it lacks room
    assert moves == ["a", "a"]
    klass.arm()
    yard.end(clients[0])
    assert len(moves) == 3
    yard.check()
