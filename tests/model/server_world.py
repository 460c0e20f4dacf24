"""The simulated servers: processes from their connect to their end, on nodes that restart, hide or vanish."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from random import Random

from coordinator.ledger.proofs import Look, Row
from coordinator.ledger.record import Backend, Permit
from coordinator.looks import LookFailed
from tests.ledger.ground import BACKEND, TAG

IN_FLIGHT_US_MAX = 100_000_000  # how long a connect may be on its way: less than between two looks
BACKENDS = (BACKEND, replace(BACKEND, address="127.0.0.2:5432"))
ALIVE = ("starting", "ready")


@dataclass(eq=False)
class Process:
    """One server process from its connect on. `socket`: its client still holds the other end."""

    permit: Permit
    address: str
    connected_us: int
    pid: int = 0
    start_us: int = 0
    backend: Backend = BACKEND  # the server that forked it
    stage: str = "in flight"  # → starting → ready → gone
    name: str = ""
    socket: bool = True
    terminated: bool = False
    reset: bool = False  # it went without an orderly end


@dataclass(eq=False)
class Node:
    """One address. `hidden`: the looking role lacks its grant; `cut_off`: no look gets there."""

    backend: Backend
    hidden: bool = False
    cut_off: bool = False


class Servers:
    """Forks, starts up (as slowly as it likes) and ends processes, on every node."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._pids = 1_000
        self._connections = 0
        self._clock_us = 0
        self.nodes = {backend.address: Node(backend) for backend in BACKENDS}
        self.processes: list[Process] = []

    def connect(self, permit: Permit, address: str) -> Process:
        process = Process(permit, address, self._clock_us, name=permit.birth_tag(TAG))
        self.processes.append(process)
        return process

    def age(self, now_us: int) -> None:
        """Nothing stays on the wire for ever."""
        self._clock_us = max(now_us, self._clock_us)
        for process in list(self.processes):
            if process.stage == "in flight" and now_us - process.connected_us > IN_FLIGHT_US_MAX:
                self._step(process)

    def act(self) -> None:
        if self.processes:
            self._step(self._random.choice(self.processes))

    def settle(self) -> None:
        """Every process gets as far as it can."""
        for _ in range(3):
            for process in list(self.processes):
                self._step(process)

    def restart(self, address: str, *, orderly: bool = True) -> None:
        """Every process of the node ends; what is on the wire may still arrive. Not where it was off and
        nobody holds the client's end: neither side's kernel has that connection then."""
        for process in [each for each in self.processes if each.address == address]:
            if process.stage == "in flight" and (orderly or process.socket):
                continue
            process.reset = not orderly
            self._end(process)
        node = self.nodes[address]
        node.backend = replace(node.backend, postmaster_start_us=self._tick())

    def terminate(self, address: str, pid: int, start_us: int, meets: Callable[[Process], None]) -> bool:
        """pg_terminate_backend of exactly this process; `meets` hears of it first."""
        for process in self.processes:
            if (process.address, process.pid, process.start_us) == (address, pid, start_us):
                meets(process)
                self._end(process)
                return True
        return False

    def renamed(self, permit: Permit, new: Permit) -> None:
        """Its session stands under another permit; the process knows nothing of that."""
        for each in self.processes:
            if each.permit == permit:
                each.permit = new

    def lives(self, permit: Permit) -> bool:
        return any(each.permit == permit and each.stage in ALIVE for each in self.processes)

    def count(self) -> int:
        return sum(each.stage in ALIVE for each in self.processes)

    def rows(self) -> list[Row]:
        """The truth of all nodes, starters included."""
        return [_row(each) for each in self.processes if each.stage in ALIVE]

    def new_connection(self) -> int:
        self._connections += 1
        return self._connections

    def look(self, address: str, now_us: int, connection: int) -> Look:
        """What a statement shows: starters have no name yet. Raises LookFailed."""
        node = self.nodes[address]
        if node.cut_off:
            raise LookFailed(f"{address}: unreachable")
        here = [each for each in self.processes if each.address == address]
        rows = [_row(each) for each in here if each.stage == "ready"]
        if node.hidden:
            rows = [replace(row, backend_start_us=None, application_name="") for row in rows]
        starters = frozenset(each.pid for each in here if each.stage == "starting")
        return Look(node.backend, may_see_all=not node.hidden, is_node=True, rows=tuple(rows),
                    anonymous=starters, at_us=now_us, connection=connection,
                    authentication_timeout_seconds=60, is_local=True)

    def _step(self, process: Process) -> None:
        if process.stage == "in flight":
            self._arrive(process)
        elif process.stage == "starting":
            if process.socket or self._random.random() < 0.5:
                process.stage = "ready"
            else:
                self._end(process)
        elif process.terminated or not process.socket or self._random.random() < 0.03:
            self._end(process)  # the last: a timeout of the server's, an administrator

    def _arrive(self, process: Process) -> None:
        if self._random.random() < 0.15:
            self._end(process)
            return
        self._pids += 1
        process.pid, process.start_us = self._pids, self._tick()
        process.backend, process.stage = self.nodes[process.address].backend, "starting"

    def _end(self, process: Process) -> None:
        process.stage = "gone"
        self.processes.remove(process)

    def _tick(self) -> int:
        self._clock_us += 1
        return self._clock_us


class Eyes:
    """One coordinator's looks, through one connection to each node until a fresh one is asked for."""

    def __init__(
        self, servers: Servers, now_us: Callable[[], int], meets: Callable[[Process], None],
        meanwhile: Callable[[float], Awaitable[None]],
    ) -> None:
        self._servers = servers
        self._meanwhile = meanwhile
        self._now_us = now_us
        self._meets = meets
        self._connections: dict[str, int] = {}

    async def look(self, address: str, *, fresh: bool = False) -> Look:
        if fresh or address not in self._connections:
            self._connections[address] = self._servers.new_connection()
        seen = self._servers.look(address, self._now_us(), self._connections[address])
        await self._meanwhile(0.2)
        return seen

    async def terminate(self, address: str, pid: int, backend_start_us: int) -> bool:
        for _ in range(6):
            await self._meanwhile(0.5)
        return self._servers.terminate(address, pid, backend_start_us, self._meets)

    async def close(self, *addresses: str) -> None:
        self._connections.clear()


def _row(process: Process) -> Row:
    return Row(process.pid, process.start_us, "app", "app", process.name, "idle", "client backend")
