"""A small explicit-state checker: all interleavings breadth first, shortest traces, and whether all heals.

A step is (label, next state, heals, violation). `heals` marks what still happens once failures stop: from
every state a good one must be reachable over such steps alone.
"""

from __future__ import annotations

import gc
import sys
from array import array
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)
Step = tuple[str, S, bool, str | None]


class Model(Protocol[S]):
    """What is explored."""

    def initial(self) -> S: ...

    def steps(self, state: S) -> Iterable[Step[S]]: ...

    def violation(self, state: S) -> str | None: ...

    def is_good(self, state: S) -> bool: ...


@dataclass
class Explored(Generic[S]):
    """What exploring found. `violation` and `leak` come with the shortest trace."""

    states: int = 0
    transitions: int = 0
    complete: bool = True
    violation: str | None = None
    leaks: int = 0
    trace: list[str] = field(default_factory=list)
    example: S | None = None

    @property
    def sound(self) -> bool:
        return self.complete and self.violation is None and self.leaks == 0

    def __str__(self) -> str:
        end = self.violation or (f"{self.leaks} states never heal" if self.leaks else "sound")
        trace = f" [{len(self.trace)} steps: {'; '.join(self.trace)}]" if self.trace else ""
        partly = "" if self.complete else " (not complete)"
        return f"{self.states:,} states, {self.transitions:,} transitions{partly}: {end}{trace}"


class Explorer(Generic[S]):
    """Explores one model; stops at the first violation."""

    def __init__(self, model: Model[S], states_max: int = 10_000_000) -> None:
        self._model = model
        self._states_max = states_max
        first = model.initial()
        self._index: dict[S, int] = {first: 0}
        self._states: list[S] = [first]
        self._parent = array("i", [-1])
        self._label = [""]
        self._heal_from = array("q", [0])  # where each state's healing steps begin in _heal_to
        self._heal_to = array("i")
        self._found: Explored[S] = Explored()

    def run(self, *, healing: bool = True) -> Explored[S]:
        """Everything reachable; then, without a violation, which states never heal."""
        gc.disable()  # millions of tuples, no cycles
        try:
            at = 0
            while at < len(self._states) and self._found.violation is None:
                self._expand(at)
                at += 1
            self._found.states = len(self._states)
            if healing and self._found.violation is None and self._found.complete:
                self._find_leaks()
        finally:
            gc.enable()
        return self._found

    def _expand(self, at: int) -> None:
        for label, state, heals, bad in self._model.steps(self._states[at]):
            self._found.transitions += 1
            if bad is not None:
                self._violated(bad, [*self._trace(at), label], state)
                return
            to = self._index.get(state)
            if to is None:
                if len(self._states) >= self._states_max:
                    self._found.complete = False
                    continue
                to = self._add(state, at, label)
                broken = self._model.violation(state)
                if broken is not None:
                    self._violated(broken, self._trace(to), state)
                    return
            if heals:
                self._heal_to.append(to)
        self._heal_from.append(len(self._heal_to))

    def _add(self, state: S, parent: int, label: str) -> int:
        to = self._index[state] = len(self._states)
        self._states.append(state)
        self._parent.append(parent)
        self._label.append(sys.intern(label))
        return to

    def _violated(self, what: str, trace: list[str], state: S) -> None:
        self._found.violation, self._found.trace, self._found.example = what, trace, state

    def _trace(self, at: int) -> list[str]:
        labels = []
        while at > 0:
            labels.append(self._label[at])
            at = self._parent[at]
        return labels[::-1]

    def _find_leaks(self) -> None:
        count = len(self._states)
        healed = bytearray(self._model.is_good(state) for state in self._states)
        changed = True
        while changed:
            changed = False
            for at in range(count - 1, -1, -1):
                if not healed[at] and any(
                    healed[self._heal_to[step]]
                    for step in range(self._heal_from[at], self._heal_from[at + 1])
                ):
                    healed[at] = changed = True
        leaked = [at for at in range(count) if not healed[at]]
        self._found.leaks = len(leaked)
        if leaked:
            self._found.trace = self._trace(leaked[0])
            self._found.example = self._states[leaked[0]]
