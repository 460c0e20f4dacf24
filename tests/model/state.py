"""What a state of the session model is made of, and what may happen in a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tests.model.image import Blind, Image, Tamper

# what the owner of a request is doing
NONE, ASKED, HAVE, CONNECTING, READY, OPENING, IDLE, TERMINATED, ENDED, SILENT, STUCK, GAVE_UP, GIVE, \
    VOIDING, DONE, DEAD, LOST = (
        "none", "asked", "have", "connecting", "ready", "opening", "idle", "terminated", "ended",
        "silent", "stuck", "gave up", "give", "voiding", "done", "dead", "lost")
WITH_SOCKET = frozenset((CONNECTING, READY, OPENING, IDLE, TERMINATED))
NOT_HOLDING = frozenset((NONE, ASKED, VOIDING, DONE))
TERMINAL = frozenset((NONE, DONE, DEAD, LOST))
# the server process of a request
UNBORN, IN_FLIGHT, STARTING, BACKEND, GONE = range(5)
NOTHING = ("", "")  # the backend reaper has no evidence


class State(NamedTuple):
    """Small values only: states are hashed by the million."""

    image: Image
    phases: tuple[str, ...]  # per request
    procs: tuple[int, ...]  # per request
    births: tuple[int, ...]  # per request: restarts of the server before its process was born
    named: tuple[int, ...]  # per request: 1 once a client's application_name replaced the birth tag
    freed: tuple[int, ...]  # per request: 1 once its permit was released
    alive: tuple[int, ...]  # per owner
    hello: tuple[int, ...]  # per owner: 1 until it has said which permits it has
    reap: tuple[tuple[str, str], ...]  # per request: the backend reaper's evidence (stage, what) or NOTHING
    pipe: tuple[tuple[str, int, int, int], ...]  # writes on their way: what, request, slot, transaction
    restarts: int
    names: tuple[int, ...] = ()  # per request: the slot that its owner knows it in; only where sessions move


@dataclass(frozen=True)
class Config:
    """What may happen, and which safeguards stand (a mutant lacks one)."""

    failing: tuple[bool, bool] = (True, True)  # which owner may crash or lose its lease
    pipe: int = 1
    slots: int = 1
    restart: bool = False
    terminate: bool = False
    tamper: Tamper | None = None
    blind: Blind | None = None
    waits_for_receipt: bool = True
    frees_on_lease_loss: bool = False
    sees_everything: bool = True
    sees_starters: bool = True
    knows_death: bool = True
    restart_frees_unborn: bool = False
    serves_after_open: bool = True
    voids: bool = True
    gives_back_unused: bool = True
    abandons: bool = True
    settles_release: bool = True
    waits_for_eof: bool = True
    says_hello: bool = True
    moves: bool = False
    siblings: bool = False  # both requests are granted together: one generation, each its own slot
    follows: bool = True  # a moved session is found by the permit that it had


T = TypeVar("T")


def put(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])
