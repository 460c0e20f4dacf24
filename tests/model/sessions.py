"""All interleavings of the session permit's life: owners, their crashes and pauses, both reapers, a server.

Every write is a transaction of the production code (image.py), every proof one of the production
`proof_of_absence`. A write whose outcome is unknown goes into the pipe, from which it lands at any later
time, or not. The steps are in owners.py, server.py and reapers.py.
"""

from __future__ import annotations

from tests.model.image import FREE, Image, Production
from tests.model.moves import Moves
from tests.model.owners import Owners
from tests.model.reapers import Reapers
from tests.model.server import Server
from tests.model.state import BACKEND, GONE, NONE, NOTHING, STARTING, TERMINAL, UNBORN, Config, State
from tests.model.writes import Steps, Writes


class Sessions:
    """The model: one slot or two, requests 0 and 1 of owners A and B."""

    def __init__(self, config: Config, owners: tuple[int, ...] = (0, 1)) -> None:
        self.config = config
        self.owners = owners
        self.production = Production(owners, config.slots, config.tamper, config.blind, moves=config.moves,
                                     siblings=config.siblings)
        self._writes = Writes(self.production, config)
        self._server = Server()
        self._owners = Owners(self._writes)
        self._reapers = Reapers(self._writes, self._server)
        self._moves = Moves(self._writes)

    def initial(self) -> State:
        each = (0,) * len(self.owners)
        image = Image((FREE,) * self.config.slots, each, (1, 1), (0, 0))
        return State(image, (NONE,) * len(each), each, each, each, each, (1, 1), (0, 0),
                     (NOTHING,) * len(each), (), 0, each if self.config.moves else ())

    def steps(self, state: State) -> Steps:
        for owner in (0, 1):
            yield from self._owners.life(state, owner)
        for request, owner in enumerate(self.owners):
            if state.alive[owner]:
                yield from self._owners.request(state, request, owner)
            yield from self._server.process(state, request, owner)
            if self.config.moves:
                yield from self._moves.relocation(state, request)
        if self.config.restart:
            yield from self._server.restart(state)
        yield from self._reapers.owner_reaper(state)
        for request in range(len(self.owners)):
            yield from self._reapers.backend_reaper(state, request)
        yield from self._writes.late(state)

    def violation(self, state: State) -> str | None:
        running = 0
        for proc, slot in zip(state.procs, self.production.where(state.image.slots), strict=True):
            if proc in (STARTING, BACKEND):
                running += 1
                if slot == FREE:
                    return "I2: a server process without a permit"
        return "I1: more server processes than slots" if running > self.config.slots else None

    def is_good(self, state: State) -> bool:
        """Every permit is free, nothing is on its way, nobody is in the middle of anything."""
        return (not state.pipe and all(value == FREE for value in state.image.slots)
                and all(each == NOTHING for each in state.reap)
                and all(phase in TERMINAL for phase in state.phases)
                and all(proc in (UNBORN, GONE) for proc in state.procs))
