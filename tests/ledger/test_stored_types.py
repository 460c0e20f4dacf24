"""What is damaged, or of another type than a record declares, is a ValueError and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as some

from coordinator.awaiting import Awaited
from coordinator.election import Leader
from coordinator.ledger.attestation import Attestation
from coordinator.ledger.demand import HostDemand
from coordinator.ledger.limits import limits_of_policy
from coordinator.ledger.notes import GrowthStop, ShadowCount, Want
from coordinator.ledger.record import (
    SCHEMA,
    Alias,
    Backend,
    Epoch,
    EpochState,
    Kind,
    LedgerHead,
    LedgerState,
    Receipt,
    Record,
    Seat,
    Session,
    UnknownSchema,
    Worker,
    WorkerExit,
)
from coordinator.ledger.states import SessionState
from coordinator.policy import PolicyRefused, decode_policy, encode_policy, load_policy
from coordinator.reach import Present
from coordinator.registry import Ordinal
from tests.coordinator.parts import policy_text
from tests.ledger.ground import BACKEND

RECORDS: tuple[Record, ...] = (
    Session(Kind.MAIN, 3, 7, SessionState.OPEN, "A", "host", "app", "app", 1, "r", 1, 1, backend=BACKEND,
            left_slots=("main/4", "reserve/1"), siblings=(5, 6)),
    Receipt(Kind.RESERVE, 1, base=5), Seat(Kind.MAIN, 3, "r"),
    Worker("A", 0, 1, "host", "m", "k", 1, 2, epochs={"db": 1}, recovered={"db": "x"},
           shares=True),
    WorkerExit("A", "signal 9", "host", 5), LedgerHead("i", LedgerState.ACTIVE, "tag", frozen="me"),
    Epoch(1, EpochState.DRAINING, BACKEND, 1, "why", 30.0, Backend("b:1")), Alias(2, 3, 0.5, 1),
    Want("app", "app", Kind.MAIN, "full", "A", "host", 1, 2, "shed", "B", "app/x", "other"),
    GrowthStop("full", 1), ShadowCount(1, 2, 3, 4), Attestation("me", "what", "seen", 1),
    Awaited("host", {"main/1.2": ("absent", "n:1", "why", 1, 2)}), Leader("host", 1, 2, ("a",), ("b",)),
    Present("host", ("a", "b")), Ordinal("A"), HostDemand("host", {"x": {"A": {"t": 1}}}),
)


def test_what_was_written_is_read_as_it_was() -> None:
    for record in RECORDS:
        assert type(record).decode(record.encode()) == record


def damaged(record: Record) -> Iterator[bytes]:
    """It with one field gone, or of another type, for each of its fields and many types."""
    values = msgpack.unpackb(record.encode())
    yield msgpack.packb({"schema": SCHEMA})
    for name in values:
        yield msgpack.packb({key: value for key, value in values.items() if key != name})
        for other in (None, True, -1, 1.5, "x", b"x", [], [None], ["x/y/z"], [[1]], {}, {"x": "y"},
                      {"x": None}):
            yield msgpack.packb({**values, name: other})


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_damaged_record_raises_value_error_or_is_one_that_can_be_written_again(record: Record) -> None:
    for raw in damaged(record):
        try:
            read = type(record).decode(raw)
        except ValueError:
            continue
        assert type(record).decode(read.encode()) == read


@pytest.mark.parametrize("record", [each for each in RECORDS if not isinstance(each, ShadowCount)],
                         ids=lambda record: record.name)
def test_a_record_without_its_fields_is_none(record: Record) -> None:
    with pytest.raises(ValueError, match=f"not a {record.name} record"):
        type(record).decode(msgpack.packb({"schema": SCHEMA}))


@pytest.mark.parametrize(("name", "value"), [
    ("only_active", "x"), ("only_active", True), ("only_active", None), ("since_us", 1.5), ("both", [1])])
def test_a_field_of_another_type_is_not_read(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"not a shadow record: {name}"):
        ShadowCount.decode(msgpack.packb({"schema": SCHEMA, name: value}))


def test_a_slot_that_no_session_can_have_left_is_damage() -> None:
    values = msgpack.unpackb(RECORDS[0].encode())
    with pytest.raises(ValueError, match="not a session record"):
        Session.decode(msgpack.packb({**values, "left_slots": ["main/x"]}))


def test_whoever_can_do_without_a_damaged_value_can_do_without_a_newer_one() -> None:
    with pytest.raises(ValueError, match="schema 2") as raised:
        Alias.decode(msgpack.packb({"schema": SCHEMA + 1}))
    assert type(raised.value) is UnknownSchema


def no_limits(raw: bytes) -> None:
    limits_of_policy(raw)


def no_policy(raw: bytes) -> None:
    decode_policy(raw)


@given(raw=some.binary(max_size=60))
def test_no_bytes_raise_anything_else(raw: bytes) -> None:
    readers: list[Callable[[bytes], object]] = [no_limits, no_policy]
    readers += [type(each).decode for each in RECORDS]
    for read in readers:
        try:
            read(raw)
        except ValueError:
            continue


@pytest.mark.parametrize(
    "name", ["serverSessionPermits", "reservePermits", "adminReserve", "failoverPermits"])
@pytest.mark.parametrize("value", ["x", True, -1, [1], 1.5])
def test_a_policy_whose_counts_are_none_has_no_limits(name: str, value: Any) -> None:
    document = {"serverSessionPermits": 4, name: value}
    with pytest.raises(ValueError, match="not a policy generation"):
        limits_of_policy(msgpack.packb(document))


@pytest.mark.parametrize("resolved", [1, "x", [1], {"failoverPermits": "x"}, {"hosts": "x"}, {"hosts": [1]},
                                      {"role": 1}, {"hardConnectionLimit": "x"}])
def test_a_policy_of_which_something_else_was_resolved_is_refused(resolved: Any) -> None:
    document = load_policy(policy_text())[1]
    with pytest.raises(PolicyRefused, match="resolved"):
        decode_policy(encode_policy({**document, "resolved": resolved}))
