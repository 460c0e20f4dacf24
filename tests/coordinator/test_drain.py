"""The drain on the memory store: its order, its exits, and that nothing is lost when it is given up."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from coordinator.drain import DrainOutcome, drain
from coordinator.drain_abort import abort
from coordinator.drain_target import Code, Order
from coordinator.ledger.record import Epoch, EpochState
from coordinator.ledger.rules import Refused, Release
from coordinator.ledger.states import Actor, Proof, SessionState
from tests.coordinator.stage import DB, NO_FENCE, Server, Stage, stage
from tests.ledger.ground import BACKEND, FLEET, KEYS, NOW_US, ask, register, session

STANDBY = "127.0.0.1:5433"


def with_standby(on: Stage) -> Server:
    """A standby of the epoch's cluster, still in recovery."""
    standby = Server(replace(BACKEND, address=STANDBY, in_recovery=True, postmaster_start_us=2_000))
    on.eyes.servers[STANDBY] = standby
    return standby


async def run(
    on: Stage, *, promote: Callable[[], Awaitable[int]] | None = None,
    said: list[dict[str, Any]] | None = None, **order: Any,
) -> DrainOutcome:
    wanted: dict[str, Any] = {
        "role": "write", "hosts": (BACKEND.address,), "target": STANDBY, "timeout_seconds": 10.0}
    lines = said if said is not None else []
    return await drain(
        on.store, FLEET, on.ledger, on.eyes, Order(db=DB, promote=promote, **(wanted | order)),
        progress=lines.append, now_us=lambda: NOW_US)


async def stored_epoch(on: Stage) -> tuple[int, str, str]:
    epoch = (await on.ledger.snapshot()).epoch
    assert epoch is not None
    return epoch.number, str(epoch.state), epoch.backend.address


async def hold(on: Stage, state: SessionState = SessionState.OPEN, slot: int = 0) -> Any:
    held = session(state, slot=slot, seat=slot, request_id=f"r{slot}", owner="A")
    await on.put(KEYS.session(held.kind, slot), held.encode())
    return held.permit


async def test_the_promotion_runs_only_when_every_session_of_the_old_epoch_is_proven_gone(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        register(on.keyspace, "A")
        permit = await hold(on)
        standby = with_standby(on)
        seen: list[Any] = []

        async def promote() -> int:
            seen.append((await on.states(), await stored_epoch(on)))
            standby.backend = replace(standby.backend, in_recovery=False)
            return 0

        async def close_later() -> None:
            with trio.move_on_after(3.0):
                await trio.sleep_forever()
            assert not seen
            assert isinstance(await on.ledger.reserve(ask("r9")), Refused)
            await on.ledger.apply(Release(permit, Proof.EOF, Actor.OWNER))

        said: list[dict[str, Any]] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(close_later)
            outcome = await run(on, promote=promote, said=said)
        assert seen == [({}, (1, "DRAINING", BACKEND.address))]
        assert (outcome.code, outcome.epoch) == (Code.DRAINED, 2)
        assert await stored_epoch(on) == (2, "ACTIVE", STANDBY)
        assert KEYS.drain() not in on.keyspace.entries
        steps = [line["step"] for line in said]
        assert steps.count("draining") >= 3
        assert steps.index("draining") < steps.index("promoting")
        assert said[0]["old"] == {"idle": 0, "busy": 0, "other": 1, "unknown": 0}


async def test_workers_that_have_not_acknowledged_are_named(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        register(on.keyspace, "A")
        with_standby(on).backend = replace(BACKEND, address=STANDBY)
        outcome = await run(on)
        assert (outcome.code, outcome.not_acknowledged) == (Code.DRAINED, ("A",))
        assert outcome.waits_for[0].why.startswith("it has not answered yet")


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (Server(unreachable=True), "cannot be reached"),
        (Server(replace(BACKEND, system_identifier="other")), "another cluster"),
    ],
)
async def test_an_unfit_target_changes_nothing(
    tmp_path: Path, clock: MockClock, target: Server, text: str
) -> None:
    async with stage(tmp_path) as on:
        on.eyes.servers[STANDBY] = target
        revision = on.keyspace.revision
        outcome = await run(on)
        assert (outcome.code, on.keyspace.revision) == (Code.UNFIT, revision)
        assert text in outcome.text


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("switch_first", [True, False])
async def test_a_primary_of_before_the_last_failover_is_never_drained_to(
    tmp_path: Path, clock: MockClock, named: bool, switch_first: bool
) -> None:
    async with stage(tmp_path) as on:
        now = replace(BACKEND, timeline=2)
        await on.put(KEYS.epoch(), Epoch(1, EpochState.ACTIVE, now, 0, "test").encode())
        on.eyes.servers = {STANDBY: Server(BACKEND)}
        outcome = await run(on, target=STANDBY if named else None, hosts=(STANDBY, BACKEND.address),
                            switch_first=switch_first)
        assert (outcome.code, await stored_epoch(on)) == (Code.UNFIT, (1, "ACTIVE", BACKEND.address))
        assert "is a primary of before: it is on timeline 1" in outcome.text


