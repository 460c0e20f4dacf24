"""A server that is not what its ledger needs serves nobody: it is asked whenever a session is opened."""

from __future__ import annotations

from pathlib import Path

import pytest
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.ledger.states import Proof
from pooler.errors import ProtocolViolation
from pooler.pool.duty import BackendUnfit, Duty
from pooler.pool.opener import open_session
from tests.pool.fake_coordinator import DB
from tests.pool.world import World, world

STANDBY = {"address": "a:1", "system_identifier": "", "timeline": 1, "postmaster_start_us": 1,
           "in_recovery": True}


def hints(w: World) -> int:
    return w.coordinator.heard.count("backend_hint")


@pytest.mark.parametrize(("duty", "lag_ms", "why"), [
    (Duty("write"), "0", "is in recovery: it takes no writes"),
    (Duty("read", 10.0), "10001", r"is 10.0 s behind its primary \(max_replica_lag 10 s\)"),
    (Duty("offline", 10.0), None, "cannot say how far it is behind"),
])
async def test_an_unfit_server_is_refused_with_its_permit_given_back_and_the_leader_told(
    tmp_path: Path, autojump_clock: MockClock, duty: Duty, lag_ms: str | None, why: str
) -> None:
    async with world(tmp_path) as w:
        w.server.in_recovery, w.server.lag_ms = True, lag_ms
        with pytest.raises(BackendUnfit, match=why):
            await open_session(w.permits, w.plan(duty=duty))
        await w.settled()
        assert [proof for _, proof in w.ledger.releases] == [Proof.EOF]
        assert hints(w) == 1
        w.check()


@pytest.mark.parametrize(("duty", "in_recovery", "lag_ms", "asked"), [
    (Duty(), True, None, 0),
    (Duty("write"), False, None, 0),
    (Duty("read"), True, None, 0),
    (Duty("read", 10.0), False, None, 0),
    (Duty("read", 10.0), True, "9999", 1),
    (Duty("read", 0.0), True, "0", 1),
])
async def test_a_fit_one_is_opened_and_asked_no_more_than_it_takes_to_know(
    tmp_path: Path, autojump_clock: MockClock, duty: Duty, in_recovery: bool, lag_ms: str | None, asked: int
) -> None:
    async with world(tmp_path) as w:
        w.server.in_recovery, w.server.lag_ms = in_recovery, lag_ms
        session = await open_session(w.permits, w.plan(duty=duty))
        session.sock.close()
        assert (w.server.lag_asked, hints(w)) == (asked, 0)


async def test_many_that_are_refused_hint_once_a_second(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with world(tmp_path) as w:
        w.server.in_recovery = True
        for _ in range(5):
            with pytest.raises(BackendUnfit):
                await open_session(w.permits, w.plan(duty=Duty("write")))
        await w.settled()
        assert hints(w) == 1


async def test_a_standby_that_was_promoted_serves_and_is_told_of(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with world(tmp_path) as w:
        w.coordinator.backend = STANDBY
        w.coordinator.links[-1].notify("ledger", db=DB, ledger=w.coordinator.ledger_map())
        await wait_all_tasks_blocked()
        session = await open_session(w.permits, w.plan(duty=Duty("read", 10.0)))
        session.sock.close()
        await w.settled()
        assert hints(w) == 1
        assert w.permits.ledgers[DB].backend is not None


async def test_an_answer_that_is_no_number_is_a_fault_of_the_servers(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with world(tmp_path) as w:
        w.server.in_recovery, w.server.lag_ms = True, "soon"
        with pytest.raises(ProtocolViolation):
            await open_session(w.permits, w.plan(duty=Duty("read", 10.0)))
        await w.settled()
        w.check()
