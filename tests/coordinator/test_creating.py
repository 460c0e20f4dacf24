"""The gate before new sessions: so many of a pool and at a server, in turn, and nobody's for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.creating import LINE_MAX, CreateAsk, CreateGate, share_of
from coordinator.ledger.homes import Home
from coordinator.link import Args, LinkRefused
from tests.coordinator.parts import DB, Worker
from tests.coordinator.stage import Stage, stage


def ask(request: str, pool: str = "p", *, boot_id: str = "b", server: str = "s:1", hold: float = 25.0,
        pool_max: int = 2, server_max: int = 8) -> CreateAsk:
    return CreateAsk(boot_id, request, server, ("db", pool, "u"), pool_max, server_max, hold)


def names(asks: list[CreateAsk]) -> list[str]:
    return [each.request_id for each in asks]


def test_first_come_first_served_two_of_a_pool() -> None:
    gate = CreateGate()
    for name in "abcd":
        assert gate.ask(ask(name))
    assert names(gate.let_in(0.0)) == ["a", "b"]
    assert gate.let_in(0.0) == []
    gate.end(("b", "a"))
    assert names(gate.let_in(0.0)) == ["c"]
    gate.end(("b", "d"))  # it does not want to wait any more
    gate.end(("b", "b"))
    assert gate.let_in(0.0) == []
    assert (gate.inside, gate.waiting) == (1, 0)


def test_a_full_pool_holds_up_no_other_and_a_server_takes_eight_of_all() -> None:
    gate = CreateGate()
    for pool in range(6):
        for number in range(3):
            gate.ask(ask(f"{pool}{number}", str(pool)))
    gate.ask(ask("else", "9", server="s:2"))
    assert names(gate.let_in(0.0)) == ["00", "01", "10", "11", "20", "21", "30", "31", "else"]


def test_what_a_dead_worker_had_comes_back_when_its_connect_must_be_over() -> None:
    gate = CreateGate()
    for name in "abc":
        gate.ask(ask(name))
    gate.let_in(10.0)
    assert gate.next_end() == 35.0
    assert gate.let_in(34.9) == []
    assert names(gate.let_in(35.0)) == ["c"]


def test_a_request_said_again_takes_nothing_more_and_the_line_is_bounded() -> None:
    gate = CreateGate()
    assert gate.ask(ask("a"))
    gate.let_in(0.0)
    assert gate.ask(ask("a"))
    assert gate.inside == 1
    gate.ask(ask("b"))
    for number in range(LINE_MAX):
        gate.ask(ask(str(number)))
    assert not gate.ask(ask("one too many"))
    assert gate.waiting == LINE_MAX


@given(st.integers(1, 100), st.integers(1, 40))
def test_hosts_have_a_limit_together_and_each_has_one(limit: int, hosts: int) -> None:
    shares = [share_of(limit, Home(rank, hosts)) for rank in range(hosts)]
    assert min(shares) >= 1
    assert sum(shares) == max(limit, hosts)
    assert max(shares) - min(shares) <= 1


@given(st.lists(st.tuples(st.sampled_from("aek"), st.integers(0, 5), st.integers(0, 3)), max_size=60))
def test_whatever_is_asked_and_ended_the_limits_hold_and_nobody_waits_beside_a_free_place(
    moves: list[tuple[str, int, int]]
) -> None:
    gate, now = CreateGate(), 0.0
    inside: dict[tuple[str, str], CreateAsk] = {}
    for what, number, pool in moves:
        wanted = ask(f"{pool}{number}", str(pool), server_max=5, hold=10.0)
        if what == "a":
            gate.ask(wanted)
        elif what == "e":
            gate.end(wanted.key)
            inside.pop(wanted.key, None)
        else:
            now += 20.0
            inside.clear()
        inside |= {each.key: each for each in gate.let_in(now)}
        assert gate.inside == len(inside) <= 5
        counts = [sum(each.pool[1] == str(of) for each in inside.values()) for of in range(4)]
        assert max(counts) <= 2
        for waits in gate._line.values():
            assert len(inside) == 5 or counts[int(waits.pool[1])] == 2


# ---- over the link


def words(request: str, wait_seconds: float = 5.0, **more: object) -> Args:
    return {"db": DB, "pool": "app", "user": "app", "request_id": request, "pool_max": 2, "server_max": 8,
            "hold_seconds": 25.0, "wait_seconds": wait_seconds, **more}


async def enter(worker: Worker, request: str, wait_seconds: float = 5.0) -> bool:
    answer: Args = await worker.call("create", **words(request, wait_seconds))
    return bool(answer["in"])


async def full(on: Stage, worker: Worker) -> None:
    for request in ("one", "two"):
        assert await enter(worker, request, 0.0)
    assert on.workers.creating.gate.inside == 2


async def test_two_workers_of_a_host_have_two_between_them(tmp_path: Path) -> None:
    async with stage(tmp_path) as on, on.worker("a") as first, on.worker("b") as second:
        assert await enter(first, "one", 0.0)
        assert await enter(second, "one", 0.0)
        assert not await enter(first, "two", 0.0)
        assert on.workers.creating.gate.waiting == 0


async def test_who_waits_is_let_in_as_another_is_through(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with stage(tmp_path) as on, on.worker("a") as first, on.worker("b") as second:
        await full(on, first)
        async with trio.open_nursery() as nursery:
            let_in: list[float] = []

            async def wait() -> None:
                assert await enter(second, "three")
                let_in.append(trio.current_time())

            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            assert let_in == []
            await first.call("created", request_id="one")
        assert len(let_in) == 1


async def test_who_stops_waiting_leaves_nothing_behind(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with stage(tmp_path) as on, on.worker("a") as first:
        await full(on, first)
        assert not await enter(first, "three", 1.0)
        with trio.move_on_after(0.5):
            await enter(first, "four")
        await first.call("created", request_id="four")
        assert (on.workers.creating.gate.waiting, on.workers.creating.gate.inside) == (0, 2)


async def test_what_is_asked_again_keeps_its_place_when_the_first_call_ends(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("a") as first:
        await full(on, first)
        async with trio.open_nursery() as nursery:
            let_in: list[bool] = []

            async def wait(seconds: float) -> None:
                let_in.append(await enter(first, "three", seconds))

            nursery.start_soon(wait, 1.0)
            await wait_all_tasks_blocked()
            nursery.start_soon(wait, 60.0)
            await trio.sleep(2)  # noqa: TID251 - on a clock that jumps
            assert (let_in, on.workers.creating.gate.waiting) == ([False], 1)
            await first.call("created", request_id="two")
        assert let_in == [False, True]


async def test_the_places_of_a_worker_that_is_gone_come_back_with_its_connects(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("b") as second:
        async with on.worker("a") as first:
            await full(on, first)
        begun = trio.current_time()
        assert not await enter(second, "three", 5.0)
        assert await enter(second, "three", 60.0)
        assert 20.0 <= trio.current_time() - begun <= 25.0


async def test_another_host_takes_its_share_and_gives_it_back(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("a") as first:
        on.workers.creating.settle_at(Home(1, 2))
        assert await enter(first, "one", 0.0)
        async with trio.open_nursery() as nursery:
            let_in = trio.Event()

            async def wait() -> None:
                assert await enter(first, "two", 60.0)
                let_in.set()

            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            assert not let_in.is_set()
            on.workers.creating.settle_at(Home(0, 1))


@pytest.mark.parametrize("wrong", [{"pool_max": "many"}, {"wait_seconds": None}])
async def test_what_makes_no_sense_is_refused_and_stands_in_no_line(
    tmp_path: Path, wrong: Args
) -> None:
    async with stage(tmp_path) as on, on.worker("a") as first:
        with pytest.raises(LinkRefused):
            await first.call("create", **{**words("one"), **wrong})
        assert (on.workers.creating.gate.waiting, len(on.workers.creating._let_in)) == (0, 0)
