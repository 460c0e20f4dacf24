"""The session model with two that look: a leader, and one that was deposed while its look was under way.

Each has evidence of its own, acts on it at any later time, and writes as the other does. Evidence is about a
permit as it stood: once its slot is written again, who has it finds another revision there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.model.explorer import Step
from tests.model.image import FREE
from tests.model.sessions import Sessions
from tests.model.state import IN_FLIGHT, NOTHING, Config, State, put

Evidence = tuple[tuple[str, str], ...]


class Pair(NamedTuple):
    """A state, with the leader's evidence in it, and that of the deposed one."""

    state: State
    other: Evidence


@dataclass(frozen=True)
class Looking:
    """Which safeguards stand."""

    config: Config
    evidence_ends: bool = True  # with the revision of the slot that it was taken on
    waits_between_looks: bool = True  # also where the other had the first


Steps = Iterator[Step[Pair]]


class TwoLooking:
    """The model."""

    def __init__(self, looking: Looking) -> None:
        self._looking = looking
        self._model = Sessions(looking.config)

    def initial(self) -> Pair:
        first = self._model.initial()
        return Pair(first, first.reap)

    def steps(self, pair: Pair) -> Steps:
        state, other = pair
        for label, after, heals, bad in self._model.steps(state):
            yield label, Pair(after, self._left(state, after, other)), heals, bad
        swapped = state._replace(reap=other)
        for request in range(len(state.reap)):
            for label, after, heals, bad in self._model._reapers.backend_reaper(swapped, request):
                mine = self._left(state, after, state.reap)
                yield f"deposed: {label}", Pair(after._replace(reap=mine), after.reap), heals, bad
            yield from self._hasty(pair, request)

    def _hasty(self, pair: Pair, request: int) -> Steps:
        """A mutant takes the leader's first look for its own and does not wait between the two."""
        state, (stage, _) = pair.state, pair.state.reap[request]
        if self._looking.waits_between_looks or stage != "look" or state.procs[request] != IN_FLIGHT:
            return
        proven = put(pair.other, request, ("proven", "never_born"))
        yield f"deposed: a second look at {request} at once", pair._replace(other=proven), True, None

    def _left(self, before: State, after: State, evidence: Evidence) -> Evidence:
        """What is left of somebody's evidence after a step of somebody else."""
        if not self._looking.evidence_ends or before.image.slots == after.image.slots:
            return evidence
        request_of = self._model.production.request_of
        for was, stands in zip(before.image.slots, after.image.slots, strict=True):
            if was != stands and was != FREE and evidence[request_of[was]][0] not in ("", "terminate"):
                evidence = put(evidence, request_of[was], NOTHING)
        return evidence

    def violation(self, pair: Pair) -> str | None:
        return self._model.violation(pair.state)

    def is_good(self, pair: Pair) -> bool:
        return self._model.is_good(pair.state) and all(each == NOTHING for each in pair.other)
