"""The session model up to a renaming of its slots and of its owners.

Nothing in the protocol prefers a slot or an owner. A coordinator's home only says where it begins to look;
the model lets every reservation try every slot. `decide` and the proofs compare names and revisions for
equality, never for order, and all revisions in the model are canonical. So exchanging the two slots, or the
two owners together with their one request each, is an automorphism g of the model: s → t if and only if
g(s) → g(t), both broken or neither, both good or neither. Then it is enough to explore one state of each
orbit (at most four states): a violation, or a state that never heals, exists if and only if one of the
explored states shows it. Traces are right up to renaming.

Where sessions move (Config.moves) they go from the second slot to the first: then only owners are exchanged.

Two things are not taken on trust. The renamed writes and values are not constructed but made by the
production code for the other slot or owner (`Production.turned_txn`). And where the whole space can be
explored, its states and transitions must be the sums over the orbits that were explored (`Weighed`).
"""

from __future__ import annotations

from typing import Any

from tests.model.image import FREE, Turn
from tests.model.sessions import Sessions
from tests.model.state import NOTHING, State
from tests.model.writes import Steps

SLOTS, OWNERS, BOTH = Turn(True, False), Turn(False, True), Turn(True, True)


class Reduced:
    """A model of which one state of each orbit is explored. `owners`: both may fail, so they are alike."""

    def __init__(self, model: Sessions) -> None:
        self.model = model
        self._slots = model.config.slots == 2 and not model.config.moves  # they go to the first
        self._owners = model.config.failing[0] == model.config.failing[1] and model.owners == (0, 1)
        self.violation = model.violation
        self.is_good = model.is_good

    def initial(self) -> State:
        return self.canonical(self.model.initial())

    def steps(self, state: State) -> Steps:
        for label, after, heals, bad in self.model.steps(state):
            yield label, after if bad is not None else self.canonical(after), heals, bad

    def canonical(self, state: State) -> State:
        """The same state for every member of its orbit."""
        if not self._owners:
            return self._by_slots(state)
        order = _order(state)
        if order == 0:
            one, other = self._by_slots(state), self._by_slots(self.turned(state, OWNERS))
            return min(one, other, key=_particulars)
        return self._by_slots(state if order < 0 else self.turned(state, OWNERS))

    def orbit(self, state: State) -> set[State]:
        """Every state that is this one but for names."""
        turns = [*((SLOTS,) if self._slots else ()), *((OWNERS,) if self._owners else ()),
                 *((BOTH,) if self._slots and self._owners else ())]
        return {state, *(self.turned(state, turn) for turn in turns)}

    def _by_slots(self, state: State) -> State:
        """The request with the lower number in the first slot; both free: what is on its way decides."""
        if not self._slots:
            return state
        first, second = (self._request(value) for value in state.image.slots)
        if first != second:
            return state if first < second else self.turned(state, SLOTS)
        if not state.pipe:
            return state
        return min(state, self.turned(state, SLOTS), key=lambda each: each.pipe)

    def _request(self, value: int) -> int:
        return self.model.production.request_of[value] if value != FREE else FREE

    def turned(self, state: State, turn: Turn) -> State:
        """The state with slots, owners or both exchanged."""
        production = self.model.production
        slots = tuple(production.turned_value(value, turn) for value in state.image.slots)
        pipe = tuple(sorted(
            (name, turn.request(request), turn.slot(slot), production.turned_txn(txn, turn))
            for name, request, slot, txn in state.pipe)) if state.pipe else ()
        image = state.image._replace(slots=slots[::-1] if turn.slots else slots)
        if not turn.owners:
            return state._replace(image=image, pipe=pipe)
        image = image._replace(
            receipts=image.receipts[::-1], keys=image.keys[::-1], exits=image.exits[::-1])
        return State(
            image, state.phases[::-1], state.procs[::-1], state.births[::-1], state.named[::-1],
            state.freed[::-1], state.alive[::-1], state.hello[::-1],
            tuple(_seen_by_other(each) for each in state.reap[::-1]), pipe, state.restarts,
            state.names[::-1])


def _order(state: State) -> int:
    """Which owner comes first by what is not about slots; 0: they are in the same situation."""
    image = state.image
    pairs: tuple[tuple[Any, ...], ...] = (
        state.phases, state.procs, image.receipts, image.keys, image.exits, state.alive, state.hello,
        state.freed, state.births, state.named, state.names or (0, 0))
    for first, second in pairs:
        if first != second:
            return -1 if first < second else 1
    return 0


def _particulars(state: State) -> tuple[tuple[object, ...], ...]:
    return state.image.slots, state.reap, state.pipe


_SWAPPED = str.maketrans("01", "10")


def _seen_by_other(each: tuple[str, str]) -> tuple[str, str]:
    """The backend reaper's evidence; a first look noted which requests' processes were starting."""
    stage, what = each
    if each == NOTHING or stage != "look":
        return each
    return stage, "".join(sorted(what.translate(_SWAPPED)))


class Weighed:
    """A reduced model that counts the states and transitions of the whole space."""

    def __init__(self, reduced: Reduced) -> None:
        self._reduced = reduced
        self.initial = reduced.initial
        self.violation = reduced.violation
        self.is_good = reduced.is_good
        self.states = 0
        self.transitions = 0

    def steps(self, state: State) -> Steps:
        size = len(self._reduced.orbit(state))
        self.states += size
        for step in self._reduced.steps(state):
            self.transitions += size
            yield step
