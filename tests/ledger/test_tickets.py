"""What a registration, a beginning and an end of a client-named ticket decide: every state, each command."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.record import Kind, Permit
from coordinator.ledger.tickets import (
    ENDS,
    ID_BYTES_MAX,
    STARTED,
    Begin,
    Command,
    End,
    NamedTicket,
    Outcome,
    OwnerGone,
    Refused,
    Register,
    Stands,
    TicketState,
    Why,
    Write,
    decide,
    due,
    id_fault,
)

NOW_US = 1_800_000_000_000_000
PERMIT, OTHER_PERMIT = Permit(Kind.MAIN, 3, 70), Permit(Kind.MAIN, 3, 71)
REGISTER = Register("pay-1", "worker-b", "host-b", "10.0.0.2:5")
S, Out = TicketState, Outcome
EVERY = [(state, outcome) for state, outcome in product(S, Out)
         if (state is S.RELEASED) is (outcome is not Out.NONE)]
ENDINGS = [each for each in EVERY if each[0] in ENDS]


def standing(state: TicketState, outcome: Outcome = Out.NONE) -> NamedTicket:
    ran = state in (S.IN_TRANSACTION, S.UNKNOWN, S.RELEASED)
    return NamedTicket("pay-1", state, "worker-a", "host-a", "10.0.0.1:5", 2, NOW_US - 9, NOW_US - 5,
                       outcome=outcome, permit=str(PERMIT) if ran else "", pid=42 if ran else 0)


@pytest.mark.parametrize(("state", "outcome"), EVERY)
def test_a_retry_moves_what_waits_and_never_runs_what_ran(state: TicketState, outcome: Outcome) -> None:
    before = standing(state, outcome)
    decision = decide(before, REGISTER, NOW_US)
    if state in STARTED:
        assert decision == Refused(Why.EXECUTING, before)
    elif state is S.RELEASED:
        assert decision == Refused(Why.FINISHED, before)
    else:
        assert isinstance(decision, Write)
        new = decision.ticket
        assert (new.state, new.owner, new.attempt, new.permit) == (S.QUEUED, "worker-b", 3, "")
        assert new.queued_at_us == (before.queued_at_us if state is S.QUEUED else NOW_US)
        assert decision.moved_from == (before if state is S.QUEUED else None)


def test_a_new_name_waits() -> None:
    decision = decide(None, REGISTER, NOW_US)
    assert isinstance(decision, Write)
    assert (decision.ticket.state, decision.ticket.attempt) == (S.QUEUED, 1)


COMMANDS: list[Command] = [
    Begin(2, "worker-a", PERMIT, 42), End(2, "worker-a", S.RELEASED, Out.COMMITTED),
    End(2, "worker-a", S.CANCELLED), OwnerGone(2, "worker-a", True)]


@pytest.mark.parametrize("command", COMMANDS, ids=repr)
def test_whose_place_was_taken_neither_begins_nor_ends_it(command: Begin | End | OwnerGone) -> None:
    assert decide(None, command, NOW_US) == Refused(Why.MOVED, None)
    for state, outcome in EVERY:
        for before in (replace(standing(state, outcome), attempt=3),
                       replace(standing(state, outcome), owner="worker-b")):
            assert decide(before, command, NOW_US) == Refused(Why.MOVED, before)


@pytest.mark.parametrize(("state", "outcome"), EVERY)
def test_it_begins_from_the_queue_only(state: TicketState, outcome: Outcome) -> None:
    before = standing(state, outcome)
    decision = decide(before, Begin(2, "worker-a", PERMIT, 42), NOW_US)
    if state is S.QUEUED:
        assert decision == Write(replace(
            before, state=S.IN_TRANSACTION, changed_at_us=NOW_US, permit=str(PERMIT), pid=42))
    elif state is S.IN_TRANSACTION:
        assert decision == Stands(before)
        other = decide(before, Begin(2, "worker-a", OTHER_PERMIT, 43), NOW_US)
        assert isinstance(other, Write)
        assert other.ticket.permit == str(OTHER_PERMIT)
    else:
        assert decision == Refused(Why.MOVED, before)


@pytest.mark.parametrize(("at", "to"), [*product(EVERY, ENDINGS)])
def test_it_ends_once_as_its_owner_says(
    at: tuple[TicketState, Outcome], to: tuple[TicketState, Outcome]
) -> None:
    before = standing(*at)
    decision = decide(before, End(2, "worker-a", *to), NOW_US)
    if at == to:
        assert decision == Stands(before)
    elif at[0] in ENDS:
        assert decision == Refused(Why.MOVED, before)
    else:
        assert decision == Write(replace(before, state=to[0], outcome=to[1], changed_at_us=NOW_US))


@pytest.mark.parametrize(("state", "outcome"), [
    (S.QUEUED, Out.NONE), (S.RELEASED, Out.NONE), (S.UNKNOWN, Out.UNKNOWN), (S.CANCELLED, Out.COMMITTED)])
def test_no_end_is_refused(state: TicketState, outcome: Outcome) -> None:
    with pytest.raises(ValueError, match="is no end"):
        decide(standing(S.IN_TRANSACTION), End(2, "worker-a", state, outcome), NOW_US)


@pytest.mark.parametrize(("state", "outcome"), EVERY)
def test_of_a_dead_owner_only_what_ran_is_settled_and_only_on_proof(
    state: TicketState, outcome: Outcome
) -> None:
    before = standing(state, outcome)
    assert due(before, {"worker-a"}, frozenset()) is None
    for held, proven in ((None, False), ({str(PERMIT)}, False), (frozenset[str](), True)):
        command = due(before, {"worker-b"}, held)
        if state not in STARTED or (state is S.UNKNOWN and not proven):
            assert command is None
            continue
        assert command == OwnerGone(2, "worker-a", proven)
        decision = decide(before, command, NOW_US)
        assert isinstance(decision, Write)
        expected = (S.RELEASED, Out.UNKNOWN) if proven else (S.UNKNOWN, Out.NONE)
        assert (decision.ticket.state, decision.ticket.outcome) == expected


COMMAND = st.one_of(
    st.builds(Register, st.just("n"), st.sampled_from("ab"), st.just("h"), st.just("c")),
    st.builds(Begin, st.integers(1, 4), st.sampled_from("ab"), st.just(PERMIT), st.just(1)),
    st.builds(End, st.integers(1, 4), st.sampled_from("ab"), st.just(S.RELEASED), st.just(Out.COMMITTED)),
    st.builds(End, st.integers(1, 4), st.sampled_from("ab"), st.sampled_from([S.CANCELLED, S.EXPIRED])),
    st.builds(OwnerGone, st.integers(1, 4), st.sampled_from("ab"), st.booleans()))


@given(st.lists(COMMAND, max_size=30))
def test_no_second_attempt_begins_unless_the_first_ran_nothing(commands: list[Command]) -> None:
    ticket: NamedTicket | None = None
    began: tuple[int, str] | None = None  # who may have sent something
    for command in commands:
        decision = decide(ticket, command, NOW_US)
        if isinstance(command, Begin) and isinstance(decision, Write | Stands):
            assert began in (None, (command.attempt, command.owner))
            began = command.attempt, command.owner
        if isinstance(decision, Write):
            ticket = decision.ticket
            if isinstance(command, End) and command.state is not S.RELEASED:
                began = None  # its owner says that nothing was sent
            if ticket.state is S.RELEASED and began is not None:
                began = began[0], "nobody"


@pytest.mark.parametrize(("ticket_id", "fault"), [
    ("a", ""), ("order 7: pay", ""), ("x" * ID_BYTES_MAX, ""), ("", "128"), ("x" * (ID_BYTES_MAX + 1), "128"),
    ("a/b", "other than /"), ("a\nb", "printable"), ("é", "printable"), ("\udcff", "printable")])
def test_names_are_short_and_printable(ticket_id: str, fault: str) -> None:
    assert fault in id_fault(ticket_id)
    assert bool(id_fault(ticket_id)) == bool(fault)


def test_a_name_cannot_leave_its_databases_keys() -> None:
    keys = FleetKeys("pooler", "f").db("orders/write")
    assert keys.ticket("a b%2F..") == "/pooler/f/ticket/orders%2Fwrite/a%20b%252F.."


@pytest.mark.parametrize(("state", "outcome"), EVERY)
def test_a_record_is_read_as_written_with_what_a_newer_version_added(
    state: TicketState, outcome: Outcome
) -> None:
    newer = msgpack.packb(msgpack.unpackb(standing(state, outcome).encode()) | {"colour": "red"})
    record = NamedTicket.decode(newer)
    assert record == standing(state, outcome)
    decision = decide(record, REGISTER, NOW_US)
    kept = decision.ticket if not isinstance(decision, Refused) else record
    assert kept is not None
    assert msgpack.unpackb(kept.encode())["colour"] == "red"


@pytest.mark.parametrize("change", [
    {"id": "a/b"}, {"permit": ""}, {"permit": "main"}, {"outcome": "committed"}, {"state": "RUNS"},
    {"attempt": 0}])
def test_what_no_ticket_is_is_refused(change: dict[str, object]) -> None:
    stored = msgpack.unpackb(standing(S.IN_TRANSACTION).encode())
    with pytest.raises(ValueError, match="not a ticket record"):
        NamedTicket.decode(msgpack.packb(stored | change))
