"""All interleavings of an advance from epoch N to N+1: planned, by a draining command, and unplanned.

Two workers with a session each, the command and its lease, the leader that ends what a dead command left, an
operator who aborts, and who promotes the target. What each writes is made by production code on an image of
the store (epoch_store.py); a reservation and a move of the epoch may be on its way for ever, everything else
is carried out at once, since test_sessions.py explores what becomes of it otherwise. The workers' steps are
in epoch_workers.py.

Left out: a promotion that was ordered takes effect, or fails, before the lease of the command that ordered it
ends. And a grant whose check was over when its worker was paused past its lease is nobody's fault (02, I10).
"""

from __future__ import annotations

from functools import partial

from tests.model.epoch_state import (
    DEAD,
    DONE,
    ENDED,
    IDLE,
    IN_TRANSACTION,
    NO_COMMAND,
    NO_PROCESS,
    NONE,
    NOT_ORDERED,
    ORDERED,
    PROMOTED,
    Base,
    Config,
    State,
    Steps,
)
from tests.model.epoch_store import (
    DRAINING,
    DRAINS,
    FREE,
    NEW,
    NEW_IN_RECOVERY,
    ONE,
    PROMOTING,
    TWO,
    EpochStore,
    Image,
    may_be_promoted,
    number_of,
)
from tests.model.epoch_workers import Workers

FAR = ("promotes", "advances")  # the command has ordered the promotion


