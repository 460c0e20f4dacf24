"""The database server in the model: it forks, starts up as slowly as it likes, and ends processes."""

from __future__ import annotations

from tests.model.state import (
    BACKEND,
    GONE,
    IN_FLIGHT,
    STARTING,
    TERMINATED,
    UNBORN,
    WITH_SOCKET,
    State,
    put,
)
from tests.model.writes import Steps


class Server:
    """Steps of the server's processes."""

    def restart(self, state: State) -> Steps:
        """At most one: every process ends, and what is on the wire may still arrive."""
        if not state.restarts:
            procs = tuple(GONE if proc in (STARTING, BACKEND) else proc for proc in state.procs)
            yield "server restarts", state._replace(procs=procs, restarts=1), False, None

    def process(self, state: State, request: int, owner: int) -> Steps:
        proc = state.procs[request]
        connected = state.alive[owner] and state.phases[request] in WITH_SOCKET
        if proc == IN_FLIGHT:
            born = state._replace(births=put(state.births, request, state.restarts))
            yield f"server forks for {request}", self.proc(born, request, STARTING), True, None
            yield f"server refuses {request}", self.proc(state, request, GONE), True, None
        elif proc == STARTING:
            yield f"backend {request} is ready", self.proc(state, request, BACKEND), True, None
            if not connected:
                yield f"backend {request} ends in start-up", self.proc(state, request, GONE), True, None
        elif proc == BACKEND and (not connected or state.phases[request] == TERMINATED):
            yield f"backend {request} ends", self.proc(state, request, GONE), True, None

    def proc(self, state: State, request: int, proc: int) -> State:
        if proc != GONE:
            return state._replace(procs=put(state.procs, request, proc))
        watched = state.phases[request] in WITH_SOCKET
        return state._replace(procs=put(state.procs, request, GONE if watched else UNBORN),
                              named=put(state.named, request, 0))
