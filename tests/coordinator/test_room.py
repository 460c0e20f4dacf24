"""Whether the servers have room for the policies: judged for the worst placement, told while it lasts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.ledger.proofs import Look
from coordinator.ledger.record import Backend
from coordinator.policy import Policy, load_policy
from coordinator.room import Demand, Room, crowded
from coordinator.spec import DatabaseSpec, Monitor
from tests.coordinator.parts import policy_text
from tests.coordinator.stage import DB, Server, Stage, stage
from tests.ledger.ground import BACKEND

HERE, THERE = BACKEND.address, "127.0.0.1:5433"


def policy(slots: int, admin: int = 1, db: str = DB, **more: Any) -> Policy:
    return replace(load_policy(policy_text(slots, admin, db))[0], **more)


def look(most: int, reserved: int = 3, start_us: int = 1, address: str = HERE) -> Look:
    return Look(Backend(address, "7", 1, start_us, False), True, True, (), frozenset(), 0, 1, 60.0, True,
                max_connections=most, reserved_connections=reserved)


@pytest.mark.parametrize(("most", "fits"), [(14, True), (13, False), (0, True)])
def test_all_that_a_policy_promises_fits_below_what_is_reserved(most: int, fits: bool) -> None:
    wanted = policy(6, 2, reserve_permits=1, other_clients=2)
    found = crowded([Demand(DB, (HERE,), wanted)], {HERE: look(most)})
    assert (found == {}) == fits
    assert fits or (f"room for 10 sessions (max_connections 13, 3 of them reserved), "
                    f"but the policies want {DB} 11 sessions") in found[DB]


def test_ledgers_that_may_meet_at_one_server_are_summed_and_named() -> None:
    write, read = Demand("a/write", (HERE, THERE), policy(5)), Demand("a/read", (THERE,), policy(5))
    looks = {HERE: look(13), THERE: look(13, start_us=2, address=THERE)}
    found = crowded([write, read], looks)
    assert found.keys() == {"a/write", "a/read"}
    assert f"{THERE} has room for 10" in found["a/write"]
    assert "a/write 6 + a/read 6 sessions" in found["a/read"]
    assert crowded([write, replace(read, hosts=("127.0.0.1:9",))], looks) == {}  # not seen: not judged


def test_two_addresses_of_one_server_are_one_server() -> None:
    demands = [Demand("a/write", (HERE,), policy(5)), Demand("b/write", (THERE,), policy(5))]
    assert crowded(demands, {HERE: look(13), THERE: look(13, address=THERE)}).keys() == {"a/write", "b/write"}


def test_one_ledger_at_two_addresses_of_one_server_counts_once() -> None:
    looks = {HERE: look(13), THERE: look(13, address=THERE)}
    assert crowded([Demand(DB, (HERE, THERE), policy(9))], looks) == {}


def test_a_hard_limit_above_what_the_server_has_is_named() -> None:
    found = crowded([Demand(DB, (HERE,), policy(5, hard_connection_limit=11))], {HERE: look(13)})
    assert "hardConnectionLimit of orders/write is 11" in found[DB]


def room_of(on: Stage) -> Room:
    spec = DatabaseSpec(DB, "shop", "app", (HERE,), "write", None, Monitor("m", "p"))
    room = Room(on.eyes, {DB: (spec,)}, lambda: on.views.views)
    on.views.on_change.append(room.heard)
    return room


async def pass_time(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


async def test_the_leader_tells_of_a_policy_that_is_too_large_and_of_its_end(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        on.eyes.server.max_connections = 4  # 4 permits and an admin reserve of 1
        room, told = room_of(on), []
        room.on_change.append(lambda: told.append(dict(room.crowded)))
        with capture_logs() as logs:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(room.watch)
                await pass_time(1)
                assert f"{DB} 5 sessions" in room.crowded[DB]
                await pass_time(3601)  # said once while it stands
                on.eyes.server.max_connections = 5
                await pass_time(3601)
                assert room.crowded == {}
                on.eyes.server.max_connections = 4
                await pass_time(3601)
                nursery.cancel_scope.cancel()
        assert [line["log_level"] for line in logs if line["event"] == "policy_over_server"] == ["error"] * 2
        assert [bool(each) for each in told] == [True, False, True, False]  # and none after its term


async def test_a_change_of_epoch_is_judged_at_once_and_its_server_too(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        on.eyes.server.max_connections = 5
        on.eyes.servers[THERE] = Server(replace(BACKEND, postmaster_start_us=9), max_connections=4)
        room = room_of(on)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(room.watch)
            await pass_time(1)
            assert room.crowded == {}
            view = on.views.views[DB]
            assert view.epoch is not None
            moved = replace(view, epoch=replace(view.epoch, number=2, backend=Backend(THERE)))
            on.views.views[DB] = moved
            room.heard(moved)
            await wait_all_tasks_blocked()
            assert f"{THERE} has room for 4" in room.crowded[DB]
            nursery.cancel_scope.cancel()


async def test_a_server_out_of_reach_is_judged_as_it_was_last_seen(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        on.eyes.server.max_connections = 4
        room = room_of(on)
        assert await room.check()
        on.eyes.server.unreachable = True
        assert not await room.check()
        assert room.crowded
