"""The worker's end of the link: what it asks, what it repeats, and what it does at the ledger's word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from coordinator.ledger.record import Backend, Kind, Permit
from coordinator.ledger.states import Proof, SessionState
from coordinator.link import LinkRefused
from pooler.errors import FleetUnreachable, NoPermit, PermitLost
from pooler.pool.permits import Granted, Wish
from tests.pool.fake_coordinator import DB, TTL_SECONDS
from tests.pool.world import World, world

Clock = trio.testing.MockClock
WISH = Wish(DB, Kind.MAIN, "orders", "app", 10)
BACKEND = Backend("10.0.0.1:5432", "7300000000000000001", 1, 1_780_000_000_000_000)


async def _open(w: World) -> Permit:
    granted = await w.permits.reserve(WISH, 1.0)
    w.permits.connecting(DB, granted.permit)
    await w.permits.opened(DB, granted.permit, 4711, 1_790_000_000_000_000, backend=BACKEND)
    w.holder.held.add((DB, granted.permit))
    return granted.permit


async def _tell(w: World, op: str, **args: Any) -> None:
    w.coordinator.links[-1].notify(op, db=DB, **args)
    await trio.testing.wait_all_tasks_blocked()


def _plain(permit: Permit) -> list[Any]:
    return [str(permit.kind), permit.slot, permit.generation]


# -- reserving ---------------------------------------------------------------------------------------------

async def test_a_grant_carries_all_that_a_connect_needs(tmp_path: Path, autojump_clock: Clock) -> None:
    async with world(tmp_path) as w:
        granted = await w.permits.reserve(WISH, 1.0)
        assert granted == Granted(Permit(Kind.MAIN, 0, 101), 7, w.server.address, "pooler:abcdefgh:m0.101")
        assert w.permits.statistics().held == {"SESSION_RESERVED": 1}


@pytest.mark.parametrize("code", ["full", "seats_full", "draining"])
async def test_a_refusal_is_told_by_its_reason_and_leaves_nothing_to_void(
    tmp_path: Path, autojump_clock: Clock, code: str
) -> None:
    async with world(tmp_path) as w:
        w.coordinator.answers["reserve"] = LinkRefused(code, "held by others")
        with pytest.raises(NoPermit, match="held by others") as caught:
            await w.permits.reserve(WISH, 1.0)
        assert caught.value.reason == code
        statistics = w.permits.statistics()
        assert (statistics.refused_total, statistics.voided_total) == ({code: 1}, 0)


async def test_a_request_whose_outcome_nobody_knows_is_voided(tmp_path: Path, autojump_clock: Clock) -> None:
    async with world(tmp_path) as w:
        w.coordinator.answers["reserve"] = LinkRefused("ledger_unavailable", "etcd does not answer")
        with pytest.raises(NoPermit, match="etcd"):
            await w.permits.reserve(WISH, 1.0)
        await w.permits.settled()
        assert list(w.ledger.receipts.values()) == [None]
        w.check()


async def test_a_request_that_is_not_answered_ends_in_time_and_is_voided(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        w.coordinator.deaf.add("reserve")
        began = trio.current_time()
        with pytest.raises(NoPermit, match="no answer"):
            await w.permits.reserve(WISH, 1.0)
        assert trio.current_time() - began == pytest.approx(6.0)
        await w.permits.settled()
        assert list(w.ledger.receipts.values()) == [None]


async def test_a_void_request_id_is_followed_by_another(tmp_path: Path, autojump_clock: Clock) -> None:
    async with world(tmp_path) as w:
        asked: list[str] = []
        reserve = w.ledger.reserve

        def void_once(args: dict[str, Any]) -> Any:
            asked.append(args["request_id"])
            if len(asked) == 1:
                raise LinkRefused("voided", "")
            return reserve(args)

        w.ledger.reserve = void_once  # type: ignore[method-assign]
        await w.permits.reserve(WISH, 1.0)
        assert len(set(asked)) == 2


async def test_without_a_link_one_try_is_refused_at_once_and_a_wait_at_its_end(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        await _go_down(w)
        for wait in (0.0, 3.0):
            began = trio.current_time()
            with pytest.raises(NoPermit, match="unreachable") as caught:
                await w.permits.reserve(WISH, wait)
            assert caught.value.reason == "unreachable"
            assert trio.current_time() - began == pytest.approx(wait)


async def test_a_wait_outlives_a_link_that_comes_back(tmp_path: Path, autojump_clock: Clock) -> None:
    async with world(tmp_path) as w:
        await _go_down(w)
        async with trio.open_nursery() as nursery:
            granted: list[Granted] = []

            async def ask() -> None:
                granted.append(await w.permits.reserve(WISH, 30.0))

            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            w.coordinator.down = False
        assert granted[0].permit.slot == 0


async def _go_down(w: World) -> None:
    w.coordinator.down = True
    w.coordinator.cut()
    await trio.testing.wait_all_tasks_blocked()
    assert not w.permits.statistics().linked


# -- what the ledger must learn ----------------------------------------------------------------------------

async def test_ends_told_without_a_link_are_told_when_it_is_back(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permits = [await _open(w) for _ in range(3)]
        await _go_down(w)
        w.permits.released(DB, permits[0], Proof.EOF)
        w.permits.released(DB, permits[0], Proof.EOF)
        w.permits.unknown(DB, permits[1], abandoned=False)
        assert w.permits.statistics().errands_open == 2
        w.coordinator.down = False
        await w.permits.settled()
        assert w.ledger.releases == [(permits[0], Proof.EOF)]
        assert w.ledger.slots[1].state is SessionState.UNKNOWN
        assert w.ledger.slots[2].state is SessionState.OPEN


async def test_hello_lists_every_permit_also_those_whose_end_was_not_answered_yet(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permits = [await _open(w) for _ in range(3)]
        w.permits.unknown(DB, permits[1], abandoned=False)
        await w.permits.settled()
        await _go_down(w)
        w.permits.released(DB, permits[0], Proof.EOF)
        w.coordinator.down = False
        await w.permits.settled()
        listed = {tuple(each["permit"]): each["state"] for each in w.coordinator.hellos[-1]["permits"]}
        assert set(listed) == {tuple(_plain(permit)) for permit in permits}
        assert listed[tuple(_plain(permits[1]))] == "SESSION_UNKNOWN"


async def test_a_permit_given_up_as_unknown_is_kept_until_its_slot_is_seen_gone(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permit = await _open(w)
        w.permits.unknown(DB, permit, abandoned=False)
        await w.permits.settled()
        assert w.permits.statistics().held == {"SESSION_UNKNOWN": 1}
        await _tell(w, "permit_gone", permit=_plain(permit))
        statistics = w.permits.statistics()
        assert (statistics.held, statistics.permits_gone_total) == ({}, 0)


async def test_what_was_given_up_is_said_again_until_its_slot_is_gone(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permit = await _open(w)
        w.permits.unknown(DB, permit, abandoned=False)
        await w.permits.settled()
        w.ledger.slots[0].state = SessionState.OPEN  # a late write of ours
        await _pass(TTL_SECONDS + 1)
        assert w.ledger.slots[0].state is SessionState.UNKNOWN
        w.ledger.slots.clear()  # proven gone by somebody
        await _pass(TTL_SECONDS + 1)
        statistics = w.permits.statistics()
        assert (statistics.held, statistics.permits_gone_total) == ({}, 0)


async def test_nothing_is_reserved_while_a_hello_is_on_its_way(tmp_path: Path, autojump_clock: Clock) -> None:
    """Hello could not list it, and the coordinator would free it as unused under the session."""
    async with world(tmp_path) as w:
        w.coordinator.alive = False
        w.coordinator.hello_gate = trio.Event()
        while len(w.coordinator.hellos) < 2:
            await _pass(0.1)
        granted: list[Granted] = []

        async def ask() -> None:
            granted.append(await w.permits.reserve(WISH, 5.0))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            assert "reserve" not in w.coordinator.heard
            assert w.permits.statistics().linked
            assert await w.permits.ledger_rows() == []
            w.coordinator.alive = True
            w.coordinator.hello_gate.set()
        assert granted[0].permit.slot in w.ledger.slots


async def test_a_hello_without_registration_renews_no_lease(tmp_path: Path, autojump_clock: Clock) -> None:
    async with world(tmp_path) as w:
        w.coordinator.alive = w.coordinator.registers = False
        await _pass(3 * TTL_SECONDS)
        assert w.permits.lease_left_seconds() < 0
        assert w.permits.statistics().links_lost_total == 0
        w.coordinator.alive = w.coordinator.registers = True
        await _pass(TTL_SECONDS)
        assert w.permits.lease_left_seconds() > 0


async def test_a_request_cancelled_without_a_link_is_listed_until_it_was_voided(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        w.coordinator.fault = lambda op, nth: "late" if op == "reserve" else None
        with trio.move_on_after(0.01):
            await w.permits.reserve(WISH, 10.0)
        w.coordinator.fault = lambda op, nth: None
        assert w.permits.statistics().requests_open == 1
        await w.permits.settled()
        assert len(w.coordinator.hellos[-1]["requests"]) == 1
        assert w.ledger.slots == {}  # the late reservation took effect, and was given back
        w.check()


# -- the ledger's word -------------------------------------------------------------------------------------

async def test_a_permit_marked_unknown_is_reasserted_while_its_session_is_held(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permit = await _open(w)
        w.ledger.slots[0].state = SessionState.UNKNOWN
        await _tell(w, "permit_unknown", permit=_plain(permit))
        assert w.ledger.slots[0].state is SessionState.OPEN
        assert w.permits.statistics().reasserted_total == 1


async def test_a_permit_marked_unknown_while_cut_off_is_reasserted_after_hello(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        await _open(w)
        await _go_down(w)
        w.ledger.slots[0].state = SessionState.UNKNOWN
        w.coordinator.down = False
        while w.permits.statistics().reasserted_total == 0:
            await _pass(0.1)
        assert w.ledger.slots[0].state is SessionState.OPEN


async def test_a_session_that_is_to_be_terminated_is_closed_not_reasserted(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permit = await _open(w)
        w.ledger.slots[0].state, w.ledger.slots[0].terminating = SessionState.UNKNOWN, True
        await _tell(w, "permit_unknown", permit=_plain(permit))
        assert w.holder.terminated == [permit]
        assert w.ledger.slots[0].state is SessionState.UNKNOWN


async def test_a_permit_still_connecting_is_brought_back_by_recording_it(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permit = (await w.permits.reserve(WISH, 1.0)).permit
        w.permits.connecting(DB, permit)
        w.ledger.slots[0].state = SessionState.UNKNOWN
        await _tell(w, "permit_unknown", permit=_plain(permit))
        assert "reassert" not in w.coordinator.heard
        await w.permits.opened(DB, permit, 1, 1, backend=BACKEND)
        assert w.ledger.slots[0].state is SessionState.OPEN


async def test_a_session_whose_permit_is_gone_is_closed_at_once_and_counted(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permit = await _open(w)
        del w.ledger.slots[0]
        await _tell(w, "permit_gone", permit=_plain(permit))
        assert w.holder.closed == [permit]
        assert w.permits.statistics().permits_gone_total == 1
        w.permits.released(DB, permit, Proof.EOF)  # its permit is nobody's any more: nothing to tell
        assert w.permits.statistics().errands_open == 0


async def test_while_the_ledger_itself_is_lost_nobody_closes_for_a_missing_permit(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permit = await _open(w)
        w.coordinator.state = "LOST"
        await _tell(w, "ledger", ledger=w.coordinator.ledger_map())
        await _tell(w, "permit_gone", permit=_plain(permit))
        assert w.holder.closed == []
        assert not w.permits.growth_allowed(DB)
        w.ledger.slots.clear()
        w.coordinator.cut()
        while len(w.coordinator.hellos) < 2 or not w.permits.statistics().linked:
            await _pass(0.1)
        statistics = w.permits.statistics()
        assert (statistics.held, statistics.permits_gone_total) == ({"OPEN": 1}, 0)


async def test_a_permit_found_gone_when_its_session_closes_is_counted(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permit = await _open(w)
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
        permit = await _open(w)
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
        await _go_down(w)
        assert not w.permits.growth_allowed(DB)
        assert (w.holder.views[-1].reachable, w.holder.views[-1].epoch) == (False, 7)
        w.coordinator.down = False
        while not w.permits.growth_allowed(DB):
            await _pass(0.1)
        assert w.holder.views[-1].reachable


@pytest.mark.parametrize("change", [{"reachable": False}, {"state": "RECOVERING"}, {"epoch": None},
                                    {"epoch": {"number": 7, "state": "DRAINING"}}])
async def test_nobody_grows_towards_a_ledger_that_is_not_whole_or_serving(
    tmp_path: Path, autojump_clock: Clock, change: dict[str, Any]
) -> None:
    async with world(tmp_path) as w:
        await _tell(w, "ledger", ledger=w.coordinator.ledger_map() | change)
        assert not w.permits.growth_allowed(DB)
        assert not w.permits.growth_allowed("another/write")


async def test_the_lease_is_counted_from_the_sending_of_a_confirmed_heartbeat(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        assert w.permits.lease_left_seconds() == pytest.approx(TTL_SECONDS)
        while w.coordinator.heard.count("heartbeat") < 2:
            await _pass(0.5)
        assert w.permits.lease_left_seconds() > TTL_SECONDS * 2 / 3 - 0.6
        assert w.permits.statistics().links_lost_total == 0


async def test_a_worker_whose_lease_is_gone_says_hello_again_on_the_same_link(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        w.coordinator.alive = False
        while len(w.coordinator.hellos) < 2:
            await _pass(0.5)
        assert w.permits.statistics().links_lost_total == 0


async def test_a_coordinator_that_stops_answering_heartbeats_is_left(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        w.coordinator.deaf.add("heartbeat")
        while w.permits.statistics().links_lost_total == 0:
            await _pass(0.5)
        w.coordinator.deaf.clear()
        while not w.permits.statistics().linked:
            await _pass(0.5)
        assert len(w.coordinator.hellos) == 2


async def _pass(seconds: float) -> None:
    """Let the test's own clock go on."""
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


