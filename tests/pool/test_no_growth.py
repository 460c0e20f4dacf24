"""While a server has no room for what policies promise, a worker asks for nothing and keeps what it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.ledger.states import SessionState
from pooler.errors import NoPermit
from pooler.pool.ledger_view import LedgerView
from tests.pool.asking import WISH, Clock, open_one, tell
from tests.pool.fake_coordinator import DB
from tests.pool.world import world

WHY = "10.0.0.1:5432 has room for 4 sessions"


async def test_it_asks_for_no_permit_says_why_and_asks_again_when_there_is_room(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        await open_one(w)
        await tell(w, "ledger", ledger={**w.coordinator.ledger_map(), "growth": WHY})
        granted = w.ledger.generation
        with pytest.raises(NoPermit, match=WHY) as refused:
            await w.permits.reserve(WISH, 1.0)
        assert refused.value.reason == "no_growth"
        assert w.ledger.generation == granted  # nobody was asked
        assert w.permits.statistics().held == {str(SessionState.OPEN): 1}
        assert w.permits.statistics().requests_open == 0
        await tell(w, "ledger", ledger=w.coordinator.ledger_map())
        await w.permits.reserve(WISH, 1.0)


async def test_meanwhile_it_closes_nothing_by_choice(tmp_path: Path, autojump_clock: Clock) -> None:
    async with world(tmp_path) as w:
        assert w.permits.growth_allowed(DB)
        await tell(w, "ledger", ledger={**w.coordinator.ledger_map(), "growth": WHY})
        assert not w.permits.growth_allowed(DB)
        view = w.holder.views[-1]
        assert (view.serving, view.has_successors) == (True, False)


@pytest.mark.parametrize(("policy", "generation"), [({"generation": 28}, 28), (None, 0)])
def test_it_knows_the_generation_that_grants(policy: dict[str, int] | None, generation: int) -> None:
    assert LedgerView.parse(DB, {"policy": policy}).policy_generation == generation
