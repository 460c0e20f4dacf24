"""The worker's end of the link: what it asks, what it repeats, and what it does at the ledger's word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from coordinator.ledger.record import Kind, Permit
from coordinator.ledger.states import Proof, SessionState
from coordinator.link import LinkRefused
from pooler.errors import NoPermit
from pooler.pool.permits import Granted
from tests.pool.asking import WISH, Clock, go_down, let_pass, open_one, plain, tell
from tests.pool.fake_coordinator import DB, TTL_SECONDS
from tests.pool.world import world

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
        await go_down(w)
        for wait in (0.0, 3.0):
            began = trio.current_time()
            with pytest.raises(NoPermit, match="unreachable") as caught:
                await w.permits.reserve(WISH, wait)
            assert caught.value.reason == "unreachable"
            assert trio.current_time() - began == pytest.approx(wait)


async def test_a_wait_outlives_a_link_that_comes_back(tmp_path: Path, autojump_clock: Clock) -> None:
    async with world(tmp_path) as w:
        await go_down(w)
        async with trio.open_nursery() as nursery:
            granted: list[Granted] = []

            async def ask() -> None:
                granted.append(await w.permits.reserve(WISH, 30.0))

            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            w.coordinator.down = False
        assert granted[0].permit.slot == 0


# -- what the ledger must learn ----------------------------------------------------------------------------

async def test_ends_told_without_a_link_are_told_when_it_is_back(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permits = [await open_one(w) for _ in range(3)]
        await go_down(w)
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
        permits = [await open_one(w) for _ in range(3)]
        w.permits.unknown(DB, permits[1], abandoned=False)
        await w.permits.settled()
        await go_down(w)
        w.permits.released(DB, permits[0], Proof.EOF)
        w.coordinator.down = False
        await w.permits.settled()
        listed = {tuple(each["permit"]): each["state"] for each in w.coordinator.hellos[-1]["permits"]}
        assert set(listed) == {tuple(plain(permit)) for permit in permits}
        assert listed[tuple(plain(permits[1]))] == "SESSION_UNKNOWN"


async def test_a_permit_given_up_as_unknown_is_kept_until_its_slot_is_seen_gone(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permit = await open_one(w)
        w.permits.unknown(DB, permit, abandoned=False)
        await w.permits.settled()
        assert w.permits.statistics().held == {"SESSION_UNKNOWN": 1}
        await tell(w, "permit_gone", permit=plain(permit))
        statistics = w.permits.statistics()
        assert (statistics.held, statistics.permits_gone_total) == ({}, 0)


async def test_what_was_given_up_is_said_again_until_its_slot_is_gone(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permit = await open_one(w)
        w.permits.unknown(DB, permit, abandoned=False)
        await w.permits.settled()
        w.ledger.slots[0].state = SessionState.OPEN  # a late write of ours
        await let_pass(TTL_SECONDS + 1)
        assert w.ledger.slots[0].state is SessionState.UNKNOWN
        w.ledger.slots.clear()  # proven gone by somebody
        await let_pass(TTL_SECONDS + 1)
        statistics = w.permits.statistics()
        assert (statistics.held, statistics.permits_gone_total) == ({}, 0)


async def test_nothing_is_reserved_while_a_hello_is_on_its_way(tmp_path: Path, autojump_clock: Clock) -> None:
    """Hello could not list it, and the coordinator would free it as unused under the session."""
    async with world(tmp_path) as w:
        w.coordinator.alive = False
        w.coordinator.hello_gate = trio.Event()
        while len(w.coordinator.hellos) < 2:
            await let_pass(0.1)
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
        await let_pass(3 * TTL_SECONDS)
        assert w.permits.lease_left_seconds() < 0
        assert w.permits.statistics().links_lost_total == 0
        w.coordinator.alive = w.coordinator.registers = True
        await let_pass(TTL_SECONDS)
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
