"""A simulated worker: tickets of several tenants on the production pool core, sessions, and its permits.

Its coordinator's Ledger writes for it. What it does is what the real one does, one small step at a time, so
that everybody else may do something between any two of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from random import Random

from coordinator.ledger.ledger import Applied, Granted, Ledger, Voided
from coordinator.ledger.record import Permit
from coordinator.ledger.rules import Closing, Code, Connecting, Open, Reassert, Refused, Release, Unknown
from coordinator.ledger.states import Actor, Proof
from pooler.pool.core import PoolCore
from tests.ledger.ground import ask
from tests.model.judge import Judge
from tests.model.server_world import Process, Servers
from tests.model.tenants import Tenants

SESSIONS_MAX = 3  # of one worker
CONNECTABLE = ("have", "connecting", "ready")
WITH_SOCKET = ("connecting", "ready", "idle", "leaving", "terminated")
Command = Closing | Connecting | Open | Reassert | Release | Unknown


@dataclass(eq=False, slots=True)
class Hold:
    """One permit in a worker's hands; while `idle` it is a session of the pool core."""

    permit: Permit
    epoch: int
    address: str
    stage: str = "have"
    process: Process | None = None
    expires_at: float = float("inf")
    idle_since: float = 0.0
    generation: int = 0
    promised: bool = False

    @property
    def ended(self) -> bool:
        """An orderly end was read."""
        return self.process is not None and self.process.stage == "gone" and not self.process.reset

    @property
    def was_reset(self) -> bool:
        return self.process is not None and self.process.reset


