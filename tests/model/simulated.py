"""The simulated world beside the ledger: a server's processes, and workers that hold sessions."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from coordinator.ledger.ledger import Applied, Granted, Ledger, Voided
from coordinator.ledger.proofs import Look, Row
from coordinator.ledger.record import Permit
from coordinator.ledger.rules import Closing, Code, Connecting, Open, Reassert, Refused, Release, Unknown
from coordinator.ledger.states import Actor, Proof
from coordinator.store.memory import Keyspace
from tests.ledger.ground import BACKEND, TAG, ask, register

IN_FLIGHT_US_MAX = 100_000_000  # how long a connect may be on its way: less than between two looks
WITH_SOCKET = frozenset(("connecting", "ready", "idle", "terminated"))


@dataclass(eq=False)
class Process:
    """One server process from its connect on. `socket`: its client still holds the other end."""

    permit: Permit
    pid: int
    start_us: int
    stage: str = "in flight"  # → starting → ready → gone
    name: str = ""
    socket: bool = True
    terminated: bool = False


class Server:
    """Forks, starts up (as slowly as it likes) and ends processes."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._pids = 1_000
        self._looks = 0
        self._now_us = 0
        self.processes: list[Process] = []

    def connect(self, permit: Permit) -> Process:
        self._pids += 1
        process = Process(permit, self._pids, self._now_us, name=permit.birth_tag(TAG))
        self.processes.append(process)
        return process

    def age(self, now_us: int) -> None:
        """Nothing stays on the wire for ever."""
        self._now_us = now_us
        for process in list(self.processes):
            if process.stage == "in flight" and now_us - process.start_us > IN_FLIGHT_US_MAX:
                self._step(process)

    def act(self) -> None:
        if self.processes:
            self._step(self._random.choice(self.processes))

    def settle(self) -> None:
        """Every process gets as far as it can."""
        for _ in range(3):
            for process in list(self.processes):
                self._step(process)

    def _step(self, process: Process) -> None:
        if process.stage == "in flight":
            process.stage = "gone" if self._random.random() < 0.2 else "starting"
        elif process.stage == "starting":
            process.stage = "ready" if process.socket or self._random.random() < 0.5 else "gone"
        elif process.stage == "ready" and (process.terminated or not process.socket):
            process.stage = "gone"
        elif process.stage == "ready" and self._random.random() < 0.05:
            process.stage = "gone"  # it ends by itself: a timeout of the server's, an administrator
        if process.stage == "gone":
            self.processes.remove(process)

    def lives(self, permit: Permit) -> bool:
        return any(p.permit == permit and p.stage in ("starting", "ready") for p in self.processes)

    def count(self) -> int:
        return sum(process.stage in ("starting", "ready") for process in self.processes)

    def rows(self) -> list[Row]:
        """The truth, starters included."""
        return [Row(p.pid, p.start_us, "app", "app", p.name, "idle", "client backend")
                for p in self.processes if p.stage in ("starting", "ready")]

    def look(self, now_us: int) -> Look:
        """What a statement shows: starters have no name yet."""
        self._looks += 1
        starters = frozenset(p.pid for p in self.processes if p.stage == "starting")
        rows = tuple(row for row in self.rows() if row.pid not in starters)
        return Look(BACKEND, may_see_all=True, is_node=True, rows=rows, anonymous=starters, at_us=now_us,
                    connection=self._looks, authentication_timeout_seconds=60, is_local=True)


@dataclass(eq=False)
class Hold:
    """One permit in a worker's hands."""

    permit: Permit
    stage: str = "have"
    process: Process | None = None


