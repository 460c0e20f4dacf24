"""What a state of the epoch model is made of, and what may happen in a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.model.epoch_store import GONE, EpochStore, Image, Tamper
from tests.model.explorer import Step
from tests.model.state import put

# what the owner of a request is doing; CHECKED: it found that it may grant, and was paused
NONE, ASKED, HAVE, IDLE, CHECKED, BUSY, DONE, DEAD = (
    "none", "asked", "have", "idle", "checked", "busy", "done", "dead")
NO_PROCESS, WAITS, IN_TRANSACTION = range(3)  # the server process of a request
SAID_NOTHING, ANSWERED = 0, 3  # hello; 1 and 2: it is on its way and says which epoch the worker serves
SETTLED, UNSETTLED = 1, 2  # a link; it was greeted while etcd was away
NOT_TOLD, TELLS, TOLD = range(3)  # the acknowledgement of N+1
NOT_ORDERED, ORDERED, PROMOTED = range(3)  # the target of the drain
NO_COMMAND, ENDED = ("", 0), ("ended", 0)


class State(NamedTuple):
    """Small values only: states are hashed by the million."""

    image: Image
    alive: tuple[int, ...]  # per worker, and so on
    link: tuple[int, ...]
    views: tuple[int, ...]  # what its pools go by: ONE, DRAINING, TWO
    hosts: tuple[int, ...]  # what its coordinator read last
    hello: tuple[int, ...]
    acks: tuple[int, ...]
    own: tuple[int, ...]  # its lease lasts by its own clock
    cut: tuple[int, ...]  # its lease ended in the store, and it has not been greeted since
    phases: tuple[str, ...]  # per request
    procs: tuple[int, ...]
    under: tuple[int, ...]  # the epoch of its permit
    command: tuple[str, int]  # the draining command: what it does, and the epoch's version that it goes by
    lease: int  # of the command: 1 while it lasts
    promoted: int
    completed: int  # 1 once a command could say that the advance is complete
    pipe: tuple[tuple[str, int, int], ...]  # writes on their way: what, whose, transaction


@dataclass(frozen=True)
class Config:
    """What may happen, and which safeguards stand (a mutant lacks one). `planned`: by a drain."""

    planned: bool = True
    stop: bool = False  # on_ledger_loss
    owners: tuple[int, ...] = (0, 1)
    failing: tuple[bool, bool] = (True, False)
    cut_off: bool = True  # who fails loses its link and its lease too, and is paused
    aborts: bool = True
    again: bool = False  # a second command may begin where the first one ended
    tamper: Tamper | None = field(default=None, compare=False)
    hears_before_it_acknowledges: bool = True
    acknowledges_what_it_serves: bool = True
    remembers_acknowledgements: bool = True
    reads_at_hello: bool = True
    own_clock_first: bool = True
    grants_as_it_checks: bool = True
    waits_for_unknown: bool = True
    confirms: bool = True
    looks_at_target: bool = True
    abort_sees_promotion: bool = True
    stays_unseen: bool = True  # who reopens an old epoch whose target was ordered to be promoted looks at it


Steps = Iterator[Step[State]]


class Base:
    """Changes of a state that both halves of the model make."""

    def __init__(self, store: EpochStore, config: Config) -> None:
        self.store = store
        self.config = config

    def wrote(self, state: State, image: Image, put_again: int = -1) -> State:
        """The store is now this; what has lost for good is on its way no more."""
        pipe = tuple(each for each in state.pipe if not self.store.is_over(each[2], image, put_again))
        return state._replace(image=image, pipe=pipe)

    def sent(self, state: State, name: str, who: int, txn: int) -> State | None:
        """A write is on its way and nobody knows more; one of them at a time."""
        return None if state.pipe else state._replace(pipe=((name, who, txn),))

    def late(self, state: State) -> Steps:
        """What is on its way lands, or is lost."""
        for at, (name, who, txn) in enumerate(state.pipe):
            rest = state._replace(pipe=(*state.pipe[:at], *state.pipe[at + 1:]))
            image = self.store.carried_out(txn, state.image)
            if image is not None:
                yield f"late {name} {who} lands", self.wrote(rest, image), True, None
            yield f"late {name} {who} is lost", rest, True, None

    def is_cut_off(self, worker: int) -> bool:
        """Whether that may happen to it."""
        return self.config.failing[worker] and self.config.cut_off

    def is_registered(self, state: State, worker: int) -> bool:
        return state.image.keys[worker] != GONE


def put_all(state: State, at: int, **values: int) -> State:
    """One worker's values of several fields."""
    changed: dict[str, Any] = {name: put(getattr(state, name), at, value) for name, value in values.items()}
    return state._replace(**changed)