async def test_switching_first_to_a_standby_in_recovery_is_unfit(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        with_standby(on)
        outcome = await run(on, switch_first=True)
        assert outcome.code is Code.UNFIT
        assert await stored_epoch(on) == (1, "ACTIVE", BACKEND.address)


async def test_past_its_time_the_old_epoch_is_active_again(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        register(on.keyspace, "A")
        await hold(on)
        with_standby(on)
        outcome = await run(on)
        assert (outcome.code, outcome.epoch) == (Code.TIMED_OUT, 1)
        assert await stored_epoch(on) == (1, "ACTIVE", BACKEND.address)
        assert not isinstance(await on.ledger.reserve(ask("r9")), Refused)


async def test_a_promotion_that_fails_or_never_comes_leaves_the_old_epoch(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        with_standby(on)

        async def fails() -> int:
            await trio.lowlevel.checkpoint()
            return 7

        outcome = await run(on, promote=fails)
        assert outcome.code is Code.TIMED_OUT
        assert "code 7" in outcome.text
        said: list[dict[str, Any]] = []
        outcome = await run(on, said=said)
        assert outcome.code is Code.TIMED_OUT
        assert "drained: promote now" in [line["step"] for line in said]
        waited = [line["elapsed_seconds"] for line in said if line["step"] == "waiting for the promotion"]
        assert len(waited) >= 3
        assert all(late - early > 0.9 for early, late in itertools.pairwise(waited))
        assert await stored_epoch(on) == (1, "ACTIVE", BACKEND.address)


async def test_only_unknown_sessions_left_is_an_exit_of_its_own_with_the_line_that_resolves(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        await hold(on, SessionState.UNKNOWN)
        with_standby(on)
        outcome = await run(on)
        assert (outcome.code, outcome.unknown) == (Code.UNKNOWN_LEFT, ("main/0.7",))
        assert f"pooler ledger resolve {DB} --epoch 1" in outcome.resolve
        assert await stored_epoch(on) == (1, "ACTIVE", BACKEND.address)


async def test_an_abort_ends_the_command_and_the_old_epoch_grants(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        await hold(on)
        with_standby(on)

        async def abort_later() -> None:
            with trio.move_on_after(2.0):
                await trio.sleep_forever()
            assert await abort(on.store, FLEET, DB, now_us=lambda: NOW_US)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(abort_later)
            outcome = await run(on)
        assert (outcome.code, trio.current_time() < 3) == (Code.TIMED_OUT, True)
        assert "aborted" in outcome.text
        assert await stored_epoch(on) == (1, "ACTIVE", BACKEND.address)
        assert not await abort(on.store, FLEET, DB, now_us=lambda: NOW_US)


async def test_a_cancelled_command_puts_the_old_epoch_back(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        await hold(on)
        with_standby(on)
        with trio.move_on_after(2.0):
            await run(on)
        assert await stored_epoch(on) == (1, "ACTIVE", BACKEND.address)
        assert KEYS.drain() not in on.keyspace.entries


async def test_a_dead_command_loses_its_key_and_the_leader_puts_the_old_epoch_back(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        register(on.keyspace, "A")
        await hold(on)
        with_standby(on)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, on)
            with trio.move_on_after(2.0):
                await trio.sleep_forever()
            on.store.expire(on.keyspace.entries[KEYS.drain()].lease)
            await on.put("/never", b"")
            fence = replace(NO_FENCE, revision=0)
            await on.reconciler.reconcile(DB, fence)
            assert await stored_epoch(on) == (1, "ACTIVE", BACKEND.address)


async def test_a_second_drain_is_refused_while_one_runs(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        await hold(on)
        with_standby(on)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, on)
            with trio.move_on_after(1.0):
                await trio.sleep_forever()
            outcome = await run(on)
            assert outcome.code is Code.UNFIT
            assert (await stored_epoch(on))[1] == EpochState.DRAINING
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("how", [{"switch_first": True}, {"role": "read"}, {"target": None}])
async def test_new_first_the_next_epoch_is_active_at_once_and_the_old_drains_behind_it(
    tmp_path: Path, clock: MockClock, how: dict[str, Any]
) -> None:
    async with stage(tmp_path) as on:
        permit = await hold(on)
        with_standby(on).backend = replace(BACKEND, address=STANDBY, in_recovery="role" in how)
        async with trio.open_nursery() as nursery:
            outcomes: list[DrainOutcome] = []

            async def note() -> None:
                outcomes.append(await run(on, **how))

            nursery.start_soon(note)
            with trio.move_on_after(1.0):
                await trio.sleep_forever()
            assert (await stored_epoch(on))[:2] == (2, "ACTIVE")
            assert outcomes == []
            await on.ledger.apply(Release(permit, Proof.EOF, Actor.OWNER))
        assert outcomes[0].code is Code.DRAINED
        renewed = "target" in how
        assert (await stored_epoch(on))[2] == (BACKEND.address if renewed else STANDBY)