# -- the rest ----------------------------------------------------------------------------------------------

async def test_the_coordinator_s_requests_reach_the_worker(tmp_path: Path, autojump_clock: Clock) -> None:
    async with world(tmp_path) as w:
        link = w.coordinator.links[-1]
        await _tell(w, "shed", dbname="orders", user="app", count=2)
        assert w.holder.shed_for == [(DB, "orders", "app", 2)]
        assert await link.call("cancel", key=b"12345678") == {}
        assert await link.call("show", what="pools") == {"rows": [["pools", 1]]}
        assert await link.call("command", name="pause", args={}) == {}
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
        await _go_down(w)
        for ask in (w.permits.ledger_rows(), w.permits.fleet("show", {}), w.permits.forward_cancel(4, b"1")):
            with pytest.raises(FleetUnreachable, match="unreachable"):
                await ask


async def test_an_epoch_is_acknowledged_over_a_lost_link(tmp_path: Path, autojump_clock: Clock) -> None:
    async with world(tmp_path) as w:
        w.coordinator.fault = lambda op, nth: "before" if op == "epoch_ack" and nth < 4 else None
        await w.permits.epoch_ack(DB, 8)
        assert w.coordinator.heard.count("epoch_ack") == 2


@pytest.mark.parametrize("op", ["release", "unknown", "void"])
async def test_what_the_ledger_cannot_take_now_is_told_again(
    tmp_path: Path, autojump_clock: Clock, op: str
) -> None:
    async with world(tmp_path) as w:
        permit = await _open(w)
        w.coordinator.answers[op] = LinkRefused("ledger_unavailable", "")
        if op == "release":
            w.permits.released(DB, permit, Proof.EOF)
        elif op == "unknown":
            w.permits.unknown(DB, permit, abandoned=False)
        else:
            w.coordinator.deaf.add("reserve")
            with trio.move_on_after(1):
                await w.permits.reserve(WISH, 10)
        await _pass(10)
        assert w.permits.statistics().errands_open == 1
        assert w.coordinator.heard.count(op) > 3
        del w.coordinator.answers[op]
        await w.permits.settled()
