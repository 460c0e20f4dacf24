"""All interleavings of a ledger that is lost, noticed and made anew, with two workers and their coordinators.

Each worker has an open session; a third server process is somebody's whom nobody remembers. The store was
wiped, or put back to an older state in which one session has its permit, one has none, and one stands that is
long gone. From there: coordinators read and remember, a reservation of before arrives late, an operator gives
the order, workers' sessions get slots, the leader looks and gives the rest theirs. Workers crash, are cut off
and come back, coordinators restart, sessions end at any time.

Taken for granted: every coordinator reads the store once before its revision has come as far as it had been.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from coordinator.greeting import Greeter
from coordinator.ledger.access import Seen
from coordinator.ledger.record import Permit
from coordinator.ledger.rules import Code, Command, MarkOwnerGone, Reassert, Release, Unknown
from coordinator.ledger.states import Actor, Proof, SessionState
from coordinator.view import View
from tests.ledger.ground import session
from tests.model.explorer import Step
from tests.model.lost_store import (
    ACTIVE,
    BASE,
    FIRST,
    FREE,
    HEADS,
    HEARD,
    NO_HEAD,
    PROCESSES,
    RECOVERING,
    SEEN,
    SLOTS_MAX,
    UNHEARD,
    UNREGISTERED,
    WORKERS,
    Image,
    LostStore,
    old_permit,
    process_of,
)
from tests.model.state import put

LOW, HIGH = 900, 5_000  # the store's revision: before and after it passes what was seen
NOTHING_GIVEN, TO_BE_CLOSED = (), ("close",)
GIVES, TELLS, DISOWNS = range(3)


class State(NamedTuple):
    """Small values only."""

    image: Image
    revision: int
    seen: tuple[Seen, ...]  # per host, one for each worker
    heard: tuple[int, ...]  # the head it read last
    alive: tuple[int, ...]
    mine: tuple[Permit | None, ...]  # what the worker's session bears
    ended: tuple[int, ...]  # the worker knows that its session is gone
    stage: tuple[int, ...]  # of its recovery
    given: tuple[Any, ...]  # what is to be told to it
    procs: tuple[int, ...]
    look: tuple[tuple[int, ...], tuple[int, ...], int] | None  # what it shows, what lacks a permit, made any


@dataclass(frozen=True)
class Config:
    """What was lost, how many slots there are, and which safeguards stand."""

    wiped: bool = True
    slots: int = 3
    failing: tuple[bool, bool] = (True, False)
    remembers: bool = True
    believes_nothing_older: bool = True
    proves_recovered: bool = True
    knows_of_before: bool = True
    disowns: bool = True
    receipts_stay: bool = True


Steps = Iterator[Step[State]]


class LostLedger:
    """The model."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.store = LostStore(config.slots)

    def initial(self) -> State:
        image = Image(NO_HEAD, 0, (UNREGISTERED,) * 2, (FREE,) * SLOTS_MAX, (0,) * PROCESSES)
        if not self.config.wiped:
            mine = session(pid=40, generation=old_permit(0).generation, backend_start_us=5_000)
            gone = session(slot=1, seat=1, pid=99, generation=77, request_id="r5")
            slots = (self.store.value_of(mine), self.store.value_of(gone), FREE, FREE)
            image = image._replace(head=FIRST, base=1, keys=(UNHEARD,) * 2, slots=slots)
        seen = SEEN if self.config.remembers else Seen()
        return State(image, LOW, (seen, seen), (FIRST, FIRST), (1, 1), (old_permit(0), old_permit(1)), (0, 0),
                     (GIVES, GIVES), (NOTHING_GIVEN,) * 2, (1,) * PROCESSES, None)

    def steps(self, state: State) -> Steps:
        for worker in (0, 1):
            yield from self._host(state, worker)
            yield from self._befalls(state, worker)
            if state.alive[worker]:
                yield from self._worker(state, worker)
        yield from self._reapers(state)
        yield from self._leader(state)
        if state.procs[2]:
            yield "the forgotten session ends", state._replace(procs=put(state.procs, 2, 0)), True, None

    def violation(self, state: State) -> str | None:
        for process, lives in enumerate(state.procs):
            permits = len(self.store.of_process(state.image, process))
            if permits > 1:
                return "I2: one session has two permits"
            if lives and not permits and state.image.head == ACTIVE:
                return "I2: a session lives without a permit, and the ledger grants"
        return None

    def is_good(self, state: State) -> bool:
        """The ledger grants, and everything that stands in it is some worker's session."""
        image = state.image
        whole = all(
            image.keys[w] == HEARD if state.alive[w] else image.keys[w] == UNREGISTERED for w in (0, 1))
        return (image.head == ACTIVE and whole and state.look is None and state.stage == (GIVES, GIVES)
                and all(self._is_used(state, process_of(each), each.permit, each.state)
                        for each in self.store.standing(image)))

    def _is_used(self, state: State, process: int, permit: Permit, is_: SessionState) -> bool:
        return (process in (0, 1) and bool(state.procs[process]) and state.mine[process] == permit
                and is_ is SessionState.OPEN)

    # ---- a host: its coordinator, and an operator there

    def _host(self, state: State, host: int) -> Steps:
        name, image = WORKERS[host], state.image
        read = self._read(state, host)
        if read != state:
            yield f"{name}'s host reads", read, True, None
        grown = None if read.seen[host].lost else self.store.reserved(host, image)
        if grown is not None and image.head != ACTIVE:
            yield f"{name}'s host grows", read._replace(image=grown), False, "it grew on a lost ledger"
        if host == 0 and image.head == FIRST:
            yield from self._late_reservation(state, host)
        seen = state.seen[host]
        ordered = self.store.ordered(seen, image, state.revision) if image.head < RECOVERING else None
        if ordered is not None:
            keys = tuple(min(key, UNHEARD) for key in image.keys)
            yield f"the order at {name}'s", state._replace(
                image=ordered._replace(keys=keys), revision=HIGH), True, None
        if state.revision == LOW and all(each.lost for each in state.seen):
            yield "the revision passes", state._replace(revision=HIGH), False, None
        if image.head == RECOVERING and not image.base:
            yield "an epoch and a policy", state._replace(image=image._replace(base=1)), True, None

    def _read(self, state: State, host: int) -> State:
        image = state.image
        seen = self.store.reads(state.seen[host], image.head, state.revision)
        if not self.config.remembers and not seen.rebuilt:
            seen = Seen()
        return state._replace(seen=put(state.seen, host, seen), heard=put(state.heard, host, image.head))

    def _late_reservation(self, state: State, host: int) -> Steps:
        """Sent before the loss. Its coordinator takes it back, if that reaches the store."""
        landed = self.store.reserved(host, state.image)
        if landed is None:
            return
        seen = self.store.wins(state.seen[host], state.revision + 1)
        after = state._replace(image=landed)
        if not self.config.believes_nothing_older or not seen.lost:
            yield "a late reservation is believed", after, False, "it grew on a lost ledger"
            return
        after = after._replace(seen=put(state.seen, host, seen))
        yield "a late reservation stays", after, False, None
        yield "a late reservation is taken back", after._replace(image=state.image), False, None

    # ---- a worker

    def _befalls(self, state: State, worker: int) -> Steps:
        name, fails = WORKERS[worker], self.config.failing[worker]
        registered = state.image.keys[worker] != UNREGISTERED
        if state.alive[worker] and fails:
            yield f"{name} crashes", state._replace(
                alive=put(state.alive, worker, 0), mine=put(state.mine, worker, None),
                ended=put(state.ended, worker, 0), stage=put(state.stage, worker, GIVES),
                given=put(state.given, worker, NOTHING_GIVEN)), False, None
        if registered and (fails or not state.alive[worker]):
            receipts = state.image.receipts
            if not self.config.receipts_stay:
                receipts = put(receipts, worker, 0)
            image = state.image._replace(keys=put(state.image.keys, worker, UNREGISTERED), receipts=receipts)
            yield f"{name}'s lease ends", self._anew(state, worker)._replace(image=image), (
                not state.alive[worker]), None
        if state.procs[worker] and (fails or not state.alive[worker]):
            yield f"session {name} ends", state._replace(
                procs=put(state.procs, worker, 0)), not state.alive[worker], None
        if state.stage[worker] != GIVES and fails:
            yield f"{name}'s coordinator restarts", self._anew(state, worker), False, None

    def _anew(self, state: State, worker: int) -> State:
        return state._replace(
            stage=put(state.stage, worker, GIVES), given=put(state.given, worker, NOTHING_GIVEN))

    def _worker(self, state: State, worker: int) -> Steps:
        name, permit = WORKERS[worker], state.mine[worker]
        if permit is not None and not state.procs[worker] and not state.ended[worker]:
            yield f"{name} reads the end", state._replace(ended=put(state.ended, worker, 1)), True, None
        if permit is not None and state.ended[worker] and not state.seen[worker].lost:
            after = self._carry_out(state, Release(permit, Proof.EOF, Actor.OWNER))
            if after is None and self._is_whole(state, worker):  # gone: it need not be told any more
                after = state
            if after is not None:
                yield f"{name} releases", self._without(after, worker), True, None
        yield from self._reasserts(state, worker)
        if state.image.keys[worker] == UNREGISTERED:
            yield from self._hello(state, worker)
        elif state.image.keys[worker] == UNHEARD:
            yield from self._recovery(state, worker)

    def _reasserts(self, state: State, worker: int) -> Steps:
        """Its permit was marked while it was away."""
        permit = state.mine[worker]
        if permit is None or state.ended[worker] or state.image.keys[worker] == UNREGISTERED:
            return
        if any(each.permit == permit and each.state is SessionState.UNKNOWN
               for each in self.store.standing(state.image)):
            back = self._carry_out(state, Reassert(permit))
            if back is not None:
                yield f"{WORKERS[worker]} reasserts", back, True, None

    def _without(self, state: State, worker: int) -> State:
        return state._replace(mine=put(state.mine, worker, None), ended=put(state.ended, worker, 0))

    def _greeter(self, state: State, host: int) -> Greeter:
        """The production's, with this host's view of the ledger."""
        view = View("db", lost="lost" if state.seen[host].lost else "", head=HEADS.get(state.heard[host]))
        none = cast(Any, None)
        return Greeter(none, cast(Any, SimpleNamespace(views={"db": view})),
                       cast(Any, {"db": SimpleNamespace(lost=state.seen[host].lost)}), none, none)

    def _is_whole(self, state: State, worker: int) -> bool:
        return not self._greeter(state, worker).is_lost("db")

    def _hello(self, state: State, worker: int) -> Steps:
        """It registers, lists its session, and hears what is gone."""
        permit, read = state.mine[worker], self._read(state, worker)
        after = read._replace(image=read.image._replace(keys=put(read.image.keys, worker, UNHEARD)))
        greeter = self._greeter(read, worker)
        bad = None
        if permit is not None and not state.ended[worker] and not greeter.is_lost("db"):
            found = any(each.permit == permit for each in self.store.standing(after.image))
            before = greeter._is_of_before("db", permit) and self.config.knows_of_before
            if not found and not before and state.procs[worker]:
                bad = "a session was closed for a permit that the lost ledger had"
        for each in self.store.standing(after.image):
            if each.owner == WORKERS[worker] and not each.pid and not read.seen[worker].lost:
                freed = self._carry_out(after, Release(each.permit, Proof.UNUSED, Actor.OWNER))
                after = after if freed is None else freed
        yield f"{WORKERS[worker]} says hello", after, True, bad

    # ---- its sessions get their slots

    def _recovery(self, state: State, worker: int) -> Steps:
        seen = state.seen[worker]
        if seen.lost or not seen.rebuilt or state.heard[worker] < RECOVERING or not state.image.base:
            return
        stage, permit = state.stage[worker], state.mine[worker]
        if stage == GIVES:
            is_open = permit is not None and not state.ended[worker] and permit.generation <= BASE
            yield from self._gives(state, worker) if is_open else self._next(state, worker, DISOWNS)
        elif stage == TELLS:
            yield from self._tells(state, worker)
        else:
            yield from self._disowns(state, worker)

    def _next(self, state: State, worker: int, stage: int) -> Steps:
        yield f"{WORKERS[worker]} has nothing to recover", state._replace(
            stage=put(state.stage, worker, stage)), True, None

    def _gives(self, state: State, worker: int) -> Steps:
        name, permit = WORKERS[worker], state.mine[worker]
        assert permit is not None
        image = self.store.gives(worker, state.image, permit)
        given: Any = TO_BE_CLOSED
        bad = None
        if image is None and state.procs[worker] and FREE in state.image.slots[: self.config.slots]:
            bad = "a session is to be closed though a slot is free"
        if image is not None:
            (standing,) = self.store.of_process(image, worker)[:1]
            given = standing.permit
            yield f"{name}'s session gets a slot=unknown", state._replace(image=image), False, None
        yield f"{name}'s session gets a slot", state._replace(
            image=image or state.image, given=put(state.given, worker, given),
            stage=put(state.stage, worker, TELLS)), True, bad

    def _tells(self, state: State, worker: int) -> Steps:
        name, given = WORKERS[worker], state.given[worker]
        told = state._replace(given=put(state.given, worker, NOTHING_GIVEN),
                              stage=put(state.stage, worker, DISOWNS))
        holds = state.mine[worker] is not None and not state.ended[worker]
        if given == TO_BE_CLOSED:
            closed = self._without(told, worker)._replace(procs=put(state.procs, worker, 0))
            yield f"{name} closes its session", closed if holds else told, True, None
        elif holds:
            yield f"{name} takes its permit", told._replace(mine=put(state.mine, worker, given)), True, None
        else:
            lost = self._carry_out(told, Unknown(given))
            yield f"{name} has lost it meanwhile", told if lost is None else lost, True, None

    def _disowns(self, state: State, worker: int) -> Steps:
        """What an older state says of the worker, and it does not hold."""
        name = WORKERS[worker]
        for each in self.store.standing(state.image) if self.config.disowns else ():
            if each.owner != name or each.permit == state.mine[worker] or each.state is SessionState.UNKNOWN:
                continue
            command: Command = Unknown(each.permit) if each.pid else Release(
                each.permit, Proof.UNUSED, Actor.OWNER)
            after = self._carry_out(state, command)
            assert after is not None
            yield f"{name} disowns {each.permit}", after, True, None
            return
        image = state.image._replace(keys=put(state.image.keys, worker, HEARD))
        yield f"{name} is heard", self._anew(state, worker)._replace(image=image), True, None

    # ---- reapers and leader

    def _reapers(self, state: State) -> Steps:
        if state.image.head < RECOVERING:
            return
        for each in self.store.standing(state.image):
            process = process_of(each)
            lives = process >= 0 and state.procs[process]
            owner = WORKERS.find(each.owner) if each.owner else -1
            if each.state is not SessionState.UNKNOWN:
                if owner >= 0 and state.image.keys[owner] == UNREGISTERED:
                    marked = self._carry_out(state, MarkOwnerGone(each.permit))
                    if marked is not None:
                        yield f"{each.permit} is marked", marked, True, None
            elif not each.pid:
                if owner >= 0 and not state.alive[owner]:
                    yield from self._frees(state, each.permit, Proof.ATTESTED, Actor.OPERATOR, None)
            elif not lives or (not self.config.proves_recovered and not each.owner):
                bad = "I2: released while it lives" if lives else None
                yield from self._frees(state, each.permit, Proof.ABSENT, Actor.BACKEND_REAPER, bad)

    def _frees(self, state: State, permit: Permit, proof: Proof, actor: Actor, bad: str | None) -> Steps:
        freed = self._carry_out(state, Release(permit, proof, actor))
        assert freed is not None
        yield f"{permit} is freed: {proof}", freed, True, bad

    def _leader(self, state: State) -> Steps:
        image, look = state.image, state.look
        if image.head != RECOVERING or not image.base or not any(each.rebuilt for each in state.seen):
            return
        if look is None:
            if not self.store.unheard(image):
                shown = tuple(process for process, lives in enumerate(state.procs) if lives)
                seen = (shown, self.store.missing(image, shown), 0)
                yield "the leader looks", state._replace(look=seen), True, None
            return
        shown, missing, made = look
        if missing:
            after = self.store.shows(missing[0], image)
            yield f"session {missing[0]} gets a permit", state._replace(
                image=after or image, look=(shown, missing[1:], 1)), True, None
        elif made or self.store.disagrees(image, shown):
            yield "the leader is to look again", state._replace(look=None), True, None
        else:
            receipts = tuple(0 for _ in image.receipts) if self.config.receipts_stay else (
                *image.receipts[:2], 0)
            whole = image._replace(head=ACTIVE, receipts=receipts)
            yield "the ledger grants again", state._replace(image=whole, look=None), True, None

    def _carry_out(self, state: State, command: Command) -> State | None:
        after = self.store.decided(command, state.image)
        return None if isinstance(after, Code) else state._replace(image=after)
