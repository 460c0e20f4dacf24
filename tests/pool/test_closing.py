"""A session that is closed while something runs on it does not wait for its own cancel request."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pooler.pool import pool as pool_module
from pooler.relay.owed import QUERY
from tests.pool.running import running


async def test_a_session_whose_cancel_gets_no_answer_is_closed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cancels = []

    async def unanswered(session: object, timeout_seconds: float) -> bool:
        cancels.append(session)
        await trio.sleep_forever()
        return False

    monkeypatch.setattr(pool_module, "cancel_and_wait", unanswered)
    async with running(monkeypatch, size=1) as run:
        async with run.pool.checkout() as client:
            await client.query("select 1")
        await wait_all_tasks_blocked()
        [session] = run.pool.core.idle
        session.owed.append(QUERY)
        run.pool.retire(session, "test")
        await wait_all_tasks_blocked()
        assert cancels == [session]
        assert run.pool.core.closing == 0
        assert run.minis[0].ended
