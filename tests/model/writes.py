"""What a write does to a state of the session model: won, lost, or on its way and nobody knows."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.ledger.rules import Code
from coordinator.ledger.states import SessionState
from tests.model.explorer import Step
from tests.model.image import FREE, OWNERS, Image, Op, Production
from tests.model.state import (
    BACKEND,
    GONE,
    NOTHING,
    STARTING,
    UNBORN,
    WITH_SOCKET,
    Config,
    State,
    put,
)

Steps = Iterator[Step[State]]
SAID_BY_OWNERS = frozenset(("connecting", "open", "closing", "unknown", "release", "reassert"))


class Writes:
    """Writes of the production code, and where the permits are."""

    def __init__(self, production: Production, config: Config) -> None:
        self.production = production
        self.config = config
        self.owners = production.owners

    def slot_of(self, state: State, request: int) -> int:
        """The slot that the request holds, or FREE."""
        return self.production.where(state.image.slots)[request]

    def permit_state(self, state: State, request: int) -> SessionState | None:
        """What its permit is doing; None: it holds none."""
        slot = self.slot_of(state, request)
        return self.production.sessions[state.image.slots[slot]].state if slot != FREE else None

    def holds_any(self, state: State, owner: int) -> bool:
        """Whether a permit stands under this owner."""
        return any(slot != FREE and self.owners[request] == owner
                   for request, slot in enumerate(self.production.where(state.image.slots)))

    def write(self, state: State, txn: int) -> tuple[State, str | None] | None:
        """The state after the transaction won, with what it broke; None: it lost."""
        image = self.production.carried_out(txn, state.image)
        if image is None:
            return None
        changed = [slot for slot, value in enumerate(image.slots) if value != state.image.slots[slot]]
        if not changed:
            return state._replace(image=image), None
        if self._is_move(state.image.slots, image.slots):
            return self._purged(state._replace(image=image), changed), None
        for slot in changed:
            state, bad = self._changed(state, image, slot)
            if bad is not None:
                return state._replace(image=image), bad
        return self._purged(state._replace(image=image), changed), None

    def _is_move(self, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
        """A session has left one slot for another that was free."""
        came = [slot for slot, value in enumerate(after) if value != FREE == before[slot]]
        left = [slot for slot, value in enumerate(before) if value != FREE == after[slot]]
        if not self.config.moves or (len(came), len(left)) != (1, 1):
            return False
        (came_to,), (left_from,) = came, left
        return (self._request(after[came_to]) == self._request(before[left_from])
                and self.production.sessions[after[came_to]].left_slots[-1:] == (f"main/{left_from}",))

    def _purged(self, state: State, changed: list[int]) -> State:
        """Without what is on its way and compares what these slots were."""
        pipe = tuple(each for each in state.pipe
                     if each[2] not in changed or not self.production.hopeless(each[3], "session"))
        return state._replace(pipe=pipe)

    def _changed(self, state: State, image: Image, slot: int) -> tuple[State, str | None]:
        """What one slot's other value means for the request that had it, or has it."""
        before, after = self._request(state.image.slots[slot]), self._request(image.slots[slot])
        bad, freed, reap = None, state.freed, state.reap
        if before not in (FREE, after):
            freed = put(freed, before, 1)
            if state.procs[before] in (STARTING, BACKEND):
                bad = "I2: released while its server process lives"
            elif after != FREE:
                bad = "I4: overwrote somebody else's permit"
        elif before == FREE and freed[after]:
            bad = "I4: a released permit came back"
        elif before == FREE and self.slot_of(state, after) != FREE:
            bad = "I4: one request took two slots"
        if before != FREE and reap[before][0] not in ("", "terminate"):
            reap = put(reap, before, NOTHING)
        names = state.names
        if names and before != after:
            if before != FREE and not self.config.siblings:  # with one, its name may be said again
                names = put(names, before, 0)
            if after != FREE:
                names = put(names, after, slot)
        return state._replace(freed=freed, reap=reap, names=names), bad

    def decide(self, state: State, op: Op, slot: int = FREE) -> int | Code | None:
        """The production's decision: on the slot that the request holds, or (reserve, void) on `slot`."""
        if op.name in ("reserve", "void"):
            return self.production.decision(op, slot, FREE, False)
        on_record = state.image.exits[self.owners[op.request]] == 1
        held = self.slot_of(state, op.request)
        if self.config.moves and op.name in SAID_BY_OWNERS and held not in (FREE, state.names[op.request]):
            said = state.names[op.request]
            answer = self.production.decision(op, said, state.image.slots[said], on_record)
            if answer is not Code.GONE or not self.config.follows:
                return answer
            moved = self.production.sessions[state.image.slots[held]]
            assert self.production.permit(op.request, said) in moved.former_permits
        if held != FREE:
            return self.production.decision(op, held, state.image.slots[held], on_record)
        for number, value in enumerate(state.image.slots):  # wherever it was: it stands there no more
            answer = self.production.decision(op, number, value, on_record)
            if self.config.siblings and number == state.names[op.request]:
                return answer  # not gone: the other's, under the same name
            if answer is not Code.GONE and not self.config.siblings:
                raise AssertionError(f"{op} found a permit that is gone")
        return Code.GONE

    def sent(self, state: State, op: Op, slot: int, txn: int) -> State | None:
        """The write is on its way and nobody knows more."""
        each = (op.name, op.request, slot, txn)
        if len(state.pipe) >= self.config.pipe or each in state.pipe:
            return None
        return state._replace(pipe=tuple(sorted((*state.pipe, each))))

    def by_owner(
        self, state: State, op: Op, *, won: str, gone: str | None = None, refused: str | None = None,
        unknown: str | None = None, heals: bool = True, slot: int = FREE,
    ) -> Steps:
        """An owner's write and its phase after each answer (None: no such step)."""
        request, answer = op.request, self.decide(state, op, slot)
        label = f"{OWNERS[self.owners[request]]} {op.name} {op.flag}"
        if answer is None:
            yield label + " already", self.moved(state, request, won), heals, None
        elif isinstance(answer, Code):
            to = gone if answer is Code.GONE else refused
            if to is not None:
                yield f"{label} {answer}", self.moved(state, request, to), heals, None
        else:
            outcome = self.write(state, answer)
            if outcome is not None:
                after, bad = outcome
                yield label, self.moved(after, request, won), heals, bad
            if unknown is not None:
                about = slot if op.name in ("reserve", "void") else self.slot_of(state, request)
                sent = self.sent(state, op, about, answer)
                if sent is not None:
                    yield label + "=unknown", self.moved(sent, request, unknown), False, None

    def by_reaper(self, state: State, op: Op, reap: tuple[str, str]) -> Steps:
        """A reaper's write; `reap` is its evidence after it won."""
        answer = self.decide(state, op)
        if not isinstance(answer, int) or isinstance(answer, Code):
            if state.reap[op.request] != NOTHING and op.name == "reap":
                yield f"reaper forgets {op.request}", self.seen(state, op.request, NOTHING), True, None
            return
        outcome = self.write(state, answer)
        if outcome is not None:
            after = self.seen(outcome[0], op.request, reap)
            yield f"reaper {op.name} {op.request} {op.flag}", after, True, outcome[1]
        sent = self.sent(state, op, self.slot_of(state, op.request), answer)
        if sent is not None:
            after = self.seen(sent, op.request, NOTHING)
            yield f"reaper {op.name} {op.request}=unknown", after, False, None

    def late(self, state: State) -> Steps:
        """What is on its way lands, or is lost."""
        for at, (name, request, _, txn) in enumerate(state.pipe):
            rest = state._replace(pipe=(*state.pipe[:at], *state.pipe[at + 1 :]))
            outcome = self.write(rest, txn)
            if outcome is not None:
                yield f"late {name} {request} lands", outcome[0], True, outcome[1]
            yield f"late {name} {request} is lost", rest, True, None

    def moved(self, state: State, request: int, phase: str) -> State:
        """The request in another phase."""
        if phase == state.phases[request]:
            return state
        procs = state.procs
        if procs[request] == GONE and phase not in WITH_SOCKET:  # nobody looks any more: fewer states
            procs = put(procs, request, UNBORN)
        return state._replace(phases=put(state.phases, request, phase), procs=procs)

    def seen(self, state: State, request: int, reap: tuple[str, str]) -> State:
        """The backend reaper's evidence about the request is now this."""
        return state if state.reap[request] == reap else state._replace(reap=put(state.reap, request, reap))

    def _request(self, value: int) -> int:
        return self.production.request_of[value] if value != FREE else FREE
