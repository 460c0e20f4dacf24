"""What hello settles: nothing leaks, nothing is taken twice, and nothing of a worker's own is freed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.link import LinkRefused
from tests.coordinator.parts import Worker
from tests.coordinator.stage import DB, Stage, stage
from tests.ledger.ground import FLEET, KEYS


async def reserve(worker: Worker, wait_seconds: float = 0.0, **ask: Any) -> list[Any]:
    permit: list[Any] = (await worker.reserve(wait_seconds, db=DB, **ask))["permit"]
    return permit


async def hello(worker: Worker, *requests: str) -> dict[str, Any]:
    """A hello that lists no permit, and these requests."""
    answer: dict[str, Any] = await worker.call(
        "hello", boot_id=worker.boot_id, index=0, pid=1, pid_start=1, permits=[], requests=list(requests))
    return answer


def receipts(on: Stage) -> list[str]:
    return [key for key in on.keyspace.entries if key.startswith(KEYS.receipts())]


def slots(on: Stage) -> list[str]:
    return [key for key in on.keyspace.entries if key.startswith(KEYS.sessions())]


async def test_a_slot_that_could_not_be_freed_leaves_the_hello_unsettled_until_it_is(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        await reserve(worker)
        on.store.refuses_deletes = True
        assert not (await hello(worker))["registered"]
        assert not (await worker.call("heartbeat"))["alive"]
        on.store.refuses_deletes = False
        assert (await hello(worker))["registered"]
        assert await on.states() == {}


async def test_a_first_hello_is_refused_while_a_slot_cannot_be_freed(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        async with on.worker("A") as worker:
            await reserve(worker)
        await on.restart()
        on.store.refuses_deletes = True
        async with on.worker("B") as worker:
            worker.boot_id = "A"
            with pytest.raises(LinkRefused) as refused:
                await worker.hello()
            assert refused.value.code == "ledger_unavailable"
            on.store.refuses_deletes = False
            await worker.hello()
            assert await on.states() == {}


async def test_a_request_repeated_after_a_lost_lease_takes_no_second_slot(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        async with on.worker("A") as worker:
            await reserve(worker, request_id="r")
        on.expire("A")
        assert receipts(on) == []
        async with on.worker("A") as worker:
            await hello(worker, "r")
            await reserve(worker, request_id="r")
            assert len(await on.states()) == 1


async def test_an_answer_that_is_on_its_way_over_this_link_keeps_its_slot_though_the_lease_was_lost(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        permit = await reserve(worker, request_id="r")  # sent; the hello was written before it arrived
        on.expire("A")
        await hello(worker, "r")
        assert await on.states() == {permit[1]: "SESSION_RESERVED"}
        await worker.call("connecting", db=DB, permit=permit)


@pytest.mark.parametrize("hello_first", [True, False])
async def test_a_grant_that_a_paused_worker_gives_up_is_free_though_its_receipt_went_with_the_lease(
    tmp_path: Path, clock: MockClock, hello_first: bool
) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        await reserve(worker, request_id="r")
        on.expire("A")
        await on.reconcile()
        assert list((await on.states()).values()) == ["SESSION_UNKNOWN"]
        if hello_first:
            await hello(worker, "r")
        await worker.call("void", db=DB, request_id="r")
        assert await on.states() == {}
        await hello(worker)
        await reserve(worker)
        assert len(await on.states()) == 1


async def test_a_wait_whose_first_try_landed_unheard_leaves_no_slot_behind_a_lost_lease(
    tmp_path: Path, clock: MockClock
) -> None:
    codes = []

    async def ask(worker: Worker) -> None:
        try:
            await reserve(worker, 60.0, request_id="r")
        except LinkRefused as refused:
            codes.append(refused.code)

    async with stage(tmp_path) as on, on.worker("A") as worker, trio.open_nursery() as nursery:
        on.store.loses_touch = True
        nursery.start_soon(ask, worker)
        await wait_all_tasks_blocked()
        on.store.loses_touch = on.store.silent = False
        assert len(await on.states()) == 1
        on.expire("A")
        assert not (await worker.call("heartbeat"))["alive"]
        await hello(worker, "r")
        await wait_all_tasks_blocked()
        assert codes == ["voided"]  # the worker asks anew, under another id
        assert await on.states() == {}
        await reserve(worker)
        assert len(await on.states()) == 1


async def test_a_reservation_in_the_pipe_of_a_coordinator_that_died_can_only_lose(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        async with on.worker("A") as worker, trio.open_nursery() as nursery:
            on.store.lifted = trio.Event()
            nursery.start_soon(reserve, worker, 60.0)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        on.life.cancel()
        await wait_all_tasks_blocked()
        assert len(on.store.late) == 1
        late, on.store.late = on.store.late, []
        on.store.lifted.set()
        await on.restart()
        before = on.keyspace.entries[FLEET.worker("A")].mod_revision
        async with on.worker("A"):
            assert on.keyspace.entries[FLEET.worker("A")].mod_revision > before
            on.store.late = late
            await on.store.lift()
            assert await on.states() == {}


async def test_a_receipt_that_cannot_be_read_ends_nothing_but_its_own_request(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        on.store.loses_touch = True
        with pytest.raises(LinkRefused):
            await reserve(worker, request_id="r")  # it is voided in the background from now on
        on.store.loses_touch = on.store.silent = False
        await on.put(KEYS.receipt("r"), b"\x01")
        await trio.sleep(3)  # noqa: TID251 - on a clock that jumps
        assert len(slots(on)) == 1
        await reserve(worker)
        assert len(slots(on)) == 2
