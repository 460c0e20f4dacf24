"""Opening and closing sessions: a permit ends right whatever happens, at whichever step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from coordinator.ledger.states import Proof, SessionState
from coordinator.link import LinkRefused
from pooler.errors import BackendLost, NoPermit, PermitLost, PoolerError
from pooler.net.dial import DialFailed
from pooler.net.facts import FactsRefused
from pooler.pool.opener import OpenSession, close_session, open_session, session_ended
from pooler.pool.permits import OpenRefused
from tests.pool.cancelling import run_cancelled
from tests.pool.fake_coordinator import DB
from tests.pool.world import World, world

STEPS_MAX = 500


async def _open(w: World, **changes: Any) -> OpenSession:
    session = await open_session(w.permits, w.plan(**changes))
    w.holder.held.add((DB, session.permit))
    return session


async def _whole_life(w: World) -> None:
    session = await open_session(w.permits, w.plan())
    await close_session(w.permits, session, 2.0)


async def test_a_session_is_open_in_the_ledger_before_it_is_handed_out(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with world(tmp_path) as w:
        session = await _open(w)
        slot = w.ledger.slots[session.permit.slot]
        assert (slot.state, slot.pid) == (SessionState.OPEN, session.pid)
        assert w.server.alive == {w.ledger.tag(session.permit): session.pid}
        assert session.eof_is_proof
        assert session.parameters[b"server_version"] == b"15.0"
        assert await close_session(w.permits, session, 2.0) is Proof.EOF
        await w.settled()
        assert w.ledger.slots == {}
        assert w.ledger.releases == [(session.permit, Proof.EOF)]
        assert w.coordinator.heard.count("closing") == 1
        w.check()


async def test_secrets_are_in_no_repr(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with world(tmp_path) as w:
        session = await _open(w)
        assert "key!" not in repr(session)
        session.sock.close()


@pytest.mark.parametrize(("behaviour", "expected", "proof"), [
    ("silent", DialFailed, None),
    ("fatal", DialFailed, Proof.EOF),
    ("mute", BackendLost, None),  # before the ends were seen an end of file proves nothing
    ("refusing", FactsRefused, None),
])
async def test_a_failed_opening_gives_the_permit_back_only_with_proof(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, behaviour: str,
    expected: type[PoolerError], proof: Proof | None,
) -> None:
    async with world(tmp_path) as w:
        w.server.behaviour = behaviour
        with pytest.raises(expected):
            await open_session(w.permits, w.plan())
        await w.settled()
        assert [found for _, found in w.ledger.releases] == ([proof] if proof else [])
        assert [slot.abandoned for slot in w.ledger.slots.values()] == ([] if proof else [True])
        w.check()


async def test_a_server_that_is_not_there_costs_nothing(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with world(tmp_path) as w:
        w.ledger.address = f"{tmp_path}/nowhere:5432"
        with pytest.raises(DialFailed):
            await open_session(w.permits, w.plan())
        await w.settled()
        assert w.ledger.releases[0][1] is Proof.EOF
        w.check()


async def test_an_address_that_cannot_be_dialled_costs_nothing(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with world(tmp_path) as w:
        w.ledger.address = "host:port"
        with pytest.raises(ValueError, match="port"):
            await open_session(w.permits, w.plan())
        await w.settled()
        assert w.ledger.slots == {}
        w.check()


async def test_where_something_stands_between_an_end_of_file_proves_nothing(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with world(tmp_path) as w:
        w.server.behaviour = "other_pid"
        session = await _open(w)
        assert not session.eof_is_proof
        assert await close_session(w.permits, session, 2.0) is None
        await w.settled()
        (slot,) = w.ledger.slots.values()
        assert (slot.state, slot.abandoned) == (SessionState.UNKNOWN, False)
        w.check()


async def test_the_operator_may_say_that_an_end_of_file_is_proof(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with world(tmp_path) as w:
        w.server.behaviour = "other_pid"
        session = await _open(w, eof_is_proof=True)
        assert await close_session(w.permits, session, 2.0) is Proof.EOF
        await w.settled()
        w.check()


async def test_a_server_that_does_not_end_after_terminate_leaves_the_permit_unknown(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with world(tmp_path) as w:
        w.server.behaviour = "stubborn"
        session = await _open(w)
        assert await close_session(w.permits, session, 2.0) is None
        await w.settled()
        (slot,) = w.ledger.slots.values()
        assert (slot.state, slot.pid, slot.abandoned) == (SessionState.UNKNOWN, session.pid, False)
        w.check()


@pytest.mark.parametrize("orderly", [True, False])
async def test_a_session_that_the_server_ended_is_released_only_if_an_end_of_file_was_read(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, orderly: bool
) -> None:
    async with world(tmp_path) as w:
        session = await _open(w)
        session.sock.shutdown(1)
        await w.server.ended()
        assert await session_ended(w.permits, session, orderly=orderly) is (Proof.EOF if orderly else None)
        await session_ended(w.permits, session, orderly=True)  # a second word changes nothing
        await w.settled()
        assert len(w.ledger.slots) == (0 if orderly else 1)
        w.check()


async def test_a_session_of_another_cluster_is_not_used(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with world(tmp_path) as w:
        there = w.coordinator.ledger_map()
        there["epoch"]["backend"] = {"address": w.server.address, "system_identifier": "1", "timeline": 1,
                                     "postmaster_start_us": 1, "in_recovery": False}
        w.coordinator.links[-1].notify("ledger", db=DB, ledger=there)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(BackendLost, match="cluster"):
            await open_session(w.permits, w.plan())
        await w.settled()
        w.check()


@pytest.mark.parametrize(("code", "expected"), [("gone", PermitLost), ("terminating", OpenRefused)])
async def test_a_session_that_cannot_be_recorded_serves_nobody(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, code: str, expected: type[PoolerError]
) -> None:
    async with world(tmp_path) as w:
        w.coordinator.answers["open"] = LinkRefused(code, "")
        with pytest.raises(expected):
            await open_session(w.permits, w.plan())
        del w.coordinator.answers["open"]
        await w.settled()
        assert not w.server.alive
        assert w.permits.statistics().permits_gone_total == (1 if code == "gone" else 0)


async def test_a_session_that_cannot_be_recorded_in_time_is_closed(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with world(tmp_path) as w:
        w.coordinator.answers["open"] = LinkRefused("ledger_unavailable", "")
        with pytest.raises(NoPermit, match="could not record"):
            await open_session(w.permits, w.plan())
        await w.settled()
        assert w.ledger.releases[0][1] is Proof.EOF
        w.check()


async def test_cancelled_while_it_is_recorded_a_session_is_still_ended_in_order(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with world(tmp_path) as w:
        w.coordinator.deaf.add("open")
        with trio.move_on_after(1):
            await open_session(w.permits, w.plan())
        await w.settled()
        assert w.ledger.releases[0][1] is Proof.EOF
        w.check()


async def test_nobody_connects_once_the_lease_may_have_run_out(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with world(tmp_path) as w:
        w.permits._uplink._lease_until = trio.current_time()
        with pytest.raises(NoPermit, match="lease"):
            await open_session(w.permits, w.plan())
        await w.settled()
        assert w.server.born == 0
        assert w.ledger.releases[0][1] is Proof.UNUSED
        w.check()


# -- at every step -----------------------------------------------------------------------------------------

async def test_cancelled_at_any_step_of_its_life_a_session_leaves_no_permit_behind(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    reached = 0
    outcomes: dict[str, int] = {}
    async with world(tmp_path) as w:
        for steps in range(STEPS_MAX):
            fired, _ = await run_cancelled(lambda: _whole_life(w), steps)
            await w.settled()
            w.check()
            _count_and_clear(w, outcomes)
            if not fired:
                break
            reached += 1
    print(f"cancelled at {reached} steps: {outcomes}")  # noqa: T201 - how far it reached is part of the result
    assert 8 <= reached < STEPS_MAX
    assert set(outcomes) >= {"unused", "eof", "abandoned", "unknown"}


@pytest.mark.parametrize("behaviour", ["silent", "fatal", "mute", "stubborn", "refusing", "other_pid"])
async def test_cancelled_at_any_step_towards_a_bad_server_a_session_leaves_no_permit_behind(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, behaviour: str
) -> None:
    reached = 0
    outcomes: dict[str, int] = {}

    async def life() -> None:
        try:
            await _whole_life(w)
        except PoolerError:
            return

    async with world(tmp_path) as w:
        w.server.behaviour = behaviour
        for steps in range(STEPS_MAX):
            fired, _ = await run_cancelled(life, steps)
            await w.settled()
            w.check()
            _count_and_clear(w, outcomes)
            if not fired:
                break
            reached += 1
    print(f"{behaviour}: cancelled at {reached} steps: {outcomes}")  # noqa: T201 - how far it reached is part of the result
    assert 5 < reached < STEPS_MAX


@pytest.mark.parametrize("how", ["before", "after", "late"])
async def test_a_link_lost_at_any_operation_loses_no_permit(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, how: str
) -> None:
    cut: list[str] = []
    async with world(tmp_path) as w:
        for nth in range(1, STEPS_MAX):
            w.coordinator.heard.clear()

            def fault(op: str, count: int, nth: int = nth) -> str | None:
                if count == nth and op != "heartbeat":
                    cut.append(op)
                    return how
                return None

            w.coordinator.fault = fault
            before = len(cut)
            await _whole_life(w)
            await w.permits.settled()
            await w.settled()
            w.check()
            assert w.ledger.slots == {}, f"after {cut[-1:]} was cut {how}"
            if len(cut) == before and len(w.coordinator.heard) < nth:
                break
    print(f"link cut {how}: {cut}")  # noqa: T201 - how far it reached is part of the result
    assert set(cut) >= {"reserve", "connecting", "open", "closing", "release"}


@pytest.mark.parametrize("how", ["before", "after", "late"])
async def test_cancelled_at_any_step_with_the_link_lost_at_any_operation(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, how: str
) -> None:
    runs = 0
    outcomes: dict[str, int] = {}
    async with world(tmp_path) as w:
        for nth in range(1, 7):
            for steps in range(STEPS_MAX):
                w.coordinator.heard.clear()
                w.coordinator.fault = lambda op, count, nth=nth: how if count == nth else None  # type: ignore[misc]
                fired, _ = await run_cancelled(lambda: _whole_life(w), steps)
                await w.settled()
                w.check()
                _count_and_clear(w, outcomes)
                runs += 1
                if not fired:
                    break
    print(f"link cut {how}: {runs} runs: {outcomes}")  # noqa: T201 - how far it reached is part of the result
    assert runs > 100


def _count_and_clear(w: World, outcomes: dict[str, int]) -> None:
    """How the permits of this run ended; those left unknown are then proven gone, as a reaper would."""
    for _, proof in w.ledger.releases:
        outcomes[str(proof)] = outcomes.get(str(proof), 0) + 1
    for slot in w.ledger.slots.values():
        name = "abandoned" if slot.abandoned else "unknown"
        outcomes[name] = outcomes.get(name, 0) + 1
        w.permits._hearing.gone(DB, slot.permit)
    w.ledger.slots.clear()
    w.ledger.releases.clear()
    w.ledger.receipts.clear()
