"""Two generations of a policy over the same slots: which grants, and never more than the larger has."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ledger.invariants import check_ledger
from coordinator.ledger.ledger import Applied, Granted, Ledger
from coordinator.ledger.limits import Limits, generation_for, limits_for, share_of
from coordinator.ledger.record import Alias, Epoch, Kind
from coordinator.ledger.rules import Code, Refused, Release
from coordinator.ledger.states import Actor, Proof
from coordinator.store.api import Put
from coordinator.store.memory import Keyspace
from tests.ledger.ground import KEYS, World, ask, policy, session, world, write

OLD, NEW = 1, 2


def publish(keyspace: Keyspace, slots: int, **limits: int) -> None:
    write(keyspace, Put(KEYS.policy(NEW), policy(slots, **limits)))


def alias(keyspace: Keyspace, now: Alias) -> None:
    write(keyspace, Put(KEYS.alias(), now.encode()))


def requests_of(now: Alias, generation: int, count: int) -> list[str]:
    """Names of requests that this generation grants."""
    names = (f"r{number}" for number in range(10_000))
    return [name for name in names if generation_for(now, name, Kind.MAIN) == generation][:count]


async def give_back(ledger: Ledger, granted: Granted) -> None:
    answer = await ledger.apply(Release(granted.permit, Proof.UNUSED, Actor.OWNER))
    assert isinstance(answer, Applied)


async def refused(on: World, request: str) -> Refused:
    answer = await on.ledger.reserve(ask(request))
    assert isinstance(answer, Refused), answer
    return answer


async def sound(on: World) -> Counter[int]:
    """Sessions by generation, in a ledger in which every invariant holds."""
    snapshot = await on.ledger.snapshot()
    assert check_ledger(snapshot, KEYS) == []
    return Counter(held.session.policy_generation for held in snapshot.sessions)


async def test_trace_10_a_policy_that_shrinks_grants_nothing_while_a_slot_beyond_it_is_held() -> None:
    """Slots 0 and 2 are held as N goes from 4 to 2: slot 1 is free, and a third session would be one too
    many."""
    on = world(4)
    held = [await on.granted(f"r{number}") for number in range(3)]
    await give_back(on.ledger, held[1])
    assert [each.permit.slot for each in held] == [0, 1, 2]
    publish(on.keyspace, 2)
    alias(on.keyspace, Alias(NEW, previous=OLD))
    assert (await refused(on, "r3")).code is Code.FULL
    assert (await refused(on, "r3")).detail == "slots beyond the policy's number are still held"
    await give_back(on.ledger, held[2])
    assert (await on.granted("r3")).permit.slot == 1
    assert (await refused(on, "r4")).code is Code.FULL
    await sound(on)


@pytest.mark.parametrize(("old", "new"), [(4, 8), (8, 4), (4, 4)])
async def test_in_a_takeover_each_takes_of_its_own_slots_and_both_together_hold_the_larger_number(
    old: int, new: int
) -> None:
    on, now = world(old), Alias(OLD, NEW, 0.5)
    publish(on.keyspace, new)
    alias(on.keyspace, now)
    slots = {}
    for generation, limit in ((OLD, old), (NEW, new)):
        for request in requests_of(now, generation, 10):
            answer = await on.ledger.reserve(ask(request))
            if isinstance(answer, Granted):
                slots[answer.permit.slot] = generation
                assert answer.permit.slot < limit
    assert len(slots) == max(old, new)
    assert sum((await sound(on)).values()) == max(old, new)
    grown = Alias(NEW, previous=OLD)
    alias(on.keyspace, grown)
    if new < old:
        assert (await refused(on, "late")).code is Code.FULL
    await sound(on)


async def test_under_a_withdrawn_generation_nothing_is_granted_and_the_one_before_grants() -> None:
    on = world(4)
    publish(on.keyspace, 8)
    alias(on.keyspace, Alias(NEW, previous=OLD))
    ours = [await on.granted(f"r{number}") for number in range(6)]
    alias(on.keyspace, Alias(NEW, previous=OLD, withdrawn=NEW))
    assert "beyond" in (await refused(on, "late")).detail  # slots 4 and 5 are held
    for each in ours[3:]:
        await give_back(on.ledger, each)
    assert (await on.granted("late")).permit.slot == 3
    assert await sound(on) == {NEW: 3, OLD: 1}


async def test_a_takeover_is_of_sessions_for_clients_only() -> None:
    now = Alias(OLD, NEW, 1.0)
    assert [generation_for(now, "r", kind) for kind in Kind] == [NEW, NEW, OLD, OLD]


@given(st.text(min_size=1), st.floats(0.01, 1))
def test_a_request_belongs_to_one_generation_for_as_long_as_the_fraction_stands(
    request: str, fraction: float
) -> None:
    now = Alias(OLD, NEW, fraction)
    taken = share_of(request) < fraction
    assert 0 <= share_of(request) < 1
    assert generation_for(now, request, Kind.MAIN) == (NEW if taken else OLD)
    assert generation_for(replace(now, withdrawn=NEW), request, Kind.MAIN) == OLD
    assert generation_for(replace(now, takeover_fraction=0.0), request, Kind.MAIN) == OLD


def test_the_fraction_is_that_of_all_requests() -> None:
    taken = sum(share_of(f"request {number}") < 0.05 for number in range(20_000))
    assert 900 < taken < 1100


@given(st.integers(1, 9), st.integers(1, 9), st.text(min_size=1), st.floats(0, 1))
def test_the_bound_is_the_larger_of_those_that_grant(old: int, new: int, request: str, part: float) -> None:
    now = Alias(OLD, NEW, part)
    limits = limits_for(now, request, Kind.MAIN, {OLD: Limits(old), NEW: Limits(new)})
    assert limits.of(Kind.MAIN) == (new if share_of(request) < part else old)
    assert limits.bound(Kind.MAIN) == (max(old, new) if part else old)


async def test_the_topmost_failover_permits_are_granted_only_while_an_epoch_says_failover() -> None:
    on = world(4)
    write(on.keyspace, Put(KEYS.policy(OLD), _with_failover(policy(4), 2)))
    slots = {(await on.granted(f"r{number}")).permit.slot for number in range(2)}
    assert slots == {0, 1}
    assert (await refused(on, "r2")).code is Code.FULL
    epoch = Epoch.decode(on.keyspace.entries[KEYS.epoch()].value)
    write(on.keyspace, Put(KEYS.epoch(), replace(epoch, number=2, failover=True).encode()))
    late = {(await on.granted(f"late{number}")).permit.slot for number in range(2)}
    assert late == {2, 3}
    assert (await refused(on, "full")).code is Code.FULL
    write(on.keyspace, Put(KEYS.epoch(), replace(epoch, number=2, failover=False).encode()))
    assert (await refused(on, "over")).code is Code.FULL
    await sound(on)


async def test_failover_permits_keep_no_other_kind_from_its_slots() -> None:
    on = world(4)
    write(on.keyspace, Put(KEYS.policy(OLD), _with_failover(policy(4, reserve=1, admin=1), 4)))
    assert (await refused(on, "main")).code is Code.FULL
    for kind in (Kind.RESERVE, Kind.ADMIN):
        assert isinstance(await on.ledger.reserve(ask(str(kind), kind=kind, seats=0)), Granted)


async def test_a_reservation_planned_before_the_failover_was_over_loses() -> None:
    """The rule stands in the transaction: it compares the epoch."""
    on = world(2)
    write(on.keyspace, Put(KEYS.policy(OLD), _with_failover(policy(2), 2)))
    epoch = Epoch.decode(on.keyspace.entries[KEYS.epoch()].value)
    write(on.keyspace, Put(KEYS.epoch(), replace(epoch, failover=True).encode()))
    await on.granted("r0")  # the ledger knows the grounds now
    write(on.keyspace, Put(KEYS.epoch(), replace(epoch, failover=False).encode()))
    assert (await refused(on, "r1")).code is Code.FULL


async def test_i11_names_what_a_move_of_the_alias_must_never_leave() -> None:
    on = world(4)
    publish(on.keyspace, 2)
    for slot in range(2):
        write(on.keyspace, Put(KEYS.session(Kind.MAIN, slot), session(
            slot=slot, seat=-1, request_id=f"r{slot}", policy_generation=NEW).encode()))
    found = check_ledger(await on.ledger.snapshot(), KEYS)
    assert [(each.invariant, each.what) for each in found] == [("I11", "granted_by_none")] * 2
    alias(on.keyspace, Alias(OLD, NEW, withdrawn=NEW))
    assert check_ledger(await on.ledger.snapshot(), KEYS) == []
    write(on.keyspace, Put(KEYS.session(Kind.MAIN, 2), session(
        slot=2, seat=-1, request_id="r2", policy_generation=NEW).encode()))
    alias(on.keyspace, Alias(NEW, previous=OLD))
    wrong = {(each.invariant, each.what) for each in check_ledger(await on.ledger.snapshot(), KEYS)}
    assert wrong == {("I1", "over_budget"), ("I1", "slot_beyond_policy"), ("I11", "generations_over_budget")}


def _with_failover(raw: bytes, permits: int) -> bytes:
    packed: bytes = msgpack.packb({**msgpack.unpackb(raw), "resolved": {"failoverPermits": permits}})
    return packed
