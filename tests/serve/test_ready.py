"""/readyz/<role>: a worker that met an unfit server says so, and only as long as that is fresh."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pooler.errors import NoPermit, PoolerError
from pooler.net.dial import DialFailed, Outcome
from pooler.pool.duty import BackendUnfit
from pooler.pool.growth import UNFIT_SECONDS
from pooler.pool.ledger_view import LedgerView
from pooler.serve.figures import Figures
from tests.pool.running import running

UNFIT = BackendUnfit("server a:1 is in recovery: it takes no writes")
REFUSED = DialFailed(Outcome.NEVER_STARTED, "server a:1: refused")
LEDGER = LedgerView("orders", state="ACTIVE", reachable=True, epoch=3, epoch_state="ACTIVE")


def figures(*pools: Any, view: LedgerView = LEDGER, draining: bool = False) -> Figures:
    database = SimpleNamespace(ledger="orders", role="write")
    settings = SimpleNamespace(databases={"orders": database})
    registry = SimpleNamespace(draining=draining, settings=settings, pools=dict(enumerate(pools)))
    permits = SimpleNamespace(ledgers={"orders": view})
    return Figures(registry, permits, 0, "boot")  # type: ignore[arg-type]


@pytest.mark.parametrize(("error", "has_session", "ready"), [
    (UNFIT, False, False), (UNFIT, True, False),
    (REFUSED, False, False), (REFUSED, True, True),
    (NoPermit("full"), False, True),
])
async def test_what_an_opening_met_is_told_while_it_is_fresh(
    monkeypatch: pytest.MonkeyPatch, error: PoolerError, has_session: bool, ready: bool
) -> None:
    async with running(monkeypatch) as run:
        pool = run.pool
        if has_session:
            async with pool.checkout():
                pass
        pool.growth._back_off(error, permanent=False)
        told = figures(SimpleNamespace(growth=pool.growth, core=pool.core,
                                       plan=SimpleNamespace(ledger="orders")))
        assert told.ready("write") == ("" if ready else str(error))
        pool.growth._failed_at -= UNFIT_SECONDS + 1
        assert told.ready("write") == ""


async def test_a_login_that_is_refused_for_good_is_its_users_fault_and_not_the_servers(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(monkeypatch) as run:
        run.pool.growth._back_off(REFUSED, permanent=True)
        assert run.pool.growth.unfit(run.pool.growth._failed_at, has_sessions=False) == ""


def test_an_epoch_that_drains_and_a_worker_that_does_are_not_ready() -> None:
    assert figures(draining=True).ready("write") == "draining"
    drains = LedgerView("orders", epoch=3, epoch_state="DRAINING")
    assert figures(view=drains).ready("write") == "epoch 3 of orders drains"
    with pytest.raises(KeyError):
        figures().ready("read")
