"""Turns: however many logins are ready at once, others have the loop in between."""

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked

from pooler.net.turns import Turns


async def test_no_more_than_so_many_go_on_at_one_turn_and_first_come_is_first_served() -> None:
    turns, log = Turns(4), list[object]()
    began, ended = trio.Event(), trio.Event()

    async def login(number: int) -> None:
        await began.wait()
        await turns.take()
        log.append(number)

    async def relay() -> None:
        """Has one turn in each turn of the loop."""
        while not ended.is_set():
            log.append("turn")
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as logins:
            for number in range(100):
                logins.start_soon(login, number)
            await wait_all_tasks_blocked()
            nursery.start_soon(relay)
            began.set()
        ended.set()
    runs = "".join("T" if entry == "turn" else "l" for entry in log).split("T")
    assert max(map(len, runs)) <= 2 * 4  # two turns of logins may stand between two of the relay's
    assert sorted(entry for entry in log if isinstance(entry, int)) == list(range(100))


async def test_a_lone_login_goes_on_at_once() -> None:
    turns = Turns(4)
    for _ in range(20):
        await turns.take()
        await wait_all_tasks_blocked()


async def test_who_leaves_the_line_takes_no_turn_from_others() -> None:
    turns, passed = Turns(1), list[int]()

    async def login(number: int) -> None:
        await turns.take()
        passed.append(number)

    async with trio.open_nursery() as stay, trio.open_nursery() as leave:
        for number in range(10):
            leave.start_soon(login, number)
        await trio.lowlevel.checkpoint()
        stay.start_soon(login, 99)
        leave.cancel_scope.cancel()
    assert 99 in passed


def test_it_serves_another_run_as_it_served_the_first() -> None:
    turns = Turns(1)

    async def crowd() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(turns.take)

    for _ in range(3):
        trio.run(crowd)
