"""What a worker does at the ledger's word, and how its link lives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from coordinator.ledger.states import Proof, SessionState
from coordinator.link import LinkRefused
from pooler.errors import FleetUnreachable, PermitLost
from tests.pool.asking import BACKEND, WISH, Clock, go_down, let_pass, open_one, plain, tell
from tests.pool.fake_coordinator import DB, TTL_SECONDS
from tests.pool.world import world

# -- the ledger's word -------------------------------------------------------------------------------------

async def test_a_permit_marked_unknown_is_reasserted_while_its_session_is_held(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permit = await open_one(w)
        w.ledger.slots[0].state = SessionState.UNKNOWN
        await tell(w, "permit_unknown", permit=plain(permit))
        assert w.ledger.slots[0].state is SessionState.OPEN
        assert w.permits.statistics().reasserted_total == 1


async def test_a_permit_marked_unknown_while_cut_off_is_reasserted_after_hello(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        await open_one(w)
        await go_down(w)
        w.ledger.slots[0].state = SessionState.UNKNOWN
        w.coordinator.down = False
        while w.permits.statistics().reasserted_total == 0:
            await let_pass(0.1)
        assert w.ledger.slots[0].state is SessionState.OPEN


async def test_a_session_that_is_to_be_terminated_is_closed_not_reasserted(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permit = await open_one(w)
        w.ledger.slots[0].state, w.ledger.slots[0].terminating = SessionState.UNKNOWN, True
        await tell(w, "permit_unknown", permit=plain(permit))
        assert w.holder.terminated == [permit]
        assert w.ledger.slots[0].state is SessionState.UNKNOWN


async def test_a_permit_still_connecting_is_brought_back_by_recording_it(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permit = (await w.permits.reserve(WISH, 1.0)).permit
        w.permits.connecting(DB, permit)
        w.ledger.slots[0].state = SessionState.UNKNOWN
        await tell(w, "permit_unknown", permit=plain(permit))
        assert "reassert" not in w.coordinator.heard
        await w.permits.opened(DB, permit, 1, 1, backend=BACKEND)
        assert w.ledger.slots[0].state is SessionState.OPEN


async def test_a_session_whose_permit_is_gone_is_closed_at_once_and_counted(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permit = await open_one(w)
        del w.ledger.slots[0]
        await tell(w, "permit_gone", permit=plain(permit))
        assert w.holder.closed == [permit]
        assert w.permits.statistics().permits_gone_total == 1
        w.permits.released(DB, permit, Proof.EOF)  # its permit is nobody's any more: nothing to tell
        assert w.permits.statistics().errands_open == 0


async def test_while_the_ledger_itself_is_lost_nobody_closes_for_a_missing_permit(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permit = await open_one(w)
        w.coordinator.state = "LOST"
        await tell(w, "ledger", ledger=w.coordinator.ledger_map())
        await tell(w, "permit_gone", permit=plain(permit))
        assert w.holder.closed == []
        assert not w.permits.growth_allowed(DB)
        w.ledger.slots.clear()
        w.coordinator.cut()
        while len(w.coordinator.hellos) < 2 or not w.permits.statistics().linked:
            await let_pass(0.1)
        statistics = w.permits.statistics()
        assert (statistics.held, statistics.permits_gone_total) == ({"OPEN": 1}, 0)


async def test_a_permit_found_gone_when_its_session_closes_is_counted(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permit = await open_one(w)
        w.ledger.slots.clear()
        await w.permits.closing(DB, permit)
        statistics = w.permits.statistics()
        assert (statistics.held, statistics.permits_gone_total) == ({}, 1)


async def test_a_permit_gone_while_connecting_serves_nobody(tmp_path: Path, autojump_clock: Clock) -> None:
    async with world(tmp_path) as w:
        permit = (await w.permits.reserve(WISH, 1.0)).permit
        w.ledger.slots.clear()
        with pytest.raises(PermitLost):
            await w.permits.opened(DB, permit, 1, 1, backend=BACKEND)
        assert w.permits.statistics().permits_gone_total == 1


async def test_closing_does_not_wait_long_for_an_answer(tmp_path: Path, autojump_clock: Clock) -> None:
    async with world(tmp_path) as w:
        permit = await open_one(w)
        w.coordinator.deaf.add("closing")
        began = trio.current_time()
        await w.permits.closing(DB, permit)
        assert trio.current_time() - began <= 1.0


# -- ledgers, growth, the lease ----------------------------------------------------------------------------

async def test_a_lost_link_makes_every_ledger_unreachable_until_the_next_hello(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        assert w.permits.growth_allowed(DB)
        await go_down(w)
        assert not w.permits.growth_allowed(DB)
        assert (w.holder.views[-1].reachable, w.holder.views[-1].epoch) == (False, 7)
        w.coordinator.down = False
        while not w.permits.growth_allowed(DB):
            await let_pass(0.1)
        assert w.holder.views[-1].reachable


@pytest.mark.parametrize("change", [{"reachable": False}, {"state": "RECOVERING"}, {"epoch": None},
                                    {"epoch": {"number": 7, "state": "DRAINING"}}])
async def test_nobody_grows_towards_a_ledger_that_is_not_whole_or_serving(
    tmp_path: Path, autojump_clock: Clock, change: dict[str, Any]
) -> None:
    async with world(tmp_path) as w:
        await tell(w, "ledger", ledger=w.coordinator.ledger_map() | change)
        assert not w.permits.growth_allowed(DB)
        assert not w.permits.growth_allowed("another/write")


async def test_the_lease_is_counted_from_the_sending_of_a_confirmed_heartbeat(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        assert w.permits.lease_left_seconds() == pytest.approx(TTL_SECONDS)
        while w.coordinator.heard.count("heartbeat") < 2:
            await let_pass(0.5)
        assert w.permits.lease_left_seconds() > TTL_SECONDS * 2 / 3 - 0.6
        assert w.permits.statistics().links_lost_total == 0


async def test_a_worker_whose_lease_is_gone_says_hello_again_on_the_same_link(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        w.coordinator.alive = False
        while len(w.coordinator.hellos) < 2:
            await let_pass(0.5)
        assert w.permits.statistics().links_lost_total == 0


async def test_a_coordinator_that_stops_answering_heartbeats_is_left(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        w.coordinator.deaf.add("heartbeat")
        while w.permits.statistics().links_lost_total == 0:
            await let_pass(0.5)
        w.coordinator.deaf.clear()
        while not w.permits.statistics().linked:
            await let_pass(0.5)
        assert len(w.coordinator.hellos) == 2


# -- the rest ----------------------------------------------------------------------------------------------

async def test_the_coordinator_s_requests_reach_the_worker(tmp_path: Path, autojump_clock: Clock) -> None:
    async with world(tmp_path) as w:
        link = w.coordinator.links[-1]
        await tell(w, "shed", pool="orders", user="app", count=2)
        assert w.holder.shed_for == [(DB, "orders", "app", 2)]
        await tell(w, "spare", pool="orders", user="app", count=1)
        assert w.holder.spared_for == [(DB, "orders", "app", 1)]
        assert await link.call("cancel", key=b"12345678") == {}
        assert await link.call("show", what="pools") == {"rows": [["pools", 1]]}
        assert await link.call("command", name="pause", args={}) == {"notices": []}
        assert w.holder.cancelled == [b"12345678", b"pause"]


async def test_a_fault_in_a_handler_is_an_answer_and_the_link_lives(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        with pytest.raises(LinkRefused, match="ValueError"):
            await w.coordinator.links[-1].call("show", what="nonsense")
        assert w.permits.statistics().linked


async def test_fleet_wide_questions_are_answered_or_refused_at_once(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        w.coordinator.answers["fleet"] = {"answers": [{"worker": "a", "value": 1}]}
        w.coordinator.answers["ledger_rows"] = {"rows": [["x"]]}
        assert await w.permits.fleet("show", {"what": "pools"}) == [{"worker": "a", "value": 1}]
        assert await w.permits.ledger_rows() == [["x"]]
        await w.permits.forward_cancel(4, b"12345678")
        w.coordinator.answers["fleet"] = LinkRefused("unknown_operation", "no such")
        with pytest.raises(FleetUnreachable, match="no such"):
            await w.permits.fleet("x", {})
        await go_down(w)
        for ask in (w.permits.ledger_rows(), w.permits.fleet("show", {}), w.permits.forward_cancel(4, b"1")):
            with pytest.raises(FleetUnreachable, match="unreachable"):
                await ask


async def test_a_hello_names_the_epochs_that_the_pools_serve(tmp_path: Path, autojump_clock: Clock) -> None:
    """Its key is not to say that a later one was acknowledged before the answer is here."""
    async with world(tmp_path) as w:
        assert w.coordinator.hellos[0]["epochs"] == {}
        w.coordinator.cut()
        await let_pass(1)
        assert w.coordinator.hellos[1]["epochs"] == {DB: 7}


async def test_an_epoch_is_acknowledged_over_a_lost_link(tmp_path: Path, autojump_clock: Clock) -> None:
    async with world(tmp_path) as w:
        w.coordinator.fault = lambda op, nth: "before" if op == "epoch_ack" and nth < 4 else None
        w.permits.epoch_ack(DB, 8)
        await w.permits.settled()
        assert w.coordinator.heard.count("epoch_ack") == 2


@pytest.mark.parametrize("op", ["release", "unknown", "void"])
async def test_what_the_ledger_cannot_take_now_is_told_again(
    tmp_path: Path, autojump_clock: Clock, op: str
) -> None:
    async with world(tmp_path) as w:
        permit = await open_one(w)
        w.coordinator.answers[op] = LinkRefused("ledger_unavailable", "")
        if op == "release":
            w.permits.released(DB, permit, Proof.EOF)
        elif op == "unknown":
            w.permits.unknown(DB, permit, abandoned=False)
        else:
            w.coordinator.deaf.add("reserve")
            with trio.move_on_after(1):
                await w.permits.reserve(WISH, 10)
        await let_pass(10)
        assert w.permits.statistics().errands_open == 1
        assert w.coordinator.heard.count(op) > 3
        del w.coordinator.answers[op]
        await w.permits.settled()
