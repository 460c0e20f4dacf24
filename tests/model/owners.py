"""An owner of session permits in the model: it asks, connects, serves, closes, crashes, comes back.

A pause needs no state: each step may be delayed without bound, and a lease may end before any step.
"""

from __future__ import annotations

from coordinator.ledger.states import SessionState
from tests.model.image import ANY, FREE, OWNERS, Op
from tests.model.state import (
    ASKED,
    BACKEND,
    CONNECTING,
    DEAD,
    DONE,
    ENDED,
    GAVE_UP,
    GIVE,
    GONE,
    HAVE,
    IDLE,
    IN_FLIGHT,
    LOST,
    NONE,
    NOT_HOLDING,
    OPENING,
    READY,
    SILENT,
    STUCK,
    TERMINATED,
    UNBORN,
    VOIDING,
    State,
    put,
)
from tests.model.writes import Steps, Writes


class Owners:
    """Steps of the owners' processes, and what befalls them."""

    def __init__(self, writes: Writes) -> None:
        self._writes = writes
        self._config = writes.config
        self._owners = writes.owners
        self._production = writes.production

    def life(self, state: State, owner: int) -> Steps:
        """Crash, lease, exit record, hello."""
        name, image, may_fail = OWNERS[owner], state.image, self._config.failing[owner]
        alive, registered, recorded = state.alive[owner], image.keys[owner], image.exits[owner]
        if alive and may_fail:
            phases = tuple(DEAD if o == owner else p for o, p in zip(self._owners, state.phases, strict=True))
            procs = tuple(UNBORN if p == GONE and o == owner else p
                          for o, p in zip(self._owners, state.procs, strict=True))
            dead = state._replace(phases=phases, procs=procs, alive=put(state.alive, owner, 0),
                                  hello=put(state.hello, owner, 0))
            yield f"{name} crashes", dead, False, None
        if alive and not registered:
            back = state._replace(image=image._replace(keys=put(image.keys, owner, 1)),
                                  hello=put(state.hello, owner, int(self._config.says_hello)))
            yield f"{name} registers again", back, True, None
        if alive and registered and state.hello[owner]:
            yield from self._hello(state, owner)
        if registered and (may_fail or not alive):
            yield f"{name}'s lease ends", self._lease_ended(state, owner), not alive, None
        if not alive and recorded == 0:
            on_record = image._replace(exits=put(image.exits, owner, 1))
            yield f"exit of {name} on record", state._replace(image=on_record), True, None
        if recorded == 1 and not registered and not self._writes.holds_any(state, owner):
            removed = image._replace(exits=put(image.exits, owner, 2))
            yield f"exit record of {name} removed", state._replace(image=removed), True, None

    def _lease_ended(self, state: State, owner: int) -> State:
        """The worker key and its receipts go; what compared the registration has lost."""
        image = state.image
        receipts = tuple(0 if o == owner else r for o, r in zip(self._owners, image.receipts, strict=True))
        pipe = tuple(each for each in state.pipe if self._owners[each[1]] != owner
                     or not self._production.hopeless(each[3], "worker"))
        return state._replace(
            image=image._replace(keys=put(image.keys, owner, 0), receipts=receipts), pipe=pipe)

    def _hello(self, state: State, owner: int) -> Steps:
        """What stands under its boot id and it does not list is freed as unused."""
        unlisted = [request for request, of in enumerate(self._owners) if of == owner
                    and state.phases[request] in NOT_HOLDING and self._writes.slot_of(state, request) != FREE]
        for request in unlisted:
            yield from self._writes.by_owner(state, Op("release", request, "unused"), won=DONE)
        if not unlisted:
            yield f"{OWNERS[owner]} said hello", state._replace(hello=put(state.hello, owner, 0)), True, None

    def request(self, state: State, request: int, owner: int) -> Steps:
        phase = state.phases[request]
        if phase in (NONE, ASKED, VOIDING):
            linked = bool(state.image.keys[owner]) and not state.hello[owner]
            yield from self._asking(state, request, linked)
        elif phase in (HAVE, CONNECTING, READY, OPENING):
            yield from self._opening(state, request)
        elif phase == IDLE:
            yield from self._serving(state, request, bool(state.image.keys[owner]))
        else:
            yield from self._ending(state, request)

    def _asking(self, state: State, request: int, linked: bool) -> Steps:
        phase, receipt = state.phases[request], state.image.receipts[request]
        mine, name = self._writes.slot_of(state, request) != FREE, OWNERS[self._owners[request]]
        if phase != NONE and receipt == 1 and mine:
            to = HAVE if phase == ASKED else GIVE
            yield f"{name} reads its receipt", self._writes.moved(state, request, to), True, None
        elif phase != NONE and receipt:
            yield f"{name} reads: over", self._writes.moved(state, request, DONE), True, None
        elif phase != VOIDING and linked:
            slots = (request,) if self._config.siblings else range(self._production.slots)
            for slot in slots:  # wherever its coordinator begins to look
                yield from self._writes.by_owner(
                    state, Op("reserve", request), won=HAVE, unknown=ASKED, heals=phase == ASKED, slot=slot)
        if phase == ASKED and not self._config.waits_for_receipt:
            yield f"{name} does not wait", self._writes.moved(state, request, HAVE), True, None
        if phase != NONE and not receipt:
            if linked and self._config.voids:
                yield from self._writes.by_owner(
                    state, Op("void", request), won=DONE, unknown=VOIDING, slot=ANY)
            elif not self._config.voids or not state.image.keys[self._owners[request]]:
                yield f"{name} gives up", self._writes.moved(state, request, DONE), True, None

    def _opening(self, state: State, request: int) -> Steps:
        phase, proc, name = state.phases[request], state.procs[request], OWNERS[self._owners[request]]
        if phase in (HAVE, CONNECTING) and self._writes.permit_state(state, request) is SessionState.RESERVED:
            yield from self._writes.by_owner(state, Op("connecting", request), won=phase, unknown=phase)
        if phase == HAVE:
            granted = self._writes.slot_of(state, request) != FREE or state.freed[request]
            bad = None if granted else "I3: a connect without a receipt"
            went = state._replace(procs=put(state.procs, request, IN_FLIGHT))
            yield f"{name} connects", self._writes.moved(went, request, CONNECTING), True, bad
            yield f"{name} does not need it", self._writes.moved(state, request, GIVE), True, None
        elif phase == CONNECTING:
            if proc == BACKEND:
                yield f"{name} has its key data", self._writes.moved(state, request, READY), True, None
            if proc == GONE:
                yield f"{name} reads the end", self._writes.moved(state, request, ENDED), True, None
            yield f"{name}'s connect times out", self._writes.moved(state, request, SILENT), False, None
        else:
            flag = str(state.births[request])
            yield from self._writes.by_owner(
                state, Op("open", request, flag), won=IDLE, gone=LOST, refused=TERMINATED, unknown=OPENING)
            if proc == GONE:
                yield f"{name} reads the end", self._writes.moved(state, request, ENDED), True, None
            if not self._config.serves_after_open and proc == BACKEND:
                yield f"{name} serves early", state._replace(named=put(state.named, request, 1)), True, None

    def _serving(self, state: State, request: int, registered: bool) -> Steps:
        name = OWNERS[self._owners[request]]
        if state.procs[request] == GONE:
            yield f"{name} reads the end", self._writes.moved(state, request, ENDED), True, None
        if self._writes.slot_of(state, request) == FREE:
            yield f"{name}'s permit is gone", self._writes.moved(state, request, LOST), True, None
        elif self._writes.permit_state(state, request) is SessionState.UNKNOWN and registered:
            yield from self._writes.by_owner(
                state, Op("reassert", request), won=IDLE, refused=TERMINATED, unknown=IDLE)
        if state.procs[request] == BACKEND and not state.named[request]:
            yield f"{name} serves", state._replace(named=put(state.named, request, 1)), False, None
        yield from self._writes.by_owner(
            state, Op("closing", request), won=TERMINATED, gone=LOST, refused=TERMINATED,
            unknown=TERMINATED)

    def _ending(self, state: State, request: int) -> Steps:
        phase, proc, name = state.phases[request], state.procs[request], OWNERS[self._owners[request]]
        if phase == TERMINATED:
            if proc == GONE or not self._config.waits_for_eof:
                yield f"{name} reads the end", self._writes.moved(state, request, ENDED), True, None
            yield f"{name} sees no end in time", self._writes.moved(state, request, STUCK), False, None
        elif phase == ENDED or (phase == GIVE and self._config.gives_back_unused):
            proof = "eof" if phase == ENDED else "unused"
            later = phase if self._config.settles_release else DONE
            yield from self._writes.by_owner(
                state, Op("release", request, proof), won=DONE, gone=DONE, unknown=later)
        elif phase in (SILENT, STUCK):
            flag = "abandoned" if phase == SILENT and self._config.abandons else ""
            yield from self._writes.by_owner(
                state, Op("unknown", request, flag), won=GAVE_UP, gone=DONE, unknown=phase)
        elif phase == GAVE_UP:
            if self._writes.slot_of(state, request) == FREE:
                yield f"{name} sees it released", self._writes.moved(state, request, DONE), True, None
            elif self._writes.permit_state(state, request) is not SessionState.UNKNOWN:
                yield f"{name} sees a late write", self._writes.moved(state, request, STUCK), True, None
