"""Any number of cancel requests for one client are two, and each is answered by one that began after it."""

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked

from pooler.relay.turns import Turns


class Acts:
    """Each act waits to be let go; how many began and ended."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self._go = trio.Event()

    async def __call__(self) -> None:
        self.begun += 1
        await self._go.wait()
        self.ended += 1

    async def let_go(self) -> None:
        self._go.set()
        self._go = trio.Event()
        await wait_all_tasks_blocked()


async def test_a_storm_for_one_client_is_one_now_and_one_behind_it(nursery: trio.Nursery) -> None:
    turns, act = Turns(nursery), Acts()
    answered: list[int] = []

    async def ask(number: int) -> None:
        await turns.take(b"key", act)
        answered.append(number)

    nursery.start_soon(ask, 0)
    await wait_all_tasks_blocked()
    for number in range(1, 2_001):
        nursery.start_soon(ask, number)
    await wait_all_tasks_blocked()
    assert act.begun == 1
    await act.let_go()
    assert (answered, act.begun) == ([0], 2)
    await act.let_go()
    assert sorted(answered) == list(range(2_001))
    assert (act.begun, act.ended, len(turns)) == (2, 2, 0)


async def test_clients_do_not_wait_for_each_other(nursery: trio.Nursery) -> None:
    turns, act = Turns(nursery), Acts()
    for key in (b"one", b"two", b"three"):
        nursery.start_soon(turns.take, key, act)
    await wait_all_tasks_blocked()
    assert act.begun == 3
    await act.let_go()


async def test_who_asked_may_leave_and_what_he_asked_for_goes_on(nursery: trio.Nursery) -> None:
    turns, act = Turns(nursery), Acts()
    with trio.move_on_after(0):
        await turns.take(b"key", act)
    await wait_all_tasks_blocked()
    await act.let_go()
    assert (act.begun, act.ended, len(turns)) == (1, 1, 0)


async def test_a_fault_ends_its_own_request_alone(nursery: trio.Nursery) -> None:
    turns, act = Turns(nursery), Acts()

    async def faulty() -> None:
        raise RuntimeError("unforeseen")

    await turns.take(b"key", faulty)
    nursery.start_soon(turns.take, b"key", act)
    await wait_all_tasks_blocked()
    assert act.begun == 1
    await act.let_go()
