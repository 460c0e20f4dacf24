"""Both reapers in the model; every proof is one of the production's `proof_of_absence`."""

from __future__ import annotations

from coordinator.ledger.states import SessionState
from tests.model.image import FREE, Op
from tests.model.looks import Looks
from tests.model.server import Server
from tests.model.state import BACKEND, GONE, IN_FLIGHT, NOTHING, STARTING, State, put
from tests.model.writes import Steps, Writes


class Reapers:
    """Steps of whoever leads."""

    def __init__(self, writes: Writes, server: Server) -> None:
        self._writes = writes
        self._server = server
        self._config = writes.config
        self._production = writes.production
        self._looks = Looks(writes.production, writes.config)

    def owner_reaper(self, state: State) -> Steps:
        """Permits of owners without a worker key."""
        for request, slot in enumerate(self._production.where(state.image.slots)):
            if slot == FREE or state.image.keys[self._writes.owners[request]]:
                continue
            if self._config.frees_on_lease_loss:
                yield from self._frees(state, request, slot)
            else:
                yield from self._writes.by_reaper(state, Op("mark", request), state.reap[request])

    def _frees(self, state: State, request: int, slot: int) -> Steps:
        """What a mutant does."""
        lives = state.procs[request] in (STARTING, BACKEND)
        slots = put(state.image.slots, slot, FREE)
        freed = state._replace(image=state.image._replace(slots=slots), freed=put(state.freed, request, 1))
        bad = "I2: released while it lives" if lives else None
        yield f"reaper frees {request}", self._writes.seen(freed, request, NOTHING), True, bad

    def backend_reaper(self, state: State, request: int) -> Steps:
        """Looks, proofs, releases of one permit."""
        stage, what = state.reap[request]
        if stage == "terminate":
            yield from self._terminate(state, request)
        elif stage == "proven":
            yield from self._writes.by_reaper(state, Op("reap", request, what), NOTHING)
        elif self._writes.permit_state(state, request) is SessionState.UNKNOWN:
            yield from self._look(state, request)

    def _terminate(self, state: State, request: int) -> Steps:
        if state.procs[request] != BACKEND:
            after = self._writes.seen(state, request, NOTHING)
            yield f"nothing to terminate of {request}", after, True, None
            return
        open_again = self._writes.permit_state(state, request) is SessionState.OPEN
        bad = "a session that came back was terminated" if open_again else None
        ended = self._writes.seen(self._server.proc(state, request, GONE), request, NOTHING)
        yield f"pg_terminate_backend({request})", ended, True, bad

    def _look(self, state: State, request: int) -> Steps:
        stage, what = state.reap[request]
        first = what if stage == "look" else None
        # by the second look whatever a dead or given-up attempt had on the wire has arrived: that is what
        # the interval between the looks is for; how long a start-up then takes is not bounded
        if first is not None and state.procs[request] == IN_FLIGHT:
            return
        value = state.image.slots[self._writes.slot_of(state, request)]
        dead = state.image.exits[self._writes.owners[request]] == 1 or not self._config.knows_death
        session = self._production.sessions[value]
        server = (state.procs, state.births, state.named, state.restarts)
        proof = self._looks.prove(value, *server, dead=dead, first=first)
        if proof is not None:
            after = self._writes.seen(state, request, ("proven", proof))
            yield f"look: {request} {proof}", after, True, None
        elif first is None and not session.pid and (dead or session.abandoned):
            shown = self._looks.starters(state.procs)
            after = self._writes.seen(state, request, ("look", shown))
            yield f"first look at {request}", after, True, None
        elif first is not None:
            yield f"look again at {request}", self._writes.seen(state, request, NOTHING), True, None
        if self._config.terminate and session.pid and not session.terminating:
            yield from self._writes.by_reaper(state, Op("terminating", request), ("terminate", ""))
