"""Permits of one generation never come again, wherever their sessions move."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from coordinator.ledger.siblings import may_move_to
from tests.ledger.ground import session

granted_together = st.sets(st.integers(0, 60), min_size=2, max_size=40).map(sorted)


@given(granted_together)
def test_no_slot_is_ever_had_by_two_siblings(granted: list[int]) -> None:
    had: dict[int, int] = {slot: slot for slot in granted}
    for own in granted:
        siblings = tuple(slot for slot in granted if slot != own)
        for target in range(80):
            if may_move_to(session(slot=own, siblings=siblings), target):
                assert had.setdefault(target, own) == own


@given(granted_together)
def test_whoever_has_siblings_has_somewhere_to_go_and_goes_once(granted: list[int]) -> None:
    own, *others = granted
    stands = session(slot=own, siblings=tuple(others))
    targets = [target for target in range(200) if may_move_to(stands, target)]
    assert targets
    moved = replace(stands, slot=targets[0], left_slots=(f"main/{own}",))
    assert not any(may_move_to(moved, target) for target in range(200))


def test_one_that_was_granted_alone_goes_anywhere() -> None:
    assert all(may_move_to(session(slot=7), target) for target in range(20))
