"""A shadow's decisions are counted beside the active generation's, and hold for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.ledger.answers import Granted
from coordinator.ledger.limits import Limits
from coordinator.ledger.notes import ShadowCount
from coordinator.ledger.record import Alias, Kind, Permit
from coordinator.ledger.rules import Code, Refused
from coordinator.link import LinkRefused
from coordinator.policy import encode_policy, load_policy
from coordinator.publishing import read_shadow_counts
from coordinator.shadowing import Decision, Shadowing, count, decision_of, is_shadowed
from tests.coordinator.parts import Worker, policy_text
from tests.coordinator.stage import DB, TTL_SECONDS, Stage, stage
from tests.ledger.ground import FLEET, KEYS, NOW_US, ask

YES, NO = Decision(Kind.MAIN, granted=True), Decision(Kind.MAIN, granted=False)


@pytest.mark.parametrize(("slots", "held", "decisions", "counted"), [
    (4, 2, [YES, YES], (0, 0, 2)),
    (2, 3, [YES, YES, YES], (1, 0, 2)),  # the third one is one too many for the shadow
    (6, 4, [NO, NO], (0, 2, 0)),
    (4, 4, [YES, NO], (0, 0, 1)),  # neither would grant the second
])
def test_who_would_have_granted(
    slots: int, held: int, decisions: list[Decision], counted: tuple[int, int, int]
) -> None:
    after = count(ShadowCount(), decisions, {Kind.MAIN: held}, Limits(slots), failover=False)
    assert (after.only_active, after.only_shadow, after.both) == counted


def test_what_is_kept_for_a_failover_is_not_granted_by_a_shadow_either() -> None:
    for failover, both in ((False, 0), (True, 1)):
        after = count(ShadowCount(), [YES], {Kind.MAIN: 4}, Limits(4, failover=1), failover=failover)
        assert after.both == both


def test_only_what_the_number_of_slots_decides_is_compared() -> None:
    granted = Granted(Permit(Kind.MAIN, 0, 1), 1, "h:1", "tag", 1)
    assert decision_of(ask("r"), granted) == YES
    assert decision_of(ask("r"), Refused(Code.FULL)) == NO
    for code in Code:
        assert code is Code.FULL or decision_of(ask("r"), Refused(code)) is None
    assert decision_of(ask("r", kind=Kind.ADMIN), granted) is None


@pytest.mark.parametrize(("alias", "shadowed"), [
    (Alias(1, 2), True), (Alias(1), False), (None, False), (Alias(1, 2, 0.1), False),
    (Alias(1, 2, withdrawn=2), False)])
def test_a_shadow_that_grants_is_none(alias: Alias | None, shadowed: bool) -> None:
    assert is_shadowed(alias) == shadowed


async def pass_time(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


async def shadow(on: Stage, slots: int) -> None:
    await on.put(KEYS.policy(2), encode_policy(load_policy(policy_text(slots, db=DB))[1]))
    await on.put(KEYS.alias(), Alias(1, 2).encode())
    on.views.hint()
    await pass_time(1)


async def refusal(worker: Worker) -> str:
    with pytest.raises(LinkRefused) as refused:
        await worker.reserve(db=DB)
    return refused.value.code


async def test_the_counts_of_a_host_grow_in_etcd_and_the_active_one_grants(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path, slots=2) as on, on.worker("A") as worker:
        shadowing = Shadowing(on.store, FLEET, lambda: on.views.views, host="host", ttl_seconds=TTL_SECONDS,
                              now_us=lambda: NOW_US)
        on.workers.on_decided.append(shadowing.decided)
        on.nursery.start_soon(shadowing.run)
        await worker.reserve(db=DB)  # before there is a shadow
        await shadow(on, 1)
        await worker.reserve(db=DB)
        assert await refusal(worker) == "full"
        await pass_time(2 * TTL_SECONDS)
        assert await read_shadow_counts(on.store, KEYS, 2) == ShadowCount(1, 0, 0, since_us=NOW_US)
        await shadow(on, 3)
        assert await refusal(worker) == "full"
        await pass_time(2 * TTL_SECONDS)
        assert await read_shadow_counts(on.store, KEYS, 2) == ShadowCount(1, 1, 0, since_us=NOW_US)
        assert len(await on.states()) == 2


async def test_without_a_shadow_nothing_is_asked_of_etcd(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        shadowing = Shadowing(on.store, FLEET, lambda: on.views.views, host="host", ttl_seconds=TTL_SECONDS,
                              now_us=lambda: NOW_US)
        on.workers.on_decided.append(shadowing.decided)
        await worker.reserve(db=DB)
        before = on.store.asked
        async with trio.open_nursery() as nursery:
            nursery.start_soon(shadowing.run)
            await wait_all_tasks_blocked()
            assert on.store.asked == before
            nursery.cancel_scope.cancel()