class Owner:
    """A worker: asks, connects, serves, closes; its coordinator's Ledger writes for it."""

    def __init__(self, boot_id: str, host: int, ledger: Ledger, server: Server) -> None:
        self.boot_id = boot_id
        self.host = host
        self.ledger = ledger
        self.lease = 0
        self.registered = True
        self.acting = False
        self.permits_gone = 0
        self._server = server
        self._holds: list[Hold] = []
        self._asked: list[str] = []
        self._requests = 0

    @property
    def busy(self) -> bool:
        return bool(self._holds or self._asked)

    def listed(self) -> list[Permit]:
        """Every permit it has: what it says at hello."""
        return [hold.permit for hold in self._holds]

    def register(self, keyspace: Keyspace) -> None:
        """Puts its key on a new lease; the one before is over."""
        keyspace.expire(self.lease)
        self.lease = register(keyspace, self.boot_id)
        self.registered = True

    def crash(self) -> None:
        """Its sockets close; nothing more is done."""
        for hold in self._holds:
            if hold.process is not None:
                hold.process.socket = False
        self._holds, self._asked = [], []

    async def act(self, random: Random) -> None:
        draw = random.random()
        if draw < 0.2 and len(self._holds) < 4:
            self._requests += 1
            await self._ask(f"{self.boot_id}-{self._requests}")
        elif draw < 0.35 and self._asked:
            await self._ask_again(random.choice(self._asked), gives_up=random.random() < 0.4)
        elif self._holds:
            await self._step(random.choice(self._holds), random)

    async def finish(self) -> None:
        """Gives everything back that it can."""
        for request in list(self._asked):
            await self._ask_again(request, gives_up=True)
        for hold in list(self._holds):
            await self._step(hold, None)

    # ---- requests

    async def _ask(self, request: str) -> None:
        user = "app" if len(request) % 2 else "batch"
        answer = await self.ledger.reserve(ask(request, self.boot_id, user=user, seats=3))
        if isinstance(answer, Granted):
            self._forget(request)
            self._holds.append(Hold(answer.permit))
        elif answer.settled:
            self._forget(request)
        elif request not in self._asked:
            self._asked.append(request)

    async def _ask_again(self, request: str, *, gives_up: bool) -> None:
        if not gives_up:
            await self._ask(request)
        elif isinstance(await self.ledger.void(request, self.boot_id), Voided):
            self._forget(request)

    def _forget(self, request: str) -> None:
        if request in self._asked:
            self._asked.remove(request)

    # ---- sessions

    async def _step(self, hold: Hold, random: Random | None) -> None:
        """One step of one session; without chance it is the step that ends it soonest."""
        chance = random.random() if random is not None else 1.0
        gone = hold.process is not None and hold.process.stage == "gone"
        match hold.stage:
            case "have":
                await self._connect(hold, chance)
            case "connecting":
                self._await_server(hold, chance, gone)
            case "ready":
                await self._open(hold, gone)
            case "idle":
                await self._serve(hold, chance, gone)
            case "terminated":
                if gone:
                    hold.stage = "ended"
                elif chance < 0.1:
                    self._close(hold, "stuck")
            case "ended" | "give":
                proof = Proof.EOF if hold.stage == "ended" else Proof.UNUSED
                await self._until_done(hold, Release(hold.permit, proof, Actor.OWNER), "")
            case "silent" | "stuck" | "gave up":
                abandoned = hold.stage == "silent"
                await self._until_done(hold, Unknown(hold.permit, abandoned), "gave up")

    async def _connect(self, hold: Hold, chance: float) -> None:
        if chance > 0.8:
            hold.stage = "give"
            return
        hold.process = self._server.connect(hold.permit)
        hold.stage = "connecting"
        await self.ledger.apply(Connecting(hold.permit))  # its answer is not waited for

    def _await_server(self, hold: Hold, chance: float, gone: bool) -> None:
        if gone:
            hold.stage = "ended"
        elif hold.process is not None and hold.process.stage == "ready":
            hold.stage = "ready"
        elif chance < 0.2:
            self._close(hold, "silent")

    async def _open(self, hold: Hold, gone: bool) -> None:
        process = hold.process
        assert process is not None
        answer = await self.ledger.apply(Open(hold.permit, process.pid, process.start_us, BACKEND))
        if isinstance(answer, Applied):
            hold.stage = "idle"
        elif answer.code is Code.GONE:
            self._lose(hold)
        elif gone:
            hold.stage = "ended"

    async def _serve(self, hold: Hold, chance: float, gone: bool) -> None:
        process = hold.process
        assert process is not None
        if gone:
            hold.stage = "ended"
        elif chance < 0.35:
            process.name = "client"
        elif chance < 0.55:
            answer = await self.ledger.apply(Reassert(hold.permit))
            if isinstance(answer, Refused) and answer.code is Code.GONE and process.stage != "gone":
                self._lose(hold)
        elif chance < 0.6:
            self._close(hold, "stuck")  # reset: no orderly end was read
        else:
            await self.ledger.apply(Closing(hold.permit))
            process.terminated = True
            hold.stage = "terminated"

    async def _until_done(self, hold: Hold, command: Release | Unknown, stage: str) -> None:
        answer = await self.ledger.apply(command)
        if isinstance(answer, Refused):
            assert answer.code in (Code.GONE, Code.LEDGER_UNAVAILABLE, Code.CHANGED), answer
        if (isinstance(answer, Applied) and not stage) or (
                isinstance(answer, Refused) and answer.code is Code.GONE):
            self._holds.remove(hold)
        elif isinstance(answer, Applied):
            hold.stage = stage

    def _close(self, hold: Hold, stage: str) -> None:
        assert hold.process is not None
        hold.process.socket = False
        hold.stage = stage

    def _lose(self, hold: Hold) -> None:
        """Must never happen: the permit of a live session is gone."""
        self.permits_gone += hold.process is not None and hold.process.stage != "gone"
        if hold.process is not None:
            hold.process.socket = False
        self._holds.remove(hold)
