"""Which slot a living session gets in a rebuilt ledger, and when that ledger may grant."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.ledger.access import Memory, Seen
from coordinator.ledger.invariants import check_ledger
from coordinator.ledger.ledger import Applied, Granted, Ledger
from coordinator.ledger.living import Living
from coordinator.ledger.proofs import Look, Proven, Row, proof_of_absence
from coordinator.ledger.record import Kind, LedgerHead, LedgerState, Permit, Session
from coordinator.ledger.recovery import (
    Role,
    disagreement,
    not_heard,
    plan_living,
    plan_shown,
    without_permit,
)
from coordinator.ledger.rules import Code, Refused, Release
from coordinator.ledger.snapshot import LedgerSnapshot
from coordinator.ledger.states import Actor, Proof, SessionState
from coordinator.store.api import Lost, Put, Won
from tests.ledger.ground import BACKEND, KEYS, NOW_US, TAG, World, ask, ledger_on, session, world, write

BASE = 1_000
HEAD = LedgerHead("second", LedgerState.RECOVERING, "eeee5678", rebuilt="0001", tag_before=TAG,
                  generation_base=BASE)
ROLES = {Role("app", "app")}


def living(number: int = 1, **changes: object) -> Living:
    """A session of the lost ledger in slot `number`."""
    base = Living(Permit(Kind.MAIN, number, 500 + number), "app", "app", 100, 40 + number, 5_000 + number,
                  BACKEND, 1)
    return replace(base, **changes)  # type: ignore[arg-type]


def recovering(slots: int = 4, head: LedgerHead = HEAD) -> World:
    w = world(slots)
    write(w.keyspace, Put(KEYS.ledger(), head.encode()))
    w.ledger = ledger_on(w.store, memory=Memory(Seen("first", 1)))
    return w


async def give(w: World, each: Living, owner: str = "A") -> Session | None:
    """The slot it gets, written; None where there is none."""
    snapshot = await w.ledger.snapshot()
    plan = plan_living(each, snapshot, KEYS, snapshot.head_revision, owner=owner, host="host", now_us=NOW_US)
    if plan is None:
        return None
    assert isinstance(w.keyspace.txn(plan.txn), Won)
    return next(held.session for held in (await w.ledger.snapshot()).sessions
                if held.session.pid == each.pid)


async def show(w: World, row: Row) -> Session:
    """A row that its server shows gets its slot."""
    snapshot = await w.ledger.snapshot()
    plan = plan_shown(row, BACKEND, snapshot, KEYS, snapshot.head_revision, NOW_US)
    assert isinstance(w.keyspace.txn(plan.txn), Won)
    return next(held.session for held in (await w.ledger.snapshot()).sessions if held.session.pid == row.pid)


def row_of(each: Living, name: str = "") -> Row:
    return Row(each.pid, each.backend_start_us, each.user, each.dbname, name, "idle", "client backend")


def look(*rows: Row, **changes: object) -> Look:
    base = Look(BACKEND, may_see_all=True, is_node=True, rows=rows, anonymous=frozenset(), at_us=0,
                connection=1, authentication_timeout_seconds=60, is_local=True)
    return replace(base, **changes)  # type: ignore[arg-type]


async def test_a_living_session_gets_its_slot_again_and_a_permit_that_never_was() -> None:
    w = recovering()
    got = await give(w, living(2))
    assert got is not None
    assert (got.slot, got.state, got.owner, got.pid, got.seat) == (2, SessionState.OPEN, "A", 42, 0)
    assert got.generation == BASE + w.keyspace.revision > living(2).permit.generation
    assert check_ledger(await w.ledger.snapshot(), KEYS) == []


async def test_where_its_slot_is_taken_it_gets_another_and_where_none_is_free_none() -> None:
    w = recovering(slots=2)
    slots = [await give(w, living(1, pid=pid)) for pid in (1, 2, 3)]
    assert [each.slot if each else None for each in slots] == [1, 0, None]
    assert check_ledger(await w.ledger.snapshot(), KEYS) == []


async def test_a_slot_beyond_the_policy_is_not_given_again() -> None:
    got = await give(recovering(slots=2), living(7))
    assert got is not None
    assert got.slot == 0


async def test_what_a_server_showed_before_its_worker_spoke_is_taken_over() -> None:
    w = recovering()
    shown = await show(w, row_of(living(2)))
    assert (shown.state, shown.owner, shown.seat) == (SessionState.UNKNOWN, "", -1)
    got = await give(w, living(2))
    assert got is not None
    assert (got.permit, got.state, got.owner) == (shown.permit, SessionState.OPEN, "A")
    assert len((await w.ledger.snapshot()).sessions) == 1


async def test_two_that_find_one_session_give_it_one_slot() -> None:
    w = recovering()
    before = await w.ledger.snapshot()
    one = plan_living(living(2), before, KEYS, before.head_revision, owner="A", host="host", now_us=NOW_US)
    other = plan_shown(row_of(living(2)), BACKEND, before, KEYS, before.head_revision, NOW_US)
    assert one is not None
    assert {type(w.keyspace.txn(plan.txn)) for plan in (one, other)} == {Won, Lost}
    assert len((await w.ledger.snapshot()).sessions) == 1


async def test_who_goes_by_an_older_look_makes_no_second_slot_though_the_owners_lease_is_over() -> None:
    w = recovering()
    assert await give(w, living(2)) is not None
    w.end_lease("A")
    now = await w.ledger.snapshot()
    late = plan_shown(row_of(living(2)), BACKEND, now, KEYS, now.head_revision, NOW_US)
    assert isinstance(w.keyspace.txn(late.txn), Lost)
    assert [held.session.owner for held in (await w.ledger.snapshot()).sessions] == ["A"]


async def test_a_slot_of_the_older_state_that_names_it_is_its_own_still() -> None:
    w = recovering()
    old = session(SessionState.OPEN, slot=3, generation=7, seat=0)
    write(w.keyspace, Put(KEYS.session(Kind.MAIN, 3), old.encode()))
    got = await give(w, living(3, pid=old.pid, backend_start_us=old.backend_start_us))
    assert got is not None
    assert got.permit == old.permit


async def test_one_that_is_to_be_terminated_is_not_taken_over() -> None:
    w = recovering()
    old = session(SessionState.UNKNOWN, terminating=True)
    write(w.keyspace, Put(KEYS.session(Kind.MAIN, 0), old.encode()))
    assert await give(w, living(0, pid=old.pid, backend_start_us=old.backend_start_us)) is None


async def test_once_the_ledger_grants_a_worker_takes_over_and_nothing_more() -> None:
    w = recovering()
    await show(w, row_of(living(1)))
    write(w.keyspace, Put(KEYS.ledger(), replace(HEAD, state=LedgerState.ACTIVE).encode()))
    assert await give(w, living(1)) is not None
    assert await give(w, living(2)) is None


async def test_nothing_is_made_after_the_ledger_has_moved_on_or_its_worker_has_registered_anew() -> None:
    for change in (Put(KEYS.ledger(), replace(HEAD, state=LedgerState.ACTIVE).encode()),
                   Put(KEYS.worker("A"), b"again")):
        w = recovering()
        before = await w.ledger.snapshot()
        plan = plan_living(
            living(), before, KEYS, before.head_revision, owner="A", host="host", now_us=NOW_US)
        assert plan is not None
        write(w.keyspace, change)
        assert isinstance(w.keyspace.txn(plan.txn), Lost)


async def test_a_recovering_ledger_grants_nothing_and_a_rebuilt_one_nothing_that_was_granted_before() -> None:
    w = recovering()
    answer = await w.ledger.reserve(ask("r1"))
    assert isinstance(answer, Refused)
    assert answer.code is Code.LEDGER_LOST
    write(w.keyspace, Put(KEYS.ledger(), replace(HEAD, state=LedgerState.ACTIVE).encode()))
    granted = await w.ledger.reserve(ask("r1"))
    assert isinstance(granted, Granted)
    assert granted.permit.generation == BASE + w.keyspace.revision
    assert await w.ledger.reserve(ask("r1")) == granted, "a repeated request gets the same permit"
    assert isinstance(
        await w.ledger.apply(Release(granted.permit, Proof.UNUSED, Actor.OWNER)), Applied)
    assert isinstance(await w.ledger.reserve(ask("r2")), Granted)
    assert await w.ledger.void("r2", "A")
    assert (await w.ledger.snapshot()).sessions == ()


async def test_sessions_beyond_all_slots_are_counted_and_nothing_is_granted_before_they_are_gone() -> None:
    w = recovering(slots=1)
    first, second = await show(w, row_of(living(1))), await show(w, row_of(living(2)))
    assert (first.slot, second.slot) == (0, 1)
    write(w.keyspace, Put(KEYS.ledger(), replace(HEAD, state=LedgerState.ACTIVE).encode()))
    await free(w.ledger, first)
    assert isinstance(await w.ledger.reserve(ask("r1")), Refused)
    await free(w.ledger, second)
    assert isinstance(await w.ledger.reserve(ask("r1")), Granted)


async def free(ledger: Ledger, each: Session) -> None:
    release = Release(each.permit, Proof.ABSENT, Actor.BACKEND_REAPER)
    assert isinstance(await ledger.apply(release), Applied)


async def test_the_rows_that_need_a_permit_are_those_of_our_roles_and_tags_that_have_none() -> None:
    w = recovering()
    await give(w, living(1))
    stranger = replace(row_of(living(3)), user="cron")
    rows = (row_of(living(1)), row_of(living(2)), stranger, replace(stranger, pid=9, user="x",
            application_name=f"pooler:{TAG}:m3.503"), replace(stranger, application_name="pooler:x:reaper"),
            # of a monitor that is a pool's role, and of another fleet
            replace(row_of(living(5)), application_name="pooler:new:reaper"),
            replace(row_of(living(6)), dbname="elsewhere", application_name="pooler:x:m1.2"),
            replace(row_of(living(4)), backend_type="walsender"))
    found = without_permit(await w.ledger.snapshot(), look(*rows), ROLES)
    assert [row.pid for row in found] == [42, 9]


@pytest.mark.parametrize(("seen", "why"), [
    (look(row_of(living(1)), row_of(living(2))), "has no permit"),
    (look(), "does not show pid"),
    (look(row_of(living(1)), anonymous=frozenset({77})), "starting"),
    (look(row_of(living(1)), may_see_all=False), "pg_monitor"),
    (look(row_of(living(1))), ""),
])
async def test_it_grants_again_when_servers_and_ledger_agree(seen: Look, why: str) -> None:
    w = recovering()
    await give(w, living(1))
    found = disagreement(await w.ledger.snapshot(), [seen], ROLES)
    assert why in found
    assert bool(found) == bool(why)


async def test_every_worker_that_lives_is_waited_for_and_no_command() -> None:
    snapshot: LedgerSnapshot = await recovering().ledger.snapshot()
    assert not_heard(snapshot, KEYS.database) == ["A", "B"]
    a, b = snapshot.workers["A"], snapshot.workers["B"]
    heard = replace(a, worker=replace(a.worker, recovered={KEYS.database: "second"}))
    command = replace(b, worker=replace(b.worker, index=-1))
    assert not_heard(replace(snapshot, workers={"A": heard, "B": command}), KEYS.database) == []


def test_a_birth_under_the_lost_ledgers_tag_is_a_birth() -> None:
    unborn = session(SessionState.UNKNOWN, pid=0, backend_start_us=0)
    born = replace(row_of(living(1)), application_name=unborn.permit.birth_tag(TAG))
    first, second = look(), look(at_us=10**12, connection=2)
    for rows, proven in (((), True), ((born,), False)):
        verdict = proof_of_absence(
            unborn, replace(second, rows=rows), ledger_tag=HEAD.tag, tag_before=HEAD.tag_before,
            owner_known_dead=True, first=first)
        assert isinstance(verdict, Proven) == proven
