"""Strangers at a server: who counts, what is warned of, and when the admin reserve is eaten."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from coordinator.counting import Counting
from coordinator.http import Figures, make_scrape
from coordinator.ledger.invariants import reaper_name
from coordinator.ledger.proofs import Row
from coordinator.ledger.record import Kind, Permit
from coordinator.ledger.states import SessionState
from coordinator.strangers import Census, Ours, Promise, count_strangers, is_eaten, is_over
from tests.coordinator.stage import DB, TTL_SECONDS, Stage, stage
from tests.ledger.ground import BACKEND, KEYS, TAG, session

NODE = BACKEND.address


def stranger(pid: int, user: str = "cron", name: str = "job", client: str | None = "10.0.0.9") -> Row:
    return Row(pid, pid, user, "app", name, "idle", "client backend", client)


async def census_of(on: Stage) -> Census:
    return count_strangers(await on.eyes.look(NODE), Ours.of([await on.ledger.snapshot()]))


async def hold(on: Stage, slot: int, pid: int, kind: Kind = Kind.MAIN) -> Permit:
    held = session(SessionState.OPEN if pid else SessionState.CONNECTING, slot=slot, seat=slot, pid=pid,
                   backend_start_us=pid, request_id=f"{kind}{slot}", kind=kind)
    await on.put(KEYS.session(kind, slot), held.encode())
    return held.permit


async def test_who_has_a_permit_or_its_tag_or_is_no_ordinary_session_is_no_stranger(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        await hold(on, 0, 41)
        opening = await hold(on, 1, 0)
        await hold(on, 0, 43, Kind.ADMIN)
        ours = [stranger(41, "app", "psql"), stranger(42, "app", opening.birth_tag(TAG)),
                stranger(43, "monitor", "x"), stranger(44, "monitor", reaper_name(TAG)),
                replace(stranger(45), backend_type="walsender"),
                replace(stranger(46), backend_type="autovacuum worker")]
        others = [stranger(51), stranger(52), stranger(53, "postgres", "psql", None),
                  replace(stranger(41), backend_start_us=9)]  # the pid of a session of ours, and another one
        on.eyes.server.rows = [*ours, *others]
        on.eyes.server.max_connections, on.eyes.server.reserved_connections = 20, 3
        census = await census_of(on)
        assert census.strangers == 4
        assert census.by_role == {("cron", "10.0.0.9"): 3, ("postgres", "local"): 1}
        assert census.biggest is not None
        assert (census.biggest.user, census.biggest.count) == ("cron", 3)
        # of 17 the two of the pool and four strangers are taken; a command's and the leader's own are not
        assert census.free == 11


def test_more_than_reckoned_with_is_over_and_less_room_than_promised_is_eaten() -> None:
    census = Census("n", free=2, strangers=3)
    assert (is_over(census, Promise(3, 2)), is_over(census, Promise(2, 2))) == (False, True)
    assert (is_eaten(census, Promise(3, 2)), is_eaten(census, Promise(3, 3))) == (False, True)
    assert not is_eaten(Census("n", free=None, strangers=3), Promise(3, 3))
    assert not is_eaten(Census("n", free=0, strangers=0), Promise(3, 3))  # policy_over_server says that


def test_who_is_beyond_the_first_twenty_is_summed_up() -> None:
    census = Census("n", 1, 24, {(f"u{n}", "a"): 1 for n in range(23)} | {("many", "a"): 9})
    assert census.shown()[0] == ("many", "a", 9)
    assert (len(census.shown()), census.shown()[-1]) == (21, ("others", "", 4))


def told(logs: Sequence[MutableMapping[str, Any]], event: str) -> list[MutableMapping[str, Any]]:
    return [line for line in logs if line["event"] == event]


async def test_the_leader_tells_once_names_the_biggest_and_tells_again_after_it_was_over(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        counting = Counting(on.eyes, {DB: on.ledger}, lambda: on.views.views, ttl_seconds=TTL_SECONDS)
        on.eyes.server.max_connections = 3  # adminReserve is 1, otherClients 0
        on.eyes.server.rows = [stranger(51), stranger(52), stranger(53, "postgres", "psql")]
        with capture_logs() as logs:
            on.nursery.start_soon(counting.watch)
            await trio.sleep(3.5 * TTL_SECONDS)  # noqa: TID251 - on a clock that jumps
            (warned,), (page,) = told(logs, "strangers_over_other_clients"), told(logs, "admin_reserve_eaten")
            assert (warned["strangers"], warned["other_clients"], warned["log_level"]) == (3, 0, "warning")
            assert warned["who"][0] == "2 of cron from 10.0.0.9"
            assert {name: page[name] for name in ("user", "application_name", "address", "sessions")} == {
                "user": "cron", "application_name": "job", "address": "10.0.0.9", "sessions": 2}
            assert (page["free"], page["admin_reserve"], page["log_level"]) == (0, 1, "critical")
            text = make_scrape(figures(counting), {}, {}).decode()
            assert f'pooler_admin_reserve_eaten{{node="{NODE}"}} 1.0' in text
            assert f'pooler_server_strangers{{address="10.0.0.9",node="{NODE}",user="cron"}} 2.0' in text
            on.eyes.server.rows = []
            await trio.sleep(TTL_SECONDS)  # noqa: TID251 - on a clock that jumps
            assert f'pooler_admin_reserve_eaten{{node="{NODE}"}} 0.0' in make_scrape(
                figures(counting), {}, {}).decode()
            on.eyes.server.rows = [stranger(61), stranger(62), stranger(63)]
            await trio.sleep(TTL_SECONDS)  # noqa: TID251 - on a clock that jumps
        assert len(told(logs, "admin_reserve_eaten")) == 2


def figures(counting: Counting) -> Figures:
    return Figures(
        leading=True, workers_linked=0, waiting={}, unknown_age_seconds={}, unknown_old={}, released={},
        requests={}, census=tuple(counting.census.values()), eaten=counting.eaten)


async def test_what_was_opened_since_the_ledgers_were_read_is_no_stranger(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        counting = Counting(on.eyes, {DB: on.ledger}, lambda: on.views.views, ttl_seconds=TTL_SECONDS)
        with capture_logs() as logs:
            await counting.count()
            for slot in range(4):
                await hold(on, slot, 41 + slot)
            on.eyes.server.rows = [stranger(41 + slot, "app") for slot in range(4)]
            await counting.count()
            asked = on.store.asked
            await counting.count()
        assert told(logs, "strangers_over_other_clients") == []
        assert on.store.asked == asked  # where nothing moves, nothing is asked of etcd


@pytest.mark.parametrize("wrong", ["void", "unreachable"])
async def test_a_look_that_does_not_count_tells_nothing(
    tmp_path: Path, clock: MockClock, wrong: str
) -> None:
    async with stage(tmp_path) as on:
        counting = Counting(on.eyes, {DB: on.ledger}, lambda: on.views.views, ttl_seconds=TTL_SECONDS)
        on.eyes.server.rows = [stranger(51)]
        on.eyes.server.may_see_all, on.eyes.server.unreachable = wrong != "void", wrong == "unreachable"
        with capture_logs() as logs:
            await counting.count()
        assert (logs, counting.census) == ([], {})