class Worker:
    """One process. `linked`: it said hello to its coordinator.

    `connects_unanswered`, `trusts_reset` and `forgets_early` are what mutants do.
    """

    def __init__(self, boot_id: str, host: int, servers: Servers, judge: Judge) -> None:
        self.boot_id = boot_id
        self.host = host
        self.lease = 0
        self.on_record = False  # its death
        self.linked = True
        self.acting = False
        self.core: PoolCore[Hold] = PoolCore(SESSIONS_MAX, 2)
        self.tenants = Tenants(self.core, judge, self._give_back)
        self.ledger: Ledger
        self.holds: list[Hold] = []
        self.asked: list[str] = []
        self.answered: list[str] = []
        self._servers = servers
        self._judge = judge
        self._requests = 0
        self.connects_unanswered = False
        self.trusts_reset = False
        self.forgets_early = False

    @property
    def busy(self) -> bool:
        return bool(self.holds or self.asked or self.tenants.busy)

    def listed(self) -> list[Permit]:
        """Every permit it has: what it says at hello."""
        return [hold.permit for hold in self.holds]

    def learn(self, epoch: int, *, serving: bool) -> None:
        """What its coordinator tells it of the epoch; by itself that is the acknowledgement."""
        advanced = epoch != self.core.epoch
        self.core.epoch, self.core.serving = epoch, serving
        if advanced:
            self.retire()
        self._leave(self.core.wake(self.tenants.now))

    def retire(self) -> None:
        """Every idle session is to be closed."""
        self._leave(self.core.take_idle(len(self.core.idle)))

    def close_all(self) -> None:
        """Every session is to be closed, whatever it does: its time was over while nobody looked."""
        for hold in self.holds:
            if hold.stage == "idle":
                self._lost(hold, "leaving")

    def give_up(self, permits: Collection[Permit]) -> None:
        """Idle sessions for which there is no slot any more."""
        high = [hold for hold in self.core.idle if hold.permit in permits]
        self._leave([hold for hold in high if self.core.remove(hold)])

    def take(self, old: Permit, new: Permit) -> None:
        """What it is told of a move, where it has recorded the session as open."""
        for hold in self.holds:
            if hold.permit == old and hold.stage == "idle":
                hold.permit = new

    def crash(self) -> None:
        """Its sockets close; nothing more is done."""
        for hold in self.holds:
            if hold.process is not None:
                hold.process.socket = False
        self.tenants.die()
        self.holds, self.asked = [], []

    async def act(self, random: Random) -> None:
        """One step of something."""
        for hold in sorted(self.core.active, key=lambda each: each.permit):
            if random.random() < 0.5:
                self._give_back(hold)
        draw = random.random()
        if draw < 0.4 and self.core.openings_wanted() > 0:
            await self._ask_anew(random)
        elif draw < 0.5 and self.asked:
            await self._ask_again(random.choice(self.asked), random, gives_up=random.random() < 0.4)
        elif draw < 0.55:
            self._leave(self.core.take_idle(1))
        elif draw < 0.6:
            await self._forget()
        for hold in list(self.holds):
            if random.random() < 0.6:
                await self._step(hold, random)

    async def finish(self) -> None:
        """Serves who waits, then gives everything back that it can."""
        for request in list(self.asked):
            await self._ask_again(request, None, gives_up=True)
        for hold in sorted(self.core.active, key=lambda each: each.permit):
            self._give_back(hold)
        if not self.tenants.waiting:
            self.retire()
        elif self.core.openings_wanted() > 0 and not self.asked:
            await self._ask_anew(None)
        for hold in list(self.holds):
            await self._step(hold, None)

    async def _say(self, command: Command) -> Applied | Refused:
        """What a coordinator does with a worker's word."""
        answer, _ = await self.ledger.apply_for(self.boot_id, command)
        return answer

    # ---- requests

    async def _ask_anew(self, random: Random | None) -> None:
        self.core.opening += 1
        self._requests += 1
        self.asked.append(f"{self.boot_id}-{self._requests}")
        await self._ask(self.asked[-1], random)

    async def _ask(self, request: str, random: Random | None) -> None:
        wish = ask(request, self.boot_id, user="app" if len(request) % 2 else "batch", seats=3)
        answer = await self.ledger.reserve(wish)
        if isinstance(answer, Granted):
            self._hold(request, answer)
            if random is not None and random.random() < 0.1:
                await self._repeat(request, answer)
        elif answer.settled:
            self._over(request)
        elif self.connects_unanswered:
            self._servers.connect(Permit(wish.kind, 0, 1), next(iter(self._servers.nodes)))

    def _hold(self, request: str, answer: Granted) -> None:
        self.asked.remove(request)
        self.answered.append(request)
        self.holds.append(Hold(answer.permit, answer.epoch, answer.address))

    async def _repeat(self, request: str, answer: Granted) -> None:
        """The same request once more, as after a link that broke: it is the same permit."""
        self._judge.figures["fault: request repeated"] += 1
        wish = ask(request, self.boot_id, user="app" if len(request) % 2 else "batch", seats=3)
        again = await self.ledger.reserve(wish)
        if isinstance(again, Granted) and again.permit != answer.permit:
            raise self._judge.broken(f"{request} got {answer.permit}, then {again.permit}")

    async def _ask_again(self, request: str, random: Random | None, *, gives_up: bool) -> None:
        if not gives_up:
            await self._ask(request, random)
        elif isinstance(await self.ledger.void(request, self.boot_id), Voided):
            self._over(request)

    def _over(self, request: str) -> None:
        """Answered without a permit."""
        self.core.open_failed()
        self.answered.append(request)
        self.asked.remove(request)

    async def _forget(self) -> None:
        """Receipts of answered requests are deleted while nothing is outstanding."""
        waits = bool(self.asked) and not self.forgets_early
        if self.answered and not waits and await self.ledger.forget(self.boot_id, self.answered):
            self.answered.clear()
            self._judge.figures["receipts forgotten"] += 1

    # ---- transactions

    def _give_back(self, hold: Hold) -> None:
        self.tenants.released(hold)
        if not self.core.give(hold, self.tenants.now):
            self._leave([hold])

    def _leave(self, holds: list[Hold]) -> None:
        """Out of the core, to be closed."""
        for hold in holds:
            hold.stage = "leaving"
            self.core.closing += 1

    def _lost(self, hold: Hold, stage: str) -> None:
        """A session ended, or is given up, whatever it was doing."""
        if self.core.remove(hold):
            self.tenants.released(hold)
            self.core.closing += 1
        elif hold.stage in CONNECTABLE:
            self.core.open_failed()
            self.core.closing += 1
        hold.stage = stage

    # ---- sessions

    async def _step(self, hold: Hold, random: Random | None) -> None:
        """One step of one session; without chance it is the step that ends it soonest."""
        chance = random.random() if random is not None else 1.0
        if hold.was_reset and hold.stage in WITH_SOCKET:
            self._judge.figures["fault: session reset"] += 1
            given_up = "silent" if hold.stage in CONNECTABLE else "stuck"  # no process of it may be on record
            self._cut(hold, "ended" if self.trusts_reset else given_up)
            return
        match hold.stage:
            case "have":
                await self._connect(hold, 0.0 if random is None and self.tenants.waiting else chance)
            case "connecting":
                self._await_server(hold, chance)
            case "ready":
                await self._open(hold)
            case "idle":
                await self._serve(hold, chance)
            case "leaving":
                await self._close(hold)
            case "terminated":
                if hold.ended:
                    hold.stage = "ended"
                elif chance < 0.1:
                    self._cut(hold, "stuck")
            case "ended" | "give":
                proof = Proof.EOF if hold.stage == "ended" else Proof.UNUSED
                await self._until_done(hold, Release(hold.permit, proof, Actor.OWNER), "", chance)
            case "silent" | "stuck" | "gave up":
                abandoned = hold.stage == "silent"
                await self._until_done(hold, Unknown(hold.permit, abandoned), "gave up", chance)

    async def _connect(self, hold: Hold, chance: float) -> None:
        if chance > 0.85:
            self._lost(hold, "give")
            return
        hold.process = self._servers.connect(hold.permit, hold.address)
        hold.stage = "connecting"
        if chance < 0.7:
            await self._say(Connecting(hold.permit))  # its answer is not waited for

    def _await_server(self, hold: Hold, chance: float) -> None:
        if hold.ended:
            self._lost(hold, "ended")
        elif hold.process is not None and hold.process.stage == "ready":
            hold.stage = "ready"
        elif chance < 0.2:
            self._judge.figures["fault: connect silent"] += 1
            self._cut(hold, "silent")

    async def _open(self, hold: Hold) -> None:
        process = hold.process
        assert process is not None
        answer = await self._say(
            Open(hold.permit, process.pid, process.start_us, process.backend))
        if isinstance(answer, Applied):
            hold.stage = "idle"
            if not self.core.opened(hold, self.tenants.now):
                self._leave([hold])
        elif answer.code is Code.GONE:
            self._missing(hold)
        elif answer.code is Code.TERMINATING:
            self._cut(hold, "stuck")
        elif hold.ended:
            self._lost(hold, "ended")

    async def _serve(self, hold: Hold, chance: float) -> None:
        process = hold.process
        assert process is not None
        if hold.ended:
            self._lost(hold, "ended")
        elif chance < 0.4:
            process.name = "client"
        elif chance < 0.44:
            self._judge.figures["fault: session reset"] += 1
            self._cut(hold, "ended" if self.trusts_reset else "stuck")  # no orderly end was read
        elif chance < 0.47:
            self._lost(hold, "leaving")  # its time is over, whatever it does
            await self._close(hold)
        else:
            answer = await self._say(Reassert(hold.permit))
            if isinstance(answer, Refused) and answer.code is Code.GONE and hold in self.holds:
                self._missing(hold)
            elif isinstance(answer, Refused) and answer.code is Code.TERMINATING:
                self._cut(hold, "stuck")

    async def _close(self, hold: Hold) -> None:
        assert hold.process is not None
        await self._say(Closing(hold.permit))
        hold.process.terminated = True
        hold.stage = "terminated"

    async def _until_done(self, hold: Hold, command: Release | Unknown, stage: str, chance: float) -> None:
        answer = await self._say(command)
        if isinstance(answer, Refused) and answer.code not in (
                Code.GONE, Code.LEDGER_UNAVAILABLE, Code.CHANGED):
            raise self._judge.broken(f"{command} was refused: {answer}")
        if isinstance(answer, Applied) and stage:
            hold.stage = stage
        elif isinstance(answer, Applied) or answer.code is Code.GONE:
            self.holds.remove(hold)
            self.core.closing -= 1
            if chance < 0.2 and not stage:
                self._judge.figures["fault: command repeated"] += 1
                await self._say(command)

    def _cut(self, hold: Hold, stage: str) -> None:
        """Its socket is closed without an orderly end."""
        assert hold.process is not None
        hold.process.socket = False
        self._lost(hold, stage)

    def _missing(self, hold: Hold) -> None:
        """Must never be: the permit of a live session is gone."""
        if not hold.ended:
            raise self._judge.broken(f"{hold.permit} is gone while its session lives")
        self._lost(hold, "ended")
