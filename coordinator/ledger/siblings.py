"""Permits that were granted in one transaction share their generation: which slots each of them may move to.

Pure. A permit is (kind, slot, generation), and must never come again: a late word on the first would then be
taken for one on the second. So of n siblings each has its own nth part of the slots to move to, and moves
once: no two of them are ever in the same slot, one after the other or not (docs/decisions/0018).
"""

from __future__ import annotations

from coordinator.ledger.record import Session


def may_move_to(session: Session, slot: int) -> bool:
    """Whether no sibling was granted this slot, and none can move there."""
    if not session.siblings:
        return True
    if session.left_slots:
        return False
    granted = sorted((*session.siblings, session.slot))
    return slot not in granted and slot % len(granted) == granted.index(session.slot)
