"""A reservation takes slot, seat and receipt in one transaction, on all it was decided on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ledger.limits import Limits, limits_of_policy
from coordinator.ledger.record import Alias, EpochState, Kind, LedgerHead, LedgerState
from coordinator.ledger.reservation import (
    WINDOW,
    Grounds,
    Plan,
    Reserve,
    Window,
    grounds_from,
    grounds_reads,
    plan_reservation,
    plan_void,
    window_at,
)
from coordinator.ledger.rules import Code, Refused
from coordinator.ledger.snapshot import reading
from coordinator.store.api import TXN_OPERATIONS_MAX, Lost, Put, Won
from coordinator.store.memory import Keyspace
from tests.ledger.ground import FLEET, KEYS, NOW_US, TAG, ask, epoch, found, policy, register, write


def grounds(keyspace: Keyspace, wish: Reserve, slots: int = 4, home: int = 0, turn: int = 0) -> Grounds:
    limits = Limits(slots, admin=2)
    window = window_at(KEYS, wish.kind, limits.of(wish.kind), home, turn)
    outcome = keyspace.txn(reading(*grounds_reads(wish, KEYS, limits, window)))
    assert isinstance(outcome, Lost)
    return grounds_from(outcome.reads, limits, window)


def plan(keyspace: Keyspace, wish: Reserve, **options: int) -> Plan:
    made = plan_reservation(wish, grounds(keyspace, wish, **options), KEYS, NOW_US)
    assert isinstance(made, Plan), made
    return made


@pytest.fixture
def keyspace() -> Keyspace:
    keyspace = found()
    register(keyspace, "A")
    return keyspace


def test_slot_seat_and_receipt_are_made_at_one_revision_and_only_the_receipt_is_leased(
    keyspace: Keyspace,
) -> None:
    made = plan(keyspace, ask("r1"))
    won = keyspace.txn(made.txn)
    new = [entry for entry in keyspace.entries.values() if entry.create_revision == won.revision]
    assert {entry.key: bool(entry.lease) for entry in new} == {
        KEYS.session(Kind.MAIN, 0): False, KEYS.seat("app", "app", 0): False, KEYS.receipt("r1"): True}


def test_40_reservations_fit_one_transaction(keyspace: Keyspace) -> None:
    made = plan(keyspace, ask("r1")).txn
    own = [compare for compare in made.compares if compare.revision == 0 and compare.range_end is None]
    common = len(made.compares) - len(own)
    assert 40 * max(len(own), len(made.puts)) + common <= TXN_OPERATIONS_MAX


def _moved_worker(keyspace: Keyspace) -> None:
    entry = keyspace.entries[KEYS.worker("A")]
    write(keyspace, Put(entry.key, entry.value, entry.lease))


def _expired_worker(keyspace: Keyspace) -> None:
    keyspace.expire(keyspace.entries[KEYS.worker("A")].lease)


def _new_incarnation(keyspace: Keyspace) -> None:
    write(keyspace, Put(KEYS.ledger(), LedgerHead("second", LedgerState.ACTIVE, TAG).encode()))


def _drained(keyspace: Keyspace) -> None:
    write(keyspace, Put(KEYS.epoch(), epoch(1, EpochState.DRAINING)))


def _other_policy(keyspace: Keyspace) -> None:
    write(keyspace, Put(KEYS.alias(), Alias(2).encode()), Put(KEYS.policy(2), policy(2)))


def _held_beyond(keyspace: Keyspace) -> None:
    write(keyspace, Put(KEYS.session(Kind.MAIN, 9), b""))


def _slot_taken(keyspace: Keyspace) -> None:
    write(keyspace, Put(KEYS.session(Kind.MAIN, 0), b""))


def _seat_taken(keyspace: Keyspace) -> None:
    write(keyspace, Put(KEYS.seat("app", "app", 0), b""))


def _voided(keyspace: Keyspace) -> None:
    keyspace.txn(plan_void("r1", Kind.MAIN, keyspace.entries[KEYS.worker("A")], KEYS))


@pytest.mark.parametrize("change", [
    _moved_worker, _expired_worker, _new_incarnation, _drained, _other_policy, _held_beyond, _slot_taken,
    _seat_taken, _voided])
def test_a_plan_loses_once_anything_it_stands_on_has_changed(keyspace: Keyspace, change: object) -> None:
    made = plan(keyspace, ask("r1"))
    assert callable(change)
    change(keyspace)
    assert isinstance(keyspace.txn(made.txn), Lost)


def test_a_void_loses_against_a_granted_request_and_one_of_another_registration(keyspace: Keyspace) -> None:
    worker = keyspace.entries[KEYS.worker("A")]
    assert isinstance(keyspace.txn(plan(keyspace, ask("r1")).txn), Won)
    assert isinstance(keyspace.txn(plan_void("r1", Kind.MAIN, worker, KEYS)), Lost)
    _moved_worker(keyspace)
    assert isinstance(keyspace.txn(plan_void("r2", Kind.MAIN, worker, KEYS)), Lost)


@pytest.mark.parametrize(("changes", "code"), [
    ({"head": None}, Code.LEDGER_LOST),
    ({"epoch": None}, Code.LEDGER_UNAVAILABLE),
    ({"alias": None}, Code.LEDGER_UNAVAILABLE),
    ({"worker": None}, Code.LEDGER_UNAVAILABLE),
    ({"beyond": True}, Code.FULL),
    ({"held": frozenset(range(4))}, Code.FULL),
    ({"window": Window((), ())}, Code.FULL),
    ({"seats": frozenset(range(100))}, Code.SEATS_FULL),
    ({"seats": frozenset(range(50, 150))}, Code.SEATS_FULL),
])
def test_why_nothing_is_planned(keyspace: Keyspace, changes: dict[str, object], code: Code) -> None:
    wish = ask("r1")
    base = grounds(keyspace, wish)
    answer = plan_reservation(wish, replace(base, **changes), KEYS, NOW_US)  # type: ignore[arg-type]
    assert isinstance(answer, Refused)
    assert answer.code is code


def test_pools_of_one_role_in_one_database_have_seats_of_their_own(keyspace: Keyspace) -> None:
    for number, pool in enumerate(["", "large", "small"]):
        wish = replace(ask(f"r{number}", seats=1), pool=pool)
        planned = plan(keyspace, wish)
        assert planned.session.seats_of == ("app/" + pool if pool else "app")
        assert isinstance(keyspace.txn(planned.txn), Won)
        again = replace(wish, request_id=f"again{number}")
        refused = plan_reservation(again, grounds(keyspace, again), KEYS, NOW_US)
        assert isinstance(refused, Refused)
        assert refused.code is Code.SEATS_FULL


def test_a_recovering_ledger_grants_nothing(keyspace: Keyspace) -> None:
    write(keyspace, Put(KEYS.ledger(), LedgerHead("first", LedgerState.RECOVERING, TAG).encode()))
    answer = plan_reservation(ask("r1"), grounds(keyspace, ask("r1")), KEYS, NOW_US)
    assert isinstance(answer, Refused)
    assert answer.code is Code.LEDGER_LOST


def test_a_draining_epoch_takes_admin_sessions_only(keyspace: Keyspace) -> None:
    _drained(keyspace)
    main = plan_reservation(ask("r1"), grounds(keyspace, ask("r1")), KEYS, NOW_US)
    assert isinstance(main, Refused)
    assert main.code is Code.DRAINING
    look = ask("r2", kind=Kind.ADMIN, seats=0)
    assert isinstance(keyspace.txn(plan(keyspace, look).txn), Won)


def test_a_request_for_an_epoch_that_is_over_is_refused(keyspace: Keyspace) -> None:
    wish = ask("r1", epoch=2)
    answer = plan_reservation(wish, grounds(keyspace, wish), KEYS, NOW_US)
    assert isinstance(answer, Refused)
    assert answer.code is Code.DRAINING


def test_an_admin_permit_takes_no_seat_and_no_main_slot(keyspace: Keyspace) -> None:
    made = plan(keyspace, ask("r1", kind=Kind.ADMIN, seats=0))
    assert [put.key for put in made.txn.puts] == [KEYS.session(Kind.ADMIN, 0), KEYS.receipt("r1")]


def test_numbers_other_reservations_are_about_to_take_are_left_to_them(keyspace: Keyspace) -> None:
    wish = ask("r1")
    made = plan_reservation(
        wish, grounds(keyspace, wish), KEYS, NOW_US, busy_slots={0, 1}, busy_seats={0})
    assert isinstance(made, Plan)
    assert (made.session.slot, made.session.seat) == (2, 1)


@given(st.integers(1, 300), st.integers(0, 1_000))
def test_windows_cover_every_slot_once_and_their_ranges_hold_just_theirs(limit: int, home: int) -> None:
    seen: list[int] = []
    turn = 0
    while (window := window_at(KEYS, Kind.MAIN, limit, home, turn)).slots:
        assert len(window.slots) <= WINDOW
        keys = {KEYS.session(Kind.MAIN, slot) for slot in range(limit)}
        covered = {key for key in keys if any(start <= key < end for start, end in window.ranges)}
        assert covered == {KEYS.session(Kind.MAIN, slot) for slot in window.slots}
        assert len(window.ranges) <= 2
        seen += window.slots
        turn += 1
    assert sorted(seen) == list(range(limit))
    assert seen[0] == home % limit


def test_limits_are_the_policys_own_fields() -> None:
    assert limits_of_policy(policy(180, reserve=5, admin=12)) == Limits(180, 5, 12, 0)
    with pytest.raises(ValueError, match="policy"):
        limits_of_policy(b"\x80")


def test_a_fleets_keys_are_found_from_a_databases() -> None:
    assert KEYS.worker("A") == FLEET.worker("A")
    assert KEYS.worker_exit("A") == FLEET.worker_exit("A")
