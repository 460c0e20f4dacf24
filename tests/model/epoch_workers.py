"""The workers of the epoch model: they hear, acknowledge, grant, are cut off, pause, crash and come back."""

from __future__ import annotations

from coordinator.ledger.rules import Closing, Code, Command, MarkOwnerGone, Open, Reassert, Release
from coordinator.ledger.states import Actor, Proof, SessionState
from tests.model.epoch_state import (
    ANSWERED,
    ASKED,
    BUSY,
    CHECKED,
    DEAD,
    DONE,
    HAVE,
    IDLE,
    IN_TRANSACTION,
    NO_PROCESS,
    NONE,
    NOT_TOLD,
    SAID_NOTHING,
    SETTLED,
    TELLS,
    TOLD,
    UNSETTLED,
    WAITS,
    Base,
    State,
    Steps,
    put_all,
)
from tests.model.epoch_store import (
    DRAINING,
    FREE,
    GONE,
    OLD,
    PROMOTING,
    TWO,
    WORKERS,
    Image,
    grants,
    heard,
    number_of,
    usable,
)
from tests.model.state import put

TOO_LATE = "I10: granted in the old epoch after the advance was complete"


class Workers(Base):
    """Steps of the workers and of whoever reaps after them."""

    def steps(self, state: State) -> Steps:
        for worker in (0, 1):
            yield from self._life(state, worker)
            yield from self._coordinator(state, worker)
            if state.alive[worker] and not self._is_paused(state, worker):
                yield from self._link(state, worker)
        for request, worker in enumerate(self.config.owners):
            paused = state.phases[request] != CHECKED and self._is_paused(state, worker)
            if state.alive[worker] and not paused:
                yield from self._request(state, request, worker)
            yield from self._reapers(state, request, worker)

    def _is_paused(self, state: State, worker: int) -> bool:
        """Its one thread stands between a check and a grant. A mutant does other things meanwhile."""
        return self.config.grants_as_it_checks and any(
            phase == CHECKED and of == worker
            for phase, of in zip(state.phases, self.config.owners, strict=True))

    # ---- life and lease

    def _life(self, state: State, worker: int) -> Steps:
        name, alive = WORKERS[worker], state.alive[worker]
        if alive and self.config.failing[worker]:
            yield f"{name} crashes", self._crashed(state, worker), False, None
        fails = self.is_cut_off(worker)
        own = state.own[worker] and self.config.stop
        if alive and fails and own:
            yield f"{name}'s lease ends by its own clock", put_all(state, worker, own=0), False, None
        lasts = own and alive and self.config.own_clock_first
        if self.is_registered(state, worker) and (fails or not alive) and not lasts:
            image = state.image._replace(keys=put(state.image.keys, worker, GONE))
            gone = put_all(self.wrote(state, image, worker), worker, cut=alive)
            yield f"{name}'s lease ends", gone, not alive, None

    def _crashed(self, state: State, worker: int) -> State:
        """Only what a server still runs for it is left."""
        phases = tuple(DEAD if of == worker else phase
                       for phase, of in zip(state.phases, self.config.owners, strict=True))
        return put_all(state, worker, alive=0, link=0, hello=0, acks=0, own=0, cut=0, views=1)._replace(
            phases=phases)

    def _coordinator(self, state: State, worker: int) -> Steps:
        """What the coordinator of its host does."""
        name, image = WORKERS[worker], state.image
        read = DRAINING if image.epoch == PROMOTING else image.epoch  # workers are told no more of it
        if state.hosts[worker] != read:
            yield f"{name}'s host reads", put_all(state, worker, hosts=read), True, None
        serves = state.hello[worker]
        if serves in (1, 2):
            said = serves if self.config.acknowledges_what_it_serves else 0
            heard_of = 2 if state.acks[worker] == TOLD and self.config.remembers_acknowledgements else 0
            registered = self.store.registered(worker, said, heard_of, image)
            after = put_all(self.wrote(state, registered, worker), worker, hello=ANSWERED)
            if self.config.reads_at_hello:
                after = put_all(after, worker, hosts=registered.epoch)
            yield f"{name} is registered", after, True, None

    # ---- its link

    def _link(self, state: State, worker: int) -> Steps:
        name, up, hello = WORKERS[worker], state.link[worker], state.hello[worker]
        registered = self.is_registered(state, worker)
        if hello == SAID_NOTHING and not (up == SETTLED and registered):
            said = put_all(state, worker, hello=number_of(state.views[worker]))
            yield f"{name} says hello", said, True, None
        if hello == SAID_NOTHING and not up and self.is_cut_off(worker):
            yield f"{name} is only linked", put_all(state, worker, link=UNSETTLED), False, None
        if hello == ANSWERED:
            greeted = put_all(state, worker, hello=SAID_NOTHING, link=SETTLED, own=int(registered),
                              cut=state.cut[worker] and int(not registered))
            settled = self._hears(self._settled(greeted, worker), worker)
            yield f"{name}'s hello is answered", settled, True, None
        if self.is_cut_off(worker) and (up or hello):
            yield f"{name}'s link breaks", put_all(state, worker, link=0, hello=SAID_NOTHING), False, None
        if up and hello != ANSWERED:
            yield from self._notified(state, worker)
        if up and registered and state.acks[worker] == TELLS:
            told = self.store.acknowledged(worker, 2, state.image)
            yield f"{name} acknowledges", put_all(
                self.wrote(state, told, worker), worker, acks=TOLD), True, None
        if up == SETTLED and registered and not state.own[worker] and hello == SAID_NOTHING:
            yield f"{name}'s heartbeat", put_all(state, worker, own=1), True, None

    def _notified(self, state: State, worker: int) -> Steps:
        name, told = WORKERS[worker], state.hosts[worker]
        if told != state.views[worker]:
            yield f"{name} hears", self._hears(state, worker), True, None
        early = not self.config.hears_before_it_acknowledges and told == TWO
        if early and state.acks[worker] == NOT_TOLD:
            yield f"{name} would acknowledge", put_all(state, worker, acks=TELLS), True, None

    def _hears(self, state: State, worker: int) -> State:
        """Its pools go by what its coordinator read; then it acknowledges."""
        kind = state.hosts[worker]
        view, last = heard(kind), heard(state.views[worker])
        assert view.after(last) == view  # the ledger is whole
        tells = view.serving and view.epoch == 2 and state.acks[worker] == NOT_TOLD
        return put_all(state, worker, views=kind, acks=TELLS if tells else state.acks[worker])

    def _settled(self, state: State, worker: int) -> State:
        """What it had asked for is over; a slot that it got and never heard of is free."""
        for request, of in enumerate(self.config.owners):
            if of == worker and state.phases[request] == ASKED:
                state = state._replace(phases=put(state.phases, request, DONE))
                freed = self._carry_out(state, request, Release(
                    self.store.permit(request), Proof.UNUSED, Actor.OWNER))
                state = state if freed is None else freed
        return state

    # ---- its requests

    def _request(self, state: State, request: int, worker: int) -> Steps:
        phase = state.phases[request]
        linked = (state.link[worker] == SETTLED and state.hello[worker] == SAID_NOTHING
                  and self.is_registered(state, worker))
        if phase in (NONE, ASKED):
            yield from self._asking(state, request, worker, linked)
        elif phase in (IDLE, CHECKED):
            yield from self._granting(state, request, worker)
        if phase == HAVE and linked:
            yield from self._opening(state, request, worker)
        elif phase in (IDLE, BUSY) and linked:
            yield from self._returning(state, request, worker)
        if phase == BUSY and state.procs[request] == IN_TRANSACTION:
            ended = state._replace(
                procs=put(state.procs, request, WAITS), phases=put(state.phases, request, IDLE))
            yield f"{WORKERS[worker]}'s transaction ends", ended, True, None

    def _asking(self, state: State, request: int, worker: int, linked: bool) -> Steps:
        name, image = f"{WORKERS[worker]}{request}", state.image
        value = image.permits[request]
        if state.phases[request] == ASKED:
            if value != FREE:
                yield f"{name} reads its receipt", self._has(state, request, image), True, None
            elif not any(each[:2] == ("reserve", request) for each in state.pipe):
                given_up = state._replace(phases=put(state.phases, request, DONE))
                yield f"{name} gives up", given_up, True, None
            return
        txn = self.store.reserves(request, image) if linked else None
        if txn is None:
            return
        after = self.store.carried_out(txn, image)
        if after is not None:
            yield f"{name} reserves", self._has(self.wrote(state, after), request, after), False, None
        unknown = self.sent(state, "reserve", request, txn)
        if unknown is not None:
            asked = unknown._replace(phases=put(state.phases, request, ASKED))
            yield f"{name} reserves=unknown", asked, False, None

    def _has(self, state: State, request: int, image: Image) -> State:
        epoch = self.store.sessions[image.permits[request]].epoch
        return state._replace(phases=put(state.phases, request, HAVE), under=put(state.under, request, epoch))

    def _opening(self, state: State, request: int, worker: int) -> Steps:
        permit, name = self.store.permit(request), f"{WORKERS[worker]}{request}"
        opened = self._carry_out(state, request, Open(permit, 42 + request, 5_000 + request, OLD))
        if opened is not None:
            serving = opened._replace(phases=put(state.phases, request, IDLE),
                                      procs=put(state.procs, request, WAITS))
            yield f"{name} is open", serving, True, None
        else:
            yield f"{name} may not open", state._replace(phases=put(state.phases, request, DONE)), True, None

    def _may_grant(self, state: State, request: int, worker: int) -> bool:
        lasts = not self.config.stop or bool(state.own[worker])
        return grants(state.views[worker], state.under[request], own_lease=lasts)

    def _granting(self, state: State, request: int, worker: int) -> Steps:
        """What is given to nobody any more is closed, with its proof."""
        name, late = f"{WORKERS[worker]}{request}", state.completed and state.under[request] == 1
        if state.phases[request] == CHECKED:
            busy = state._replace(phases=put(state.phases, request, BUSY),
                                  procs=put(state.procs, request, IN_TRANSACTION))
            bad = TOO_LATE if late and not state.cut[worker] else None
            yield f"{name} goes on and grants", busy, True, bad
        elif self._may_grant(state, request, worker):
            bad = TOO_LATE if late and (self.config.stop or not state.cut[worker]) else None
            if self.is_cut_off(worker):
                checked = state._replace(phases=put(state.phases, request, CHECKED))
                yield f"{name} may grant", checked, False, bad
            else:
                busy = state._replace(phases=put(state.phases, request, BUSY),
                                      procs=put(state.procs, request, IN_TRANSACTION))
                yield f"{name} grants", busy, False, bad

    def _returning(self, state: State, request: int, worker: int) -> Steps:
        """Its permit was marked: it says that it holds it still. What it does not use any more it closes."""
        name, permit = f"{WORKERS[worker]}{request}", self.store.permit(request)
        value = state.image.permits[request]
        if value != FREE and self.store.sessions[value].state is SessionState.UNKNOWN:
            back = self._carry_out(state, request, Reassert(permit))
            if back is not None:
                yield f"{name} reasserts", back, True, None
        elif state.phases[request] == IDLE and not usable(state.views[worker], state.under[request]):
            closing = self._carry_out(state, request, Closing(permit))
            if closing is not None:
                ended = closing._replace(procs=put(state.procs, request, NO_PROCESS),
                                         phases=put(state.phases, request, DONE))
                freed = self._carry_out(ended, request, Release(permit, Proof.EOF, Actor.OWNER))
                assert freed is not None
                yield f"{name} is closed with proof", freed, True, None

    # ---- whoever comes after them

    def _reapers(self, state: State, request: int, worker: int) -> Steps:
        name, value = f"{WORKERS[worker]}{request}", state.image.permits[request]
        if not state.alive[worker] and state.procs[request] != NO_PROCESS:
            ended = state._replace(procs=put(state.procs, request, NO_PROCESS))
            yield f"backend {name} ends", ended, True, None
        if value == FREE:
            return
        permit, session = self.store.permit(request), self.store.sessions[value]
        if session.state is not SessionState.UNKNOWN and not self.is_registered(state, worker):
            marked = self._carry_out(state, request, MarkOwnerGone(permit))
            if marked is not None:
                yield f"{name} is marked", marked, True, None
        elif session.state is SessionState.UNKNOWN and state.procs[request] == NO_PROCESS:
            if session.pid:
                proven = Release(permit, Proof.ABSENT, Actor.BACKEND_REAPER)
            elif not state.alive[worker]:
                proven = Release(permit, Proof.ATTESTED, Actor.OPERATOR)
            else:
                return
            released = self._carry_out(state, request, proven)
            assert released is not None
            yield f"{name} is proven gone", released, True, None

    def _carry_out(self, state: State, request: int, command: Command) -> State | None:
        after = self.store.decided(request, command, state.image)
        return None if isinstance(after, Code) else self.wrote(state, after)
