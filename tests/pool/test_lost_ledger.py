"""While a ledger is lost, or is being rebuilt, a worker serves on with what it has: it grows no session and
closes none of its own accord."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from time import monotonic

import pytest

from coordinator.ledger.record import Backend, Epoch, EpochState, LedgerHead, LedgerState
from coordinator.link import LinkRefused
from coordinator.view import View
from pooler.admission.ticket import Ticket
from pooler.errors import NoPermit
from pooler.pool import janitor, steering
from pooler.pool.growth import Growth
from pooler.pool.ledger_view import LedgerView
from tests.pool.asking import WISH, Clock, open_one, plain, tell
from tests.pool.fake_coordinator import DB
from tests.pool.world import world
from tests.relay.world import World as PoolWorld
from tests.relay.world import world as pool_world

BACKEND = Backend("10.0.0.1:5432", "73", 1, 1)


def heard(
    number: int | None = 4, state: LedgerState = LedgerState.ACTIVE, lost: str = "",
    epoch_state: EpochState = EpochState.ACTIVE, address: str = BACKEND.address,
) -> LedgerView:
    """What a coordinator tells of a ledger; without a number, of one whose prefix was wiped."""
    epoch = Epoch(number or 0, epoch_state, replace(BACKEND, address=address), 0, "")
    view = View(DB, reachable=True, lost=lost, head=LedgerHead("i", state, "abcdefgh") if number else None,
                epoch=epoch if number else None)
    return LedgerView.parse(DB, view.for_workers())


WHOLE = heard()
LOST = [heard(None, lost="wiped"), heard(2, lost="restored"), heard(9, lost="another"),
        heard(4, lost="restored", epoch_state=EpochState.DRAINING), heard(None),
        heard(3, LedgerState.RECOVERING),
        heard(4, LedgerState.RECOVERING, address="10.0.0.9:5432")]


@pytest.mark.parametrize("view", LOST)
def test_epoch_and_policy_of_before_hold_on_while_the_ledger_is_not_whole(view: LedgerView) -> None:
    after = view.after(replace(WHOLE, policy={"generation": 3}))
    assert (after.epoch, after.serving, after.address) == (4, True, BACKEND.address)
    assert after.policy == {"generation": 3}
    assert (after.whole, after.grows, after.state) == (False, False, view.state)
    assert after.reachable


def test_a_ledger_that_is_rebuilt_may_go_on_to_a_later_epoch() -> None:
    assert heard(5, LedgerState.RECOVERING).after(WHOLE).epoch == 5


def test_a_ledger_that_is_whole_says_all_anew() -> None:
    assert heard(2).after(WHOLE.after(None)) == heard(2)
    assert heard(5).after(heard(None, lost="wiped").after(WHOLE)) == heard(5)


def test_who_never_heard_of_an_epoch_serves_nothing() -> None:
    assert not heard(None, lost="wiped").after(None).serving
    assert not heard(None, lost="wiped").after(heard(None)).serving


async def test_the_pools_hear_of_no_change_but_that_nothing_grows(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        before = w.permits.ledgers[DB]
        w.coordinator.state = "LOST"
        await tell(w, "ledger", ledger={**w.coordinator.ledger_map(), "epoch": None, "policy": None})
        assert (w.holder.views[-1].epoch, w.holder.views[-1].serving) == (before.epoch, True)
        assert not w.permits.growth_allowed(DB)


@pytest.mark.parametrize("state", ["LOST", "RECOVERING"])
async def test_a_permit_that_is_missing_meanwhile_costs_no_session(
    tmp_path: Path, autojump_clock: Clock, state: str
) -> None:
    async with world(tmp_path) as w:
        permit = await open_one(w)
        w.coordinator.state = state
        await tell(w, "ledger", ledger={**w.coordinator.ledger_map(), "epoch": None})
        w.ledger.slots.clear()
        await tell(w, "permit_gone", permit=plain(permit))
        assert w.holder.closed == w.holder.terminated == []


async def test_who_is_refused_because_of_it_leaves_nothing_to_be_told(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        w.coordinator.answers["reserve"] = LinkRefused("ledger_lost", "")
        for _ in range(3):
            with pytest.raises(NoPermit):
                await w.permits.reserve(WISH, 0.0)
        statistics = w.permits.statistics()
        assert (statistics.errands_open, statistics.requests_open, statistics.voided_total) == (0, 0, 0)


# ---- in a pool


@pytest.fixture
def pool() -> Iterator[PoolWorld]:
    """Two idle sessions under an epoch that serves."""
    with pool_world(2) as made:
        for server in made.pool.core.idle:
            server.epoch = WHOLE.epoch
        steering.ledger_changed(made.pool, WHOLE)
        assert len(made.pool.core.idle) == 2
        yield made


def lost(made: PoolWorld) -> LedgerView:
    return heard(None, lost="wiped").after(replace(WHOLE, epoch=made.pool.core.epoch))


def test_no_idle_session_is_closed_and_one_that_comes_back_serves_again(pool: PoolWorld) -> None:
    core = pool.pool.core
    ticket: Ticket = Ticket(lambda _: None, lambda _: None)
    ticket.start(monotonic(), inf)
    server = core.request(ticket)
    assert server is not None
    steering.ledger_changed(pool.pool, lost(pool))
    assert len(core.idle) == 1
    pool.pool.give(server, monotonic())
    assert (len(core.idle), core.closing, core.serving) == (2, 0, True)


def test_no_lifetime_ends_meanwhile_and_it_does_afterwards(pool: PoolWorld) -> None:
    core = pool.pool.core
    for server in core.idle:
        server.expires_at = monotonic() - 1
    steering.ledger_changed(pool.pool, lost(pool))
    janitor.close_old_sessions(pool.pool, monotonic(), growth_allowed=lost(pool).grows)
    assert len(core.idle) == 2
    assert all(core.usable(server, monotonic()) for server in core.idle)
    steering.ledger_changed(pool.pool, WHOLE)
    janitor.close_old_sessions(pool.pool, monotonic(), growth_allowed=True)
    assert len(core.idle) == 0


def test_nobody_gives_way_to_a_session_that_could_not_be_opened(pool: PoolWorld) -> None:
    made = pool.pool
    made.parts.of_user = lambda user: [made]
    made.parts.by_seat = lambda *_: [made]
    made.plan = replace(made.plan, size_max=1)
    growth = Growth(made)
    steering.ledger_changed(made, lost(pool))
    growth._make_room()
    growth._make_room_for_user()
    assert len(made.core.idle) == 2


def test_who_waits_hears_why(pool: PoolWorld) -> None:
    pool.pool.parts.permits.ledgers[pool.pool.plan.ledger] = lost(pool)
    assert "ledger is LOST" in janitor.why_none(pool.pool)

