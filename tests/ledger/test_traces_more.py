"""More ways to break a ledger, by the numbers of docs/ledger-cases.md; see test_traces.py for 1-8, 14, 18-21.

That page names the tests of the others, and what waits for parts that are not built yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from coordinator.epoch import not_acknowledged
from coordinator.ledger.homes import Home
from coordinator.ledger.invariants import check_server, reaper_name
from coordinator.ledger.ledger import Applied, Granted
from coordinator.ledger.proofs import Awaiting, Look, Proven, Row
from coordinator.ledger.record import Alias, EpochState, Kind, Permit, Worker
from coordinator.ledger.rules import (
    Closing,
    Code,
    MarkOwnerGone,
    Open,
    Refused,
    Release,
    Unknown,
    Write,
    decide,
)
from coordinator.ledger.states import MOVES, Actor, Proof, SessionState
from coordinator.placement import Demand, crowded
from coordinator.reaping import Case, FirstLooks, unknown_cases
from coordinator.store.api import Lost, Put, Txn, Won
from coordinator.store.memory import MemoryStore
from coordinator.waiting import Holding, Pool, Waiter, choose_shed
from pooler.pool.core import PoolCore
from tests.coordinator.stage import NO_FENCE, TTL_SECONDS, row, stage
from tests.coordinator.test_room import policy as published
from tests.ledger.ground import (
    BACKEND,
    KEYS,
    NOW_US,
    TAG,
    World,
    ask,
    entry_of,
    epoch,
    ledger_on,
    policy,
    record_exit,
    register,
    session,
    world,
    write,
)
from tests.pool.fake_session import FakeSession


class Interrupted(MemoryStore):
    """Something happens right after the first transaction that reads `key`."""

    def __init__(self, w: World, key: str, happens: Callable[[], None]) -> None:
        super().__init__(w.keyspace)
        self._key = key
        self._happens: Callable[[], None] | None = happens

    async def txn(self, txn: Txn) -> Won | Lost:
        answer = await super().txn(txn)
        if self._happens is not None and any(start == self._key for start, _ in txn.reads):
            happens, self._happens = self._happens, None
            happens()
        return answer


def shrink(w: World) -> None:
    """Policy 2, of two slots, is active from now on."""
    write(w.keyspace, Put(KEYS.policy(2), policy(2)), Put(KEYS.alias(), Alias(2).encode()))


def refused(answer: object) -> Code:
    assert isinstance(answer, Refused), answer
    return answer.code


# 10

async def test_10_while_a_slot_beyond_a_shrunk_policy_is_held_nothing_is_granted() -> None:
    w = world()
    held = [(await w.granted(f"r{number}")).permit for number in range(4)]
    shrink(w)
    for permit in held[:3]:
        await w.ledger.apply(Release(permit, Proof.UNUSED, Actor.OWNER))
    assert refused(await w.ledger.reserve(ask("late"))) is Code.FULL
    assert refused(await w.another(home=Home(1, 2)).reserve(ask("later", "B"))) is Code.FULL
    await w.ledger.apply(Release(held[3], Proof.UNUSED, Actor.OWNER))
    assert isinstance(await w.ledger.reserve(ask("last")), Granted)


async def test_10_a_policy_that_shrinks_between_two_reads_of_a_reservation_binds_it() -> None:
    for key in (KEYS.alias(), KEYS.policy(1)):
        w = world()
        for number in range(2):
            await w.granted(f"r{number}")
        store = Interrupted(w, key, lambda w=w: shrink(w))  # type: ignore[misc]
        assert refused(await ledger_on(store, home=Home(2, 4)).reserve(ask("late"))) is Code.FULL


# 11

async def test_11_a_death_that_is_on_record_no_more_frees_nothing() -> None:
    w = world()
    permit = (await w.granted()).permit
    w.end_lease("A")
    await w.ledger.apply(MarkOwnerGone(permit))
    died = record_exit(w.keyspace, "A")
    release = Release(permit, Proof.NEVER_BORN, Actor.BACKEND_REAPER, exit_revision=died)
    write(w.keyspace, deletes=(KEYS.worker_exit("A"),))
    assert refused(await w.ledger.apply(release)) is Code.UNPROVEN
    record_exit(w.keyspace, "A")
    assert refused(await w.ledger.apply(release)) is Code.UNPROVEN


async def test_11_one_process_that_died_is_not_another_of_the_same_host() -> None:
    w = world()
    permits = [(await w.granted(f"r{owner}", owner=owner)).permit for owner in ("A", "B")]
    for owner, permit in zip(("A", "B"), permits, strict=True):
        w.end_lease(owner)
        await w.ledger.apply(MarkOwnerGone(permit))
    record_exit(w.keyspace, "B")
    cases = {case.session.owner: case for case in unknown_cases(await w.ledger.snapshot())}
    assert (cases["A"].owner_known_dead, cases["B"].owner_known_dead) == (False, True)


# 15

def advance(w: World, state: EpochState = EpochState.ACTIVE, number: int = 2) -> None:
    write(w.keyspace, Put(KEYS.epoch(), epoch(number, state)))


async def test_15_who_was_paused_between_the_look_at_the_epoch_and_the_grant_gets_none_of_the_old() -> None:
    w = world()
    ledger = ledger_on(Interrupted(w, KEYS.epoch(), lambda: advance(w)))
    granted = await ledger.reserve(ask("r1"))
    assert isinstance(granted, Granted)
    assert granted.epoch == 2
    named = ledger_on(Interrupted(w, KEYS.epoch(), lambda: advance(w, number=3)))
    assert refused(await named.reserve(ask("r2", epoch=2))) is Code.DRAINING


async def test_15_a_drain_that_begins_meanwhile_lets_nobody_in() -> None:
    w = world()
    ledger = ledger_on(Interrupted(w, KEYS.epoch(), lambda: advance(w, EpochState.DRAINING, 1)))
    assert refused(await ledger.reserve(ask("r1"))) is Code.DRAINING


def test_15_an_advance_waits_for_every_worker_that_did_not_read_it() -> None:
    workers = {boot: Worker(boot, 0, 1, "host", "m", "k", 1, 2, epochs=known)
               for boot, known in (("read", {"db": 2}), ("old", {"db": 1}), ("new", {}))}
    assert not_acknowledged(2, "db", workers) == ["new", "old"]


def test_15_a_session_of_a_drained_epoch_serves_nobody_again() -> None:
    core: PoolCore[FakeSession] = PoolCore(2, 2)
    core.epoch, core.opening = 2, 1
    assert not core.opened(FakeSession(epoch=1), now=0.0)
    assert core.total == 0


# 16

def test_16_two_ledgers_that_meet_at_one_server_need_room_for_both() -> None:
    address = BACKEND.address
    seen = look(max_connections=150)
    demands = [Demand("orders", (address,), published(100)), Demand("stock", (address,), published(100))]
    assert crowded(demands[:1], {address: seen}) == {}
    assert crowded(demands, {address: seen}).keys() == {"orders", "stock"}


# 17

async def test_17_when_a_host_is_gone_for_good_only_its_fencing_or_an_attestation_frees_its_permits() -> None:
    w = world()
    permits = [(await w.granted(f"r{number}")).permit for number in range(2)]
    for permit in permits:
        await w.ledger.apply(Open(permit, 42 + permit.slot, 5_000, BACKEND))
        await w.ledger.apply(Unknown(permit))
    allowed = {(move.actor, proof) for move in MOVES for proof in move.proofs}
    for proof in (Proof.FENCED, Proof.ATTESTED):
        assert {actor for actor, each in allowed if each is proof} <= {Actor.FENCER, Actor.OPERATOR}
        wrong = Release(permits[0], proof, Actor.BACKEND_REAPER)
        assert refused(await w.ledger.apply(wrong)) is Code.ILLEGAL
    for permit, proof, actor in zip(permits, (Proof.FENCED, Proof.ATTESTED),
                                    (Actor.FENCER, Actor.OPERATOR), strict=True):
        assert isinstance(await w.ledger.apply(Release(permit, proof, actor)), Applied)


# 22

def test_22_a_young_idle_session_of_the_same_pool_is_asked_for_and_never_back_and_forth() -> None:
    pool = Pool("db", "app", "app")
    hungry = Waiter("B", pool, Code.FULL)
    rich, linked = {Holding("A", pool): 3}, frozenset(("A", "B"))
    assert choose_shed(hungry, rich, Counter(), linked) == Holding("A", pool)
    even = {Holding("A", pool): 2, Holding("B", pool): 1}
    assert choose_shed(hungry, even, Counter(), linked) is None


# 24

async def test_24_a_watch_that_was_compacted_is_begun_anew_and_nothing_that_fell_in_the_gap_is_missed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        lease = register(on.keyspace, "alive")
        held = session(SessionState.OPEN, owner="alive")
        await on.put(KEYS.session(held.kind, 0), held.encode())
        on.eyes.server.rows = [row(42, 5_000)]
        on.nursery.start_soon(on.reconciler.lead, NO_FENCE)
        with trio.move_on_after(TTL_SECONDS):
            await trio.sleep_forever()
        assert await on.states() == {0: "OPEN"}
        on.store.break_watches()
        on.keyspace.expire(lease)  # nobody watches
        for _ in range(3):
            write(on.keyspace, Put("/elsewhere/key", b""))
        on.store.compact(on.keyspace.revision)
        with trio.move_on_after(TTL_SECONDS):
            await trio.sleep_forever()
        assert await on.states() == {0: "SESSION_UNKNOWN"}


# 25

def look(*rows: Row, **changes: object) -> Look:
    base = Look(BACKEND, may_see_all=True, is_node=True, rows=rows, anonymous=frozenset(), at_us=0,
                connection=1, authentication_timeout_seconds=60, is_local=True)
    return replace(base, **changes)  # type: ignore[arg-type]


def judged(leader: FirstLooks, case: Case, now_us: int) -> Proven | Awaiting:
    seen = look(at_us=now_us, connection=now_us)
    return leader.judge(case, seen, ledger_tag=TAG, grace_seconds=0.0)


async def test_25_what_a_leader_saw_goes_with_it_and_the_next_proves_by_two_looks_of_its_own() -> None:
    w = world()
    permit = (await w.granted()).permit
    w.end_lease("A")
    await w.ledger.apply(MarkOwnerGone(permit))
    record_exit(w.keyspace, "A")
    (case,) = unknown_cases(await w.ledger.snapshot())
    first, second = FirstLooks(), FirstLooks()
    assert isinstance(judged(first, case, 1), Awaiting)
    assert isinstance(judged(second, case, 130_000_000), Awaiting)
    assert isinstance(judged(second, case, 260_000_000), Proven)


# 26

class Contended(MemoryStore):
    """Counts the reservations that lost."""

    lost = 0

    async def txn(self, txn: Txn) -> Won | Lost:
        answer = await super().txn(txn)
        self.lost += bool(txn.puts) and isinstance(answer, Lost)
        return answer


async def test_26_coordinators_that_begin_at_home_do_not_get_into_each_others_way() -> None:
    w = world(slots=256)
    store = Contended(w.keyspace)
    ledgers = [ledger_on(store, home=Home(number, 4)) for number in range(4)]

    async def opens_sixteen(number: int) -> None:
        for each in range(16):
            granted = await ledgers[number].reserve(ask(f"{number}-{each}", user=f"u{number}"))
            assert isinstance(granted, Granted)
            assert granted.permit.slot // 64 == number

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(opens_sixteen, number)
    assert store.lost == 0


# 28

async def test_28_a_command_has_a_permit_of_its_own_and_the_reaper_alone_needs_none() -> None:
    w = world(slots=1)
    await w.granted("r1")
    advance(w, EpochState.DRAINING, 1)
    admin = await w.ledger.reserve(ask("doctor", kind=Kind.ADMIN, seats=0))
    assert isinstance(admin, Granted)  # with every main slot taken, and while the server drains
    tag = (await w.ledger.snapshot()).head
    assert tag is not None
    reaper = Row(1, 1, "mon", "app", reaper_name(tag.tag), "idle", "client backend")
    doctor = Row(2, 1, "mon", "app", admin.permit.birth_tag(tag.tag), "idle", "client backend")
    snapshot = await w.ledger.snapshot()
    assert check_server(snapshot, [reaper, doctor]) == []
    twice = check_server(snapshot, [reaper, replace(reaper, pid=3), doctor])
    assert [each.what for each in twice] == ["second_reaper"]
    stray = check_server(snapshot, [replace(doctor, application_name="doctor")])
    assert [each.what for each in stray] == ["session_without_permit"]


# 30

@pytest.mark.parametrize("command", [Closing, MarkOwnerGone, Unknown])
def test_30_no_clock_decides_anything(command: Callable[[Permit], Closing | MarkOwnerGone | Unknown]) -> None:
    stored = session(SessionState.OPEN)
    found = []
    for since, now in ((0, NOW_US), (NOW_US, 0), (2 * NOW_US, NOW_US)):
        decision = decide(entry_of(replace(stored, state_since_us=since)), command(stored.permit), KEYS, now)
        assert isinstance(decision, Write)
        found.append((decision.txn.compares, decision.session and decision.session.state))
    assert found[0] == found[1] == found[2]
