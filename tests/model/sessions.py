"""All interleavings of the session permit's life: owners, their crashes and pauses, both reapers, a server.

Every write is a transaction of the production code (image.py), every proof one of the production
`proof_of_absence`. A pause needs no state: each step may be delayed without bound, and a lease may end before
any step. A write whose outcome is unknown goes into the pipe, from which it lands at any later time, or not.
"""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.ledger.rules import Code
from coordinator.ledger.states import SessionState
from tests.model.explorer import Step
from tests.model.image import FREE, OWNERS, Image, Op, Production
from tests.model.looks import Looks
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
    STARTING,
    STUCK,
    TERMINAL,
    TERMINATED,
    UNBORN,
    VOIDING,
    WITH_SOCKET,
    Config,
    State,
    put,
)

Steps = Iterator[Step[State]]


class Sessions:
    """The model: one slot, requests 0 and 1 of owners A and B."""

    def __init__(self, config: Config, owners: tuple[int, ...] = (0, 1)) -> None:
        self.config = config
        self.owners = owners
        self.production = Production(owners, config.tamper, config.blind)
        self._looks = Looks(self.production, config)

    def initial(self) -> State:
        each = (0,) * len(self.owners)
        return State(Image(FREE, each, (1, 1), (0, 0)), (NONE,) * len(each), each, each, each, each,
                     (1, 1), (0, 0), None, (), 0)

    def steps(self, state: State) -> Steps:
        for owner in (0, 1):
            yield from self._life(state, owner)
        for request, owner in enumerate(self.owners):
            if state.alive[owner]:
                yield from self._request(state, request, owner)
            yield from self._server(state, request, owner)
        if self.config.restart and not state.restarts:
            procs = tuple(GONE if proc in (STARTING, BACKEND) else proc for proc in state.procs)
            yield "server restarts", state._replace(procs=procs, restarts=1), False, None
        yield from self._owner_reaper(state)
        yield from self._backend_reaper(state)
        yield from self._pipe(state)

    def violation(self, state: State) -> str | None:
        holder = self._holder(state)
        for request, proc in enumerate(state.procs):
            if proc in (STARTING, BACKEND) and request != holder:
                return "I2: a server process without a permit"
        running = sum(proc in (STARTING, BACKEND) for proc in state.procs)
        return "I1: more server processes than slots" if running > 1 else None

    def is_good(self, state: State) -> bool:
        """Every permit is free, nothing is on its way, nobody is in the middle of anything."""
        return (state.image.slot == FREE and not state.pipe and not state.reap
                and all(phase in TERMINAL for phase in state.phases)
                and all(proc in (UNBORN, GONE) for proc in state.procs))

    # ---- writes

    def _holder(self, state: State) -> int:
        slot = state.image.slot
        return self.production.request_of[slot] if slot != FREE else FREE

    def _slot_state(self, state: State) -> SessionState | None:
        slot = state.image.slot
        return self.production.sessions[slot].state if slot != FREE else None

    def _write(self, state: State, txn: int) -> tuple[State, str | None] | None:
        """The state after the transaction won, with what it broke; None: it lost."""
        image = self.production.carried_out(txn, state.image)
        if image is None:
            return None
        if image.slot == state.image.slot:
            return state._replace(image=image), None
        before, bad, freed = self._holder(state), None, state.freed
        after = self.production.request_of[image.slot] if image.slot != FREE else FREE
        if before not in (FREE, after):
            freed = put(freed, before, 1)
            if state.procs[before] in (STARTING, BACKEND):
                bad = "I2: released while its server process lives"
            elif after != FREE:
                bad = "I4: overwrote somebody else's permit"
        elif before == FREE and freed[after]:
            bad = "I4: a released permit came back"
        reap = state.reap if state.reap is not None and state.reap[1] == "terminate" else None
        pipe = tuple(each for each in state.pipe if not self.production.hopeless(each[2], "session"))
        return state._replace(image=image, freed=freed, pipe=pipe, reap=reap), bad

    def _decide(self, state: State, op: Op) -> int | Code | None:
        on_record = state.image.exits[self.owners[op.request]] == 1
        return self.production.decision(op, state.image.slot, on_record)

    def _sent(self, state: State, op: Op, txn: int) -> State | None:
        """The write is on its way and nobody knows more."""
        each = (op.name, op.request, txn)
        if len(state.pipe) >= self.config.pipe or each in state.pipe:
            return None
        return state._replace(pipe=tuple(sorted((*state.pipe, each))))

    def _owner_writes(
        self, state: State, op: Op, *, won: str, gone: str | None = None, refused: str | None = None,
        unknown: str | None = None, heals: bool = True,
    ) -> Steps:
        """An owner's write and its phase after each answer (None: no such step)."""
        request, answer = op.request, self._decide(state, op)
        label = f"{OWNERS[self.owners[request]]} {op.name} {op.flag}"
        if answer is None:
            yield label + " already", self._in(state, request, won), heals, None
        elif isinstance(answer, Code):
            to = gone if answer is Code.GONE else refused
            if to is not None:
                yield f"{label} {answer}", self._in(state, request, to), heals, None
        else:
            outcome = self._write(state, answer)
            if outcome is not None:
                after, bad = outcome
                yield label, self._in(after, request, won), heals, bad
            sent = self._sent(state, op, answer) if unknown is not None else None
            if sent is not None and unknown is not None:
                yield label + "=unknown", self._in(sent, request, unknown), False, None

    def _in(self, state: State, request: int, phase: str) -> State:
        if phase == state.phases[request]:
            return state
        procs = state.procs
        if procs[request] == GONE and phase not in WITH_SOCKET:  # nobody looks any more: fewer states
            procs = put(procs, request, UNBORN)
        return state._replace(phases=put(state.phases, request, phase), procs=procs)

    # ---- owners

    def _life(self, state: State, owner: int) -> Steps:
        """Crash, lease, exit record, hello."""
        name, image, may_fail = OWNERS[owner], state.image, self.config.failing[owner]
        alive, registered, recorded = state.alive[owner], image.keys[owner], image.exits[owner]
        if alive and may_fail:
            phases = tuple(DEAD if o == owner else p for o, p in zip(self.owners, state.phases, strict=True))
            procs = tuple(UNBORN if p == GONE and o == owner else p
                          for o, p in zip(self.owners, state.procs, strict=True))
            dead = state._replace(phases=phases, procs=procs, alive=put(state.alive, owner, 0),
                                  hello=put(state.hello, owner, 0))
            yield f"{name} crashes", dead, False, None
        if alive and not registered:
            back = state._replace(image=image._replace(keys=put(image.keys, owner, 1)),
                                  hello=put(state.hello, owner, int(self.config.says_hello)))
            yield f"{name} registers again", back, True, None
        if alive and registered and state.hello[owner]:
            yield from self._hello(state, owner)
        if registered and (may_fail or not alive):
            yield f"{name}'s lease ends", self._lease_ended(state, owner), not alive, None
        if not alive and recorded == 0:
            on_record = image._replace(exits=put(image.exits, owner, 1))
            yield f"exit of {name} on record", state._replace(image=on_record), True, None
        holder = self._holder(state)
        if recorded == 1 and not registered and (holder == FREE or self.owners[holder] != owner):
            removed = image._replace(exits=put(image.exits, owner, 2))
            yield f"exit record of {name} removed", state._replace(image=removed), True, None

    def _lease_ended(self, state: State, owner: int) -> State:
        """The worker key and its receipts go; what compared the registration has lost."""
        image = state.image
        receipts = tuple(0 if o == owner else r for o, r in zip(self.owners, image.receipts, strict=True))
        pipe = tuple(each for each in state.pipe if self.owners[each[1]] != owner
                     or not self.production.hopeless(each[2], "worker"))
        return state._replace(
            image=image._replace(keys=put(image.keys, owner, 0), receipts=receipts), pipe=pipe)

    def _hello(self, state: State, owner: int) -> Steps:
        """What stands under its boot id and it does not list is freed as unused."""
        holder = self._holder(state)
        if holder != FREE and self.owners[holder] == owner and state.phases[holder] in NOT_HOLDING:
            yield from self._owner_writes(state, Op("release", holder, "unused"), won=DONE)
        else:
            yield f"{OWNERS[owner]} said hello", state._replace(hello=put(state.hello, owner, 0)), True, None

    def _request(self, state: State, request: int, owner: int) -> Steps:
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
        mine, name = self._holder(state) == request, OWNERS[self.owners[request]]
        if phase != NONE and receipt == 1 and mine:
            to = HAVE if phase == ASKED else GIVE
            yield f"{name} reads its receipt", self._in(state, request, to), True, None
        elif phase != NONE and receipt:
            yield f"{name} reads: over", self._in(state, request, DONE), True, None
        elif phase != VOIDING and linked:
            yield from self._owner_writes(
                state, Op("reserve", request), won=HAVE, unknown=ASKED, heals=phase == ASKED)
        if phase == ASKED and not self.config.waits_for_receipt:
            yield f"{name} does not wait", self._in(state, request, HAVE), True, None
        if phase != NONE and not receipt:
            if linked and self.config.voids:
                yield from self._owner_writes(state, Op("void", request), won=DONE, unknown=VOIDING)
            elif not self.config.voids or not state.image.keys[self.owners[request]]:
                yield f"{name} gives up", self._in(state, request, DONE), True, None

    def _opening(self, state: State, request: int) -> Steps:
        phase, proc, name = state.phases[request], state.procs[request], OWNERS[self.owners[request]]
        if phase in (HAVE, CONNECTING) and self._slot_state(state) is SessionState.RESERVED:
            yield from self._owner_writes(state, Op("connecting", request), won=phase, unknown=phase)
        if phase == HAVE:
            granted = self._holder(state) == request or state.freed[request]
            bad = None if granted else "I3: a connect without a receipt"
            went = state._replace(procs=put(state.procs, request, IN_FLIGHT))
            yield f"{name} connects", self._in(went, request, CONNECTING), True, bad
            yield f"{name} does not need it", self._in(state, request, GIVE), True, None
        elif phase == CONNECTING:
            if proc == BACKEND:
                yield f"{name} has its key data", self._in(state, request, READY), True, None
            if proc == GONE:
                yield f"{name} reads the end", self._in(state, request, ENDED), True, None
            yield f"{name}'s connect times out", self._in(state, request, SILENT), False, None
        else:
            flag = str(state.births[request])
            yield from self._owner_writes(
                state, Op("open", request, flag), won=IDLE, gone=LOST, refused=TERMINATED, unknown=OPENING)
            if proc == GONE:
                yield f"{name} reads the end", self._in(state, request, ENDED), True, None
            if not self.config.serves_after_open and proc == BACKEND:
                yield f"{name} serves early", state._replace(named=put(state.named, request, 1)), True, None

    def _serving(self, state: State, request: int, registered: bool) -> Steps:
        name = OWNERS[self.owners[request]]
        if state.procs[request] == GONE:
            yield f"{name} reads the end", self._in(state, request, ENDED), True, None
        if self._holder(state) != request:
            yield f"{name}'s permit is gone", self._in(state, request, LOST), True, None
        elif self._slot_state(state) is SessionState.UNKNOWN and registered:
            yield from self._owner_writes(
                state, Op("reassert", request), won=IDLE, refused=TERMINATED, unknown=IDLE)
        if state.procs[request] == BACKEND and not state.named[request]:
            yield f"{name} serves", state._replace(named=put(state.named, request, 1)), False, None
        yield from self._owner_writes(
            state, Op("closing", request), won=TERMINATED, gone=LOST, refused=TERMINATED,
            unknown=TERMINATED)

    def _ending(self, state: State, request: int) -> Steps:
        phase, proc, name = state.phases[request], state.procs[request], OWNERS[self.owners[request]]
        if phase == TERMINATED:
            if proc == GONE or not self.config.waits_for_eof:
                yield f"{name} reads the end", self._in(state, request, ENDED), True, None
            yield f"{name} sees no end in time", self._in(state, request, STUCK), False, None
        elif phase == ENDED or (phase == GIVE and self.config.gives_back_unused):
            proof = "eof" if phase == ENDED else "unused"
            later = phase if self.config.settles_release else DONE
            yield from self._owner_writes(
                state, Op("release", request, proof), won=DONE, gone=DONE, unknown=later)
        elif phase in (SILENT, STUCK):
            flag = "abandoned" if phase == SILENT and self.config.abandons else ""
            yield from self._owner_writes(
                state, Op("unknown", request, flag), won=GAVE_UP, gone=DONE, unknown=phase)
        elif phase == GAVE_UP:
            if self._holder(state) != request:
                yield f"{name} sees it released", self._in(state, request, DONE), True, None
            elif self._slot_state(state) is not SessionState.UNKNOWN:
                yield f"{name} sees a late write", self._in(state, request, STUCK), True, None

    # ---- the server

    def _server(self, state: State, request: int, owner: int) -> Steps:
        proc = state.procs[request]
        connected = state.alive[owner] and state.phases[request] in WITH_SOCKET
        if proc == IN_FLIGHT:
            born = state._replace(births=put(state.births, request, state.restarts))
            yield f"server forks for {request}", self._proc(born, request, STARTING), True, None
            yield f"server refuses {request}", self._proc(state, request, GONE), True, None
        elif proc == STARTING:
            yield f"backend {request} is ready", self._proc(state, request, BACKEND), True, None
            if not connected:
                yield f"backend {request} ends in start-up", self._proc(state, request, GONE), True, None
        elif proc == BACKEND and (not connected or state.phases[request] == TERMINATED):
            yield f"backend {request} ends", self._proc(state, request, GONE), True, None

    def _proc(self, state: State, request: int, proc: int) -> State:
        if proc != GONE:
            return state._replace(procs=put(state.procs, request, proc))
        watched = state.phases[request] in WITH_SOCKET
        return state._replace(procs=put(state.procs, request, GONE if watched else UNBORN),
                              named=put(state.named, request, 0))

    # ---- reapers

    def _owner_reaper(self, state: State) -> Steps:
        holder = self._holder(state)
        if holder == FREE or state.image.keys[self.owners[holder]]:
            return
        if self.config.frees_on_lease_loss:
            lives = state.procs[holder] in (STARTING, BACKEND)
            freed = state._replace(
                image=state.image._replace(slot=FREE), freed=put(state.freed, holder, 1), reap=None)
            yield f"reaper frees {holder}", freed, True, "I2: released while it lives" if lives else None
            return
        yield from self._reaper_writes(state, Op("mark", holder), None)

    def _reaper_writes(self, state: State, op: Op, reap: tuple[int, str, str] | None) -> Steps:
        answer = self._decide(state, op)
        if not isinstance(answer, int) or isinstance(answer, Code):
            if state.reap is not None and op.name == "reap":
                yield f"reaper forgets {op.request}", state._replace(reap=None), True, None
            return
        outcome = self._write(state, answer)
        if outcome is not None:
            yield f"reaper {op.name} {op.request} {op.flag}", outcome[0]._replace(reap=reap), True, outcome[1]
        sent = self._sent(state, op, answer)
        if sent is not None:
            yield f"reaper {op.name} {op.request}=unknown", sent._replace(reap=None), False, None

    def _backend_reaper(self, state: State) -> Steps:
        reap, holder = state.reap, self._holder(state)
        if reap is not None and reap[1] == "terminate":
            yield from self._terminate(state, reap[0])
        elif reap is not None and reap[1] == "proven":
            yield from self._reaper_writes(state, Op("reap", reap[0], reap[2]), None)
        elif holder != FREE and self._slot_state(state) is SessionState.UNKNOWN:
            yield from self._look(state, holder)

    def _terminate(self, state: State, request: int) -> Steps:
        if state.procs[request] != BACKEND:
            yield f"nothing to terminate of {request}", state._replace(reap=None), True, None
            return
        open_again = self._holder(state) == request and self._slot_state(state) is SessionState.OPEN
        bad = "a session that came back was terminated" if open_again else None
        ended = self._proc(state, request, GONE)._replace(reap=None)
        yield f"pg_terminate_backend({request})", ended, True, bad

    def _look(self, state: State, request: int) -> Steps:
        first = state.reap[2] if state.reap is not None and state.reap[1] == "look" else None
        # by the second look whatever a dead or given-up attempt had on the wire has arrived: that is what
        # the interval between the looks is for; how long a start-up then takes is not bounded
        if first is not None and state.procs[request] == IN_FLIGHT:
            return
        dead = state.image.exits[self.owners[request]] == 1 or not self.config.knows_death
        session = self.production.sessions[state.image.slot]
        server = (state.procs, state.births, state.named, state.restarts)
        proof = self._looks.prove(state.image.slot, *server, dead=dead, first=first)
        if proof is not None:
            yield f"look: {request} {proof}", state._replace(reap=(request, "proven", proof)), True, None
        elif first is None and not session.pid and (dead or session.abandoned):
            shown = self._looks.starters(state.procs)
            yield f"first look at {request}", state._replace(reap=(request, "look", shown)), True, None
        elif first is not None:
            yield f"look again at {request}", state._replace(reap=None), True, None
        if self.config.terminate and session.pid and not session.terminating:
            yield from self._reaper_writes(state, Op("terminating", request), (request, "terminate", ""))

    # ---- the pipe

    def _pipe(self, state: State) -> Steps:
        for at, (name, request, txn) in enumerate(state.pipe):
            rest = state._replace(pipe=(*state.pipe[:at], *state.pipe[at + 1 :]))
            outcome = self._write(rest, txn)
            if outcome is not None:
                yield f"late {name} {request} lands", outcome[0], True, outcome[1]
            yield f"late {name} {request} is lost", rest, True, None
