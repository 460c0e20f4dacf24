"""What a worker says of its sessions when their ledger is rebuilt, and how they take their new permits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coordinator.ledger.living import Living
from coordinator.ledger.record import Kind, Permit
from coordinator.ledger.states import Proof
from tests.pool.asking import BACKEND, WISH, Clock, open_one, plain, tell
from tests.pool.fake_coordinator import DB
from tests.pool.world import World, world

NEW = Permit(Kind.MAIN, 3, 1_000_000)


async def ask(w: World, op: str, **args: Any) -> Any:
    return await w.coordinator.links[-1].call(op, db=DB, **args)


def as_held(permit: Permit) -> Living:
    return Living(permit, "orders", "app", 10, 4711, 1_790_000_000_000_000, BACKEND, 7)


async def open_held(w: World) -> Permit:
    permit = await open_one(w)
    w.holder.open.append(as_held(permit))
    return permit


async def test_it_names_every_open_session_with_its_server_process(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permit = await open_held(w)
        answer = await ask(w, "recover")
        (session,) = answer["sessions"]
        assert session["permit"] == plain(permit)
        assert (session["pid"], session["backend_start_us"]) == (4711, 1_790_000_000_000_000)
        assert session["backend"]["address"] == BACKEND.address
        assert (session["dbname"], session["user"], session["seats"], session["epoch"]) == (
            "orders", "app", 10, 7)
        assert (answer["opening"], answer["permits"]) == (0, [plain(permit)])


async def test_what_is_being_opened_or_closed_is_no_session_yet_or_any_more(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        closing, opening = await open_held(w), (await w.permits.reserve(WISH, 1.0)).permit
        await w.permits.closing(DB, closing)
        answer = await ask(w, "recover")
        assert (answer["sessions"], answer["opening"]) == ([], 1)
        assert sorted(answer["permits"]) == sorted([plain(closing), plain(opening)])
        w.permits.released(DB, opening, Proof.UNUSED)
        assert (await ask(w, "recover"))["opening"] == 0


async def test_a_session_stands_under_its_new_permit_from_then_on(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permit = await open_held(w)
        assert await ask(w, "moved", moves=[[plain(permit), plain(NEW)]]) == {"lost": []}
        assert w.holder.moved == [(permit, NEW)]
        assert w.permits.statistics().held == {"OPEN": 1}
        await tell(w, "permit_gone", permit=plain(permit))
        assert w.holder.closed == [], "the old one is nobody's"
        await tell(w, "permit_gone", permit=plain(NEW))
        assert w.holder.closed == [NEW]


async def test_a_session_that_ended_meanwhile_is_said_to_be_lost(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permit = await open_held(w)
        await ask(w, "recover")
        w.holder.held.clear()
        assert await ask(w, "moved", moves=[[plain(permit), plain(NEW)]]) == {"lost": [plain(NEW)]}
        assert w.holder.moved == []


async def test_a_session_that_got_no_slot_is_closed(tmp_path: Path, autojump_clock: Clock) -> None:
    async with world(tmp_path) as w:
        permit = await open_held(w)
        assert await ask(w, "moved", moves=[[plain(permit), None]]) == {"lost": []}
        assert w.holder.terminated == [permit]
