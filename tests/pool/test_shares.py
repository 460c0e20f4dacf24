"""A worker's shares of execution permits: what it keeps to, gives back and tells."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.link import Args, LinkRefused
from pooler.admission.classes import Classes, ExecutionClass
from pooler.admission.ticket import Ticket
from pooler.pool.errands import Errands
from pooler.pool.shares import Shares

POLICY = {"generation": 1, "executionClasses": {"x": {"permits": 8}, "y": {"permits": 4}}}


@dataclass
class FakeUplink:
    """Notes what is told; `share_lower` is answered when the test says so."""

    linked: bool = True
    told: list[Args] = field(default_factory=list)
    lowered: list[Args] = field(default_factory=list)
    answer: list[int] | LinkRefused | None = None
    answers: trio.Event = field(default_factory=trio.Event)

    def notify(self, op: str, /, **args: Any) -> None:
        self.told.append(args)

    async def insist(self, op: str, /, **args: Any) -> Args:
        self.lowered.append(args)
        await self.answers.wait()
        self.answers = trio.Event()
        if isinstance(self.answer, LinkRefused):
            raise self.answer
        return {"share": self.answer}


@dataclass
class Bench:
    uplink: FakeUplink
    shares: Shares
    classes: Classes

    @property
    def x(self) -> ExecutionClass:
        return self.classes.of("db").classes["x"]

    def execute(self, tenant: str = "t", class_name: str = "x") -> Ticket:
        ticket = Ticket(lambda _: None, lambda _: None,
                        account=self.classes.of("db").account(tenant, class_name))
        ticket.start(0.0, 1.0)
        assert ticket.bind(object())
        return ticket

    async def answer(self, share: list[int] | LinkRefused) -> None:
        self.uplink.answer = share
        self.uplink.answers.set()
        await wait_all_tasks_blocked()

    def wanted(self) -> list[dict[str, dict[str, list[int]]]]:
        """By class and tenant, each word of it."""
        return [{name: each["tenants"] for name, each in args["classes"].items()} for args in
                self.uplink.told]


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    uplink, classes = FakeUplink(), Classes()
    errands = Errands(uplink)  # type: ignore[arg-type]
    shares = Shares(uplink, errands)
    shares.count_in(classes)
    classes.of("db").learn(POLICY)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shares.run)
        nursery.start_soon(errands.run)
        yield Bench(uplink, shares, classes)
        nursery.cancel_scope.cancel()


async def test_where_nothing_was_said_all_permits_of_the_class_count(autojump_clock: MockClock) -> None:
    async with bench() as on:
        on.shares.greeted(None)
        assert on.x.allotted == 8
        on.shares.greeted({"db": {"y": [1, 1, 5]}})
        assert (on.x.allotted, on.classes.of("db").classes["y"].allotted) == (8, 1)
        assert on.shares.report() == {"db": {"y": 1}}


async def test_an_answer_without_shares_leaves_them_as_they_are(autojump_clock: MockClock) -> None:
    async with bench() as on:
        on.shares.greeted({"db": {"x": [3, 3, 5]}})
        on.shares.greeted(None)
        assert on.x.allotted == 3


async def test_a_share_holds_over_another_policy_and_may_have_loans(autojump_clock: MockClock) -> None:
    async with bench() as on:
        on.shares.hear("db", "x", [10, 10, 5])
        on.classes.of("db").learn({**POLICY, "generation": 2})
        on.shares.learned("db")
        assert on.x.allotted == 10


async def test_an_older_word_is_not_believed(autojump_clock: MockClock) -> None:
    async with bench() as on:
        on.shares.hear("db", "x", [3, 3, 5])
        on.shares.hear("db", "x", [8, 8, 4])
        assert on.x.allotted == 3


async def test_what_is_recalled_is_given_back_as_transactions_end(autojump_clock: MockClock) -> None:
    async with bench() as on:
        on.shares.hear("db", "x", [4, 4, 5])
        tickets = [on.execute() for _ in range(3)]
        on.shares.hear("db", "x", [4, 1, 6])
        await wait_all_tasks_blocked()
        assert on.x.allotted == 1  # nobody begins above what is kept, before anything is given
        assert [each["to"] for each in on.uplink.lowered] == [3]  # what nobody executes on goes at once
        tickets[0].release()
        await on.answer([3, 1, 7])
        assert [each["to"] for each in on.uplink.lowered] == [3, 2]
        await on.answer([2, 1, 8])
        assert len(on.uplink.lowered) == 2
        tickets[1].release()
        await wait_all_tasks_blocked()
        await on.answer([1, 1, 9])
        assert ([each["to"] for each in on.uplink.lowered], on.x.allotted) == ([3, 2, 1], 1)
        assert on.shares.report() == {"db": {"x": 1}}


async def test_what_is_heard_while_giving_back_holds_only_if_it_is_newer(autojump_clock: MockClock) -> None:
    for heard, allotted in (([4, 4, 6], 1), ([5, 5, 9], 5)):
        async with bench() as on:
            on.shares.hear("db", "x", [4, 1, 5])
            await wait_all_tasks_blocked()
            on.shares.hear("db", "x", heard)
            assert on.x.allotted == 1
            await on.answer([1, 1, 8])
            assert on.x.allotted == allotted


async def test_a_hello_settles_what_was_being_given_back(autojump_clock: MockClock) -> None:
    async with bench() as on:
        on.shares.hear("db", "x", [4, 1, 5])
        await wait_all_tasks_blocked()
        assert on.shares.report() == {"db": {"x": 1}}
        on.shares.greeted({"db": {"x": [1, 1, 9]}})
        await on.answer([4, 1, 5])  # of a link before
        assert (on.x.allotted, len(on.uplink.lowered)) == (1, 1)


async def test_a_refusal_leaves_it_with_what_it_uses_and_asks_no_more(autojump_clock: MockClock) -> None:
    async with bench() as on:
        on.shares.hear("db", "x", [4, 1, 5])
        await wait_all_tasks_blocked()
        await on.answer(LinkRefused("bad_request", "it cannot be read"))
        assert (on.x.allotted, len(on.uplink.lowered)) == (1, 1)
        on.shares.hear("db", "x", [2, 2, 6])
        assert on.x.allotted == 2


async def test_demand_is_told_in_steps_and_not_while_nothing_moves(autojump_clock: MockClock) -> None:
    async with bench() as on:
        await trio.sleep(10)  # noqa: TID251 - the clock jumps
        assert on.wanted() == []
        began = trio.current_time()
        tickets = [on.execute()]
        await wait_all_tasks_blocked()
        assert trio.current_time() == began
        assert on.wanted() == [{"x": {"t": [1, 0, 1]}}]
        tickets += [on.execute(), on.execute("u")]
        await trio.sleep(0.2)  # noqa: TID251 - the clock jumps
        assert on.wanted()[1:] == [{"x": {"t": [1, 0, 2], "u": [1, 0, 1]}}]
        for each in tickets:
            each.release()
        await trio.sleep(10)  # noqa: TID251 - the clock jumps
        assert on.wanted()[2:] == [{}]


async def test_a_pause_between_two_transactions_is_no_news(autojump_clock: MockClock) -> None:
    async with bench() as on:
        ticket = on.execute()
        await trio.sleep(1)  # noqa: TID251 - the clock jumps
        for _ in range(20):
            ticket.release()
            await trio.sleep(0.01)  # noqa: TID251 - the clock jumps
            ticket = on.execute()
            await trio.sleep(0.03)  # noqa: TID251 - the clock jumps
        assert on.wanted() == [{"x": {"t": [1, 0, 1]}}]


async def test_a_new_link_is_told_all_of_it(autojump_clock: MockClock) -> None:
    async with bench() as on:
        on.uplink.linked = False
        ticket = on.execute()
        await trio.sleep(1)  # noqa: TID251 - the clock jumps
        assert on.wanted() == []
        on.uplink.linked = True
        on.shares.greeted(None)
        await trio.sleep(1)  # noqa: TID251 - the clock jumps
        assert on.wanted() == [{"x": {"t": [1, 0, 1]}}]
        ticket.release()