class Epochs(Base):
    """The model."""

    def __init__(self, config: Config) -> None:
        super().__init__(EpochStore(config.owners, config.tamper), config)
        self._workers = Workers(self.store, config)

    def initial(self) -> State:
        requests = (0,) * len(self.config.owners)
        image = Image(0, ONE, 0, (1, 1), (FREE,) * len(requests))
        return State(image, (1, 1), (1, 1), (ONE, ONE), (ONE, ONE), (0, 0), (0, 0), (1, 1), (0, 0),
                     (NONE,) * len(requests), requests, requests, NO_COMMAND, 0,
                     NOT_ORDERED if self.config.planned else PROMOTED, 0, ())

    def steps(self, state: State) -> Steps:
        for label, after, heals, bad in self._all(state):
            if not after.completed and self.store.is_complete(after.image):
                after = after._replace(completed=1)  # noqa: PLW2901 - what a command may have seen
            yield label, after, heals, bad

    def _all(self, state: State) -> Steps:
        yield from self._workers.steps(state)
        yield from self.late(state)
        if not self.config.planned:
            if state.image.epoch == ONE:
                txn = self.store.moves("fail over", state.image)
                yield from self._sends(state, "fail over", txn, heals=False)
            return
        yield from self._begins(state)
        yield from self._command(state)
        yield from self._promotion(state)
        yield from self._others(state)

    def violation(self, state: State) -> str | None:
        runs = {under for under, proc in zip(state.under, state.procs, strict=True) if proc == IN_TRANSACTION}
        if not self.config.planned or 1 not in runs:
            return None
        if 2 in runs:
            return "drain: a transaction in either epoch"
        return "drain: a transaction beside a new primary" if state.promoted == PROMOTED else None

    def is_good(self, state: State) -> bool:
        """Nothing is under way, everybody knows the epoch, and nothing is left of the one before."""
        image = state.image
        number = number_of(image.epoch)
        ended = image.epoch not in DRAINS and not image.command and state.command in (NO_COMMAND, ENDED)
        workers = all(
            (state.link[w] == 1 and not state.hello[w] and state.views[w] == image.epoch
             and image.keys[w] >= number and state.own[w]) if state.alive[w] else image.keys[w] < 0
            for w in (0, 1))
        return ended and workers and not state.pipe and all(
            self._rests(state, request, number) for request in range(len(self.config.owners)))

    def _rests(self, state: State, request: int, number: int) -> bool:
        if state.image.permits[request] == FREE:
            return state.procs[request] == NO_PROCESS and state.phases[request] in (NONE, DONE, DEAD)
        return state.phases[request] == IDLE and state.under[request] == number

    # ---- the draining command

    def _begins(self, state: State) -> Steps:
        version = state.image.version
        again = self.config.again and state.command == ENDED and not state.lease and version <= 2
        if not (state.command == NO_COMMAND or again) or state.image.epoch != ONE:
            return
        txn = self.store.moves("stop", state.image)
        image = self.store.carried_out(txn, state.image)
        if image is not None:
            stopped = self.wrote(state, image)._replace(command=("drains", version + 1), lease=1)
            yield "the command stops N", stopped, False, None
        unknown = self.sent(state, "stop", -1, txn)
        if unknown is not None:
            asks = unknown._replace(command=("asks", version), lease=1)
            yield "the command stops N=unknown", asks, False, None

    def _command(self, state: State) -> Steps:
        (doing, version), image = state.command, state.image
        stands = image.version == version and image.epoch == DRAINING
        if doing == "asks":
            yield from self._asks(state, version)
        elif doing == "drains":
            left, unknown = self.store.left(image)
            if not stands:
                yield "the command sees an abort", self._over(state), True, None
            elif left - (0 if self.config.waits_for_unknown else unknown) == 0:
                yield "the command sees N drained", state._replace(command=("drained", version)), True, None
        elif doing == "drained":
            yield from self._orders(state, version)
        elif doing in FAR and state.promoted == PROMOTED:
            yield from self._advances(state, version)
        if doing in ("drains", "drained", *FAR) and state.promoted != ORDERED:
            yield from self._gives_up(state, version)
        if doing not in ("", "ended"):
            yield "the command dies", state._replace(command=ENDED), False, None

    def _orders(self, state: State, version: int) -> Steps:
        """The promotion, once it is noted that it is: from then on nobody aborts."""
        noted, txn = self.store.notes(version, state.image)
        if noted or not self.config.confirms:
            yield "the command orders the promotion", state._replace(
                command=("promotes", state.image.version), promoted=ORDERED), True, None
        elif txn is None:
            yield "the command finds N moved", self._over(state), True, None
        else:
            yield from self._sends(state, "note", txn)

    def _asks(self, state: State, version: int) -> Steps:
        image = state.image
        if image.command:
            yield "the command sees N stopped", state._replace(command=("drains", image.version)), True, None
        elif image.version != version:
            yield "the command was too slow", self._over(state), True, None
        yield "the command gives up asking", self._over(state), True, None

    def _advances(self, state: State, version: int) -> Steps:
        """Only while N stands as the command left it."""
        if state.image.epoch == TWO or (state.command[0] == "advances" and state.image.version != version):
            yield "the command is done", self._over(state), True, None
            return
        txn = self.store.moves("advance", self._as_left(state.image, version))
        image = self.store.carried_out(txn, state.image)
        if image is not None:
            yield "the command advances", self._over(self.wrote(state, image)), True, None
        else:
            yield "the command cannot advance", self._over(state), True, None
        unknown = self.sent(state, "advance", -1, txn) if state.command[0] != "advances" else None
        if unknown is not None:
            yield "the command advances=unknown", unknown._replace(command=("advances", version)), False, None

    def _gives_up(self, state: State, version: int) -> Steps:
        """N grants again, unless the target may be a primary: then the leader decides."""
        promoted = self.config.looks_at_target and may_be_promoted(state.promoted == PROMOTED)
        if state.command[0] in FAR and promoted:
            yield "the command gives up", self._over(state), True, None
            return
        txn = self.store.moves("grant again", self._as_left(state.image, version))
        image = self.store.carried_out(txn, state.image)
        yield "the command gives N up", self._over(
            state if image is None else self.wrote(state, image)), True, None
        unknown = self.sent(state, "grant again", -1, txn)
        if unknown is not None:
            yield "the command gives N up=unknown", self._over(unknown), False, None

    def _as_left(self, image: Image, version: int) -> Image:
        """As it was when the command stopped N, or noted that it promotes: what its writes compare."""
        return image._replace(version=version, epoch=PROMOTING if image.epoch == PROMOTING else DRAINING)

    def _over(self, state: State) -> State:
        """It ends, and with it its lease; what was to stop N then finds no lease to be put on."""
        pipe = tuple(each for each in state.pipe if each[0] not in ("stop", "note"))
        return state._replace(command=ENDED, lease=0, pipe=pipe, image=state.image._replace(command=0))

    # ---- everybody else

    def _promotion(self, state: State) -> Steps:
        if state.promoted == ORDERED:
            yield "the target is promoted", state._replace(promoted=PROMOTED), True, None
            yield "the promotion fails", state._replace(promoted=NOT_ORDERED), True, None

    def _others(self, state: State) -> Steps:
        image = state.image
        if state.lease and state.promoted != ORDERED:
            ends = self._over(state)._replace(command=state.command)
            yield "the command's lease ends", ends, state.command == ENDED, None
        drains = image.epoch in DRAINS
        promoted = state.promoted == PROMOTED and self.config.looks_at_target
        unseen = None if self.config.stays_unseen else NEW_IN_RECOVERY
        looks = ("revive", NEW if promoted else NEW_IN_RECOVERY), ("revive without a look", unseen)
        for label, seen in looks if drains else ():
            txn = self.store.ends_abandoned(image, seen)
            if txn is not None:
                yield from self._sends(state, label, txn)
        if drains and self.config.aborts:
            abort = self.store.aborts if self.config.abort_sees_promotion else partial(
                self.store.moves, "grant again")
            txn = abort(image)
            if txn is not None:
                yield from self._sends(state, "abort", txn, heals=False)

    def _sends(self, state: State, name: str, txn: int, *, heals: bool = True) -> Steps:
        image = self.store.carried_out(txn, state.image)
        if image is not None:
            yield name, self.wrote(state, image), heals, None
        unknown = self.sent(state, name, -1, txn)
        if unknown is not None:
            yield f"{name}=unknown", unknown, False, None


