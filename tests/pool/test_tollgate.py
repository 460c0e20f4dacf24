"""Who waits for tokens is let by at the moment at which they are there, and not before."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from pooler.admission.classes import Book
from pooler.admission.ticket import Ticket
from pooler.pool.tollgate import TollGate


class Pool:
    """Remembers who came by, and when."""

    gate: TollGate

    def __init__(self) -> None:
        self.entered: list[tuple[Ticket, float]] = []

    def enter(self, ticket: Ticket) -> None:
        assert ticket.waiting
        self.ask(ticket)
        self.entered.append((ticket, ticket.queued_at))


    def ask(self, ticket: Ticket) -> Exception | None:
        """As a pool does that has a place for everybody."""
        refused = self.gate.admit(self, ticket)  # type: ignore[arg-type]
        if refused is None and ticket.toll is None:
            self.gate.pay(ticket)
        return refused


def book(now: float, **bucket: Any) -> Book:
    made = Book(lambda klass: None)
    made.learn({"generation": 1, "executionClasses": {"x": {}},
                "tenants": {"a": {"bucket": {"rate": 2.0, "burst": 1.0} | bucket}}}, now)
    return made


def ticket(of: Book, now: float, seconds: float = 60.0) -> Ticket:
    made = Ticket(lambda session: None, lambda error: None, None, of.account("a", "x"))
    made.start(now, now + seconds)
    return made


async def test_each_passes_as_its_token_comes(autojump_clock: trio.testing.MockClock) -> None:
    pool: Any = Pool()
    async with trio.open_nursery() as nursery:
        gate, began = TollGate(nursery, trio.current_time), trio.current_time()
        pool.gate = gate
        of = book(began)
        tickets = [ticket(of, began) for _ in range(5)]
        assert [pool.ask(each) for each in tickets] == [None] * 5
        assert [each.toll is None for each in tickets] == [True] + [False] * 4
    assert [each for each, _ in pool.entered] == tickets[1:]
    assert [round(at - began, 6) for _, at in pool.entered] == [0.5, 1.0, 1.5, 2.0]


async def test_a_policy_without_the_bucket_lets_everybody_by(autojump_clock: trio.testing.MockClock) -> None:
    pool: Any = Pool()
    async with trio.open_nursery() as nursery:
        gate, began = TollGate(nursery, trio.current_time), trio.current_time()
        pool.gate = gate
        of = book(began, rate=0.1)
        tickets = [ticket(of, began) for _ in range(4)]
        for each in tickets:
            assert pool.ask(each) is None
        await wait_all_tasks_blocked()
        of.learn({"generation": 2, "executionClasses": {"x": {}}}, trio.current_time())
        gate.stir()
    assert [each for each, _ in pool.entered] == tickets[1:]
    assert trio.current_time() - began < 1.0


class Nothing:
    """Stands for a nursery: time is moved by hand."""

    def start_soon(self, task: Any) -> None:
        """Not at all."""


@given(st.lists(st.tuples(st.fractions(0, 3, max_denominator=8), st.booleans()), max_size=60))
def test_whoever_waits_or_comes_no_interval_admits_more_than_the_bucket_gives(
    steps: list[tuple[Fraction, bool]]
) -> None:
    pool, gate, now = Pool(), TollGate(Nothing()), Fraction(0)  # type: ignore[arg-type]
    pool.gate = gate
    of = book(now, rate=Fraction(2), burst=Fraction(3), cost=Fraction(1))  # type: ignore[arg-type]
    admitted: list[Fraction] = []
    for wait, asks in steps:
        now += wait
        gate.release(now)  # type: ignore[arg-type]
        if asks:
            made = ticket(of, now)  # type: ignore[arg-type]
            error = pool.ask(made)
            if error is None and made.toll is None:
                admitted.append(now)
        admitted += [at for _, at in pool.entered]  # type: ignore[misc]
        pool.entered.clear()
    for first, since in enumerate(admitted):
        for count, until in enumerate(admitted[first:], 1):
            assert count <= 3 + 2 * (until - since)
