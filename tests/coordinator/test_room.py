"""Whether the servers have room for the policies: judged for the worst placement, told while it lasts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from coordinator.ledger.proofs import Look
from coordinator.ledger.record import Backend
from coordinator.link import LinkRefused
from coordinator.link_values import parse_permit
from coordinator.placement import Demand, crowded
from coordinator.policy import Policy, load_policy
from coordinator.room import Room
from coordinator.spec import DatabaseSpec, Monitor
from coordinator.store.api import unchanged
from tests.coordinator.parts import policy_text
from tests.coordinator.stage import DB, NO_FENCE, Server, Stage, stage
from tests.ledger.ground import BACKEND, FLEET, KEYS, NOW_US

HERE, THERE = BACKEND.address, "127.0.0.1:5433"


def policy(slots: int, admin: int = 1, db: str = DB, **more: Any) -> Policy:
    return replace(load_policy(policy_text(slots, admin, db))[0], **more)


def look(
    most: int, reserved: int = 3, start_us: int = 1, address: str = HERE, walsenders: int = 10
) -> Look:
    return Look(Backend(address, "7", 1, start_us, False), True, True, (), frozenset(), 0, 1, 60.0, True,
                max_connections=most, reserved_connections=reserved, max_wal_senders=walsenders)


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


def room_of(on: Stage, hosts: tuple[str, ...] = (HERE,)) -> Room:
    spec = DatabaseSpec(DB, "shop", "app", hosts, "write", None, Monitor("m", "p"))
    room = Room(on.store, FLEET, on.eyes, {DB: (spec,)}, lambda: on.views.views, now_us=lambda: NOW_US)
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
                nursery.start_soon(room.watch, NO_FENCE)
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
            nursery.start_soon(room.watch, NO_FENCE)
            await pass_time(1)
            assert room.crowded == {}
            view = on.views.views[DB]
            assert view.epoch is not None
            await on.put(KEYS.epoch(), replace(view.epoch, number=2, backend=Backend(THERE)).encode())
            on.views.hint()
            await pass_time(1)
            assert f"{THERE} has room for 4" in room.crowded[DB]
            nursery.cancel_scope.cancel()


async def test_a_server_out_of_reach_is_judged_as_it_was_last_seen(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        on.eyes.server.max_connections = 4
        room = room_of(on)
        assert await room.check(NO_FENCE)
        on.eyes.server.unreachable = True
        assert not await room.check(NO_FENCE)
        assert room.crowded


async def test_while_a_server_has_no_room_nothing_is_granted_and_what_is_open_serves_on(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        room = room_of(on)
        held = await worker.reserve(db=DB)
        on.eyes.server.max_connections = 4
        await room.check(NO_FENCE)
        on.views.hint()
        await pass_time(1)
        assert f"{DB} 5 sessions" in worker.ledgers[DB]["growth"]
        with pytest.raises(LinkRefused, match="has room for 4") as refused:
            await worker.reserve(db=DB)
        assert refused.value.code == "no_growth"
        assert await on.states() == {parse_permit(held["permit"]).slot: "SESSION_RESERVED"}
        on.eyes.server.max_connections = 5
        await room.check(NO_FENCE)
        on.views.hint()
        await pass_time(1)
        assert on.views.views[DB].growth == ""
        await worker.reserve(db=DB)


async def test_what_another_leader_found_holds_until_a_server_is_seen_again(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        on.eyes.server.max_connections = 4
        await room_of(on).check(NO_FENCE)
        on.eyes.server.unreachable = True
        await room_of(on).check(NO_FENCE)
        assert KEYS.growth() in on.keyspace.entries
        on.eyes.server.unreachable, on.eyes.server.max_connections = False, 5
        await room_of(on).check(NO_FENCE)
        assert KEYS.growth() not in on.keyspace.entries


async def test_a_leader_whose_config_names_another_cluster_says_so_once_and_stops_nothing(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        other = replace(BACKEND, address=THERE, system_identifier="another", postmaster_start_us=9)
        on.eyes.servers[THERE] = Server(other, max_connections=4)
        room = room_of(on, hosts=(HERE, THERE))
        with capture_logs() as logs:
            await room.check(NO_FENCE)
            await room.check(NO_FENCE)
        assert room.crowded == {}
        assert KEYS.growth() not in on.keyspace.entries
        assert f"{THERE} is another cluster" in room.foreign[DB]
        (line,) = [each for each in logs if each["event"] == "host_of_another_cluster"]
        assert (line["log_level"], line["database"]) == ("error", DB)


async def test_a_look_at_another_cluster_ends_no_stop_that_another_leader_found(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        on.eyes.server.max_connections = 4
        await room_of(on).check(NO_FENCE)
        on.eyes.server.unreachable = True
        other = replace(BACKEND, address=THERE, system_identifier="another", postmaster_start_us=9)
        on.eyes.servers[THERE] = Server(other, max_connections=400)
        await room_of(on, hosts=(HERE, THERE)).check(NO_FENCE)
        assert KEYS.growth() in on.keyspace.entries


async def test_who_does_not_lead_any_more_changes_nothing(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        on.eyes.server.max_connections = 4
        await room_of(on).check(unchanged(FLEET.leader(), 1))
        assert KEYS.growth() not in on.keyspace.entries
