"""Moves of sessions to lower slots in the model: a coordinator moves what is open, its owner hears later.

An owner that has not heard says what it says by the permit that it knows, `names[request]`. What was
seen may be old: a move whose outcome is unknown lands at any later time.
"""

from __future__ import annotations

from coordinator.ledger.rules import Code
from coordinator.ledger.states import SessionState
from tests.model.image import FREE, OWNERS, Op
from tests.model.state import IDLE, NOTHING, State, put
from tests.model.writes import Steps, Writes


class Moves:
    """Steps of the coordinators of registered owners."""

    def __init__(self, writes: Writes) -> None:
        self._writes = writes
        self._owners = writes.owners

    def relocation(self, state: State, request: int) -> Steps:
        """To the slot below, where that is free; and the word of it to the owner."""
        owner, slot = self._owners[request], self._writes.slot_of(state, request)
        if not state.image.keys[owner] or slot == FREE:
            return
        is_open = self._writes.permit_state(state, request) is SessionState.OPEN
        if slot > 0 and state.image.slots[slot - 1] == FREE and is_open:
            op = Op("relocate", request)
            answer = self._writes.decide(state, op)
            if isinstance(answer, Code):
                return
            assert answer is not None
            outcome = self._writes.write(state, answer)
            assert outcome is not None
            after, bad = outcome
            yield f"{request} moves", self._writes.seen(after, request, NOTHING), False, bad
            sent = self._writes.sent(state, op, slot, answer)
            if sent is not None:
                yield f"{request} moves=unknown", sent, False, None
        if slot != state.names[request] and state.phases[request] == IDLE:
            heard = state._replace(names=put(state.names, request, slot))
            yield f"{OWNERS[owner]} hears of the move of {request}", heard, False, None
