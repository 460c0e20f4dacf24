"""The gate before new sessions: how many connects are under way at once, of one pool and at one server.

Each worker asks its own coordinator before it connects, and says when it has. Each coordinator lets in its
host's share of what the whole fleet may. Nothing of it is in etcd: a connect takes no write, and who is let
in by mistake (hosts that do not know of each other yet) still needs a permit. `CreateGate` is pure.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import trio

from coordinator.ledger.homes import Home
from coordinator.link import Args, Handler
from coordinator.registry import Local
from coordinator.view import View

LINE_MAX = 65_536  # of all workers of a host; who finds it full is told that the gate is busy
HOLD_SECONDS_MAX = 600.0
GIVEN_UP_MAX = 1024


@dataclass(frozen=True, slots=True)
class CreateAsk:
    """One connect that a worker wants to make. `hold_seconds`: by then it is over, however it went."""

    boot_id: str
    request_id: str
    server: str
    pool: tuple[str, str, str]
    pool_max: int
    server_max: int
    hold_seconds: float

    @property
    def key(self) -> tuple[str, str]:
        """Whose and which."""
        return self.boot_id, self.request_id


def share_of(limit: int, home: Home) -> int:
    """What this host may of a limit of the fleet: together they have it, and each has one at least."""
    return max(1, limit // home.hosts + (home.rank < limit % home.hosts))


class CreateGate:
    """Who is in, and who stands in line: first come, first served among those whose pool and server let
    another in, so that a pool whose server hangs holds up no other."""

    def __init__(self) -> None:
        self.home = Home()
        self._line: OrderedDict[tuple[str, str], CreateAsk] = OrderedDict()
        self._in: dict[tuple[str, str], tuple[CreateAsk, float]] = {}
        self._inside: Counter[object] = Counter()  # by server, and by server and pool

    @property
    def waiting(self) -> int:
        """How many stand in line."""
        return len(self._line)

    @property
    def inside(self) -> int:
        """How many are in."""
        return len(self._in)

    def ask(self, ask: CreateAsk) -> bool:
        """Stand in line, once. False: it is too long."""
        if ask.key in self._in:
            return True
        if len(self._line) >= LINE_MAX:
            return False
        self._line.setdefault(ask.key, ask)
        return True

    def end(self, key: tuple[str, str]) -> None:
        """It is over, or not wanted any more."""
        self._line.pop(key, None)
        ask, _ = self._in.pop(key, (None, 0.0))
        if ask is not None:
            self._inside.subtract((ask.server, (ask.server, ask.pool)))
            self._inside += Counter()  # without those at 0

    def has(self, key: tuple[str, str]) -> bool:
        """Whether it is in."""
        return key in self._in

    def let_in(self, now: float) -> list[CreateAsk]:
        """Who is in from now on. What is in for longer than it can last is taken for over: its worker is
        gone, or stands still."""
        for key in [key for key, (_, until) in self._in.items() if until <= now]:
            self.end(key)
        let_in: list[CreateAsk] = []
        for ask in tuple(self._line.values()):
            if self._has_room(ask):
                del self._line[ask.key]
                self._in[ask.key] = (ask, now + ask.hold_seconds)
                self._inside.update((ask.server, (ask.server, ask.pool)))
                let_in.append(ask)
        return let_in

    def _has_room(self, ask: CreateAsk) -> bool:
        inside = self._inside
        return inside[ask.server] < share_of(ask.server_max, self.home) and (
            inside[ask.server, ask.pool] < share_of(ask.pool_max, self.home))

    def next_end(self) -> float:
        """When the next that is in is taken for over."""
        return min((until for _, until in self._in.values()), default=float("inf"))


class Creating:
    """The gate of one host's coordinator, with those who wait at it."""

    def __init__(self, views: Callable[[], Mapping[str, View]]) -> None:
        self.gate = CreateGate()
        self._views = views
        self._let_in: dict[tuple[str, str], trio.Event] = {}
        self._given_up: OrderedDict[tuple[str, str], None] = OrderedDict()

    def settle_at(self, home: Home) -> None:
        """The place of this host among all."""
        if home != self.gate.home:
            self.gate.home = home
            self._stir()

    async def enter(self, local: Local, args: Args) -> tuple[bool, bool]:
        """Whether it is let in within `wait_seconds`, and whether it had to wait. It is in until `leave`, or
        for `hold_seconds`."""
        ask, waited = self._ask_of(local, args), False
        if self._given_up.pop(ask.key, self) is None:
            return False, False
        came = self._let_in[ask.key] = trio.Event()
        try:
            if not self.gate.ask(ask):
                return False, False
            deadline = trio.current_time() + float(args["wait_seconds"])
            self._stir()
            while not self.gate.has(ask.key) and trio.current_time() < deadline:
                waited = True
                with trio.move_on_at(min(deadline, self.gate.next_end())):
                    await came.wait()
                self._stir()
            return self.gate.has(ask.key), waited
        finally:
            if self._let_in.get(ask.key) is came:  # else it was asked again, over another link
                del self._let_in[ask.key]
                if not self.gate.has(ask.key):
                    self.gate.end(ask.key)

    def leave(self, local: Local, request_id: str) -> None:
        """Its connect is over, or it does not want to wait any more. That may be heard before it was heard
        that it asked: what came over a link together is dealt with in any order."""
        key = (local.boot_id, request_id)
        if not self.gate.has(key) and key not in self._let_in:
            self._given_up[key] = None
            if len(self._given_up) > GIVEN_UP_MAX:
                self._given_up.popitem(last=False)
        self.gate.end(key)
        self._stir()

    def _stir(self) -> None:
        for ask in self.gate.let_in(trio.current_time()):
            came = self._let_in.get(ask.key)
            if came is not None:
                came.set()

    def _ask_of(self, local: Local, args: Args) -> CreateAsk:
        db = str(args["db"])
        view = self._views().get(db)
        address = view.epoch.backend.address if view is not None and view.epoch is not None else ""
        return CreateAsk(
            local.boot_id, str(args["request_id"]), address or db, (db, str(args["pool"]), str(args["user"])),
            max(1, int(args["pool_max"])), max(1, int(args["server_max"])),
            min(HOLD_SECONDS_MAX, float(args["hold_seconds"])))


class WorkerCreates:
    """The operations of one link. `worker` raises LinkRefused before hello."""

    def __init__(self, creating: Creating, worker: Callable[[], Local]) -> None:
        self._creating = creating
        self._worker = worker

    def operations(self) -> tuple[Handler, ...]:
        """By the names of their methods."""
        return self.create, self.created

    async def create(self, args: Args) -> Args:
        """Asks to be let in."""
        is_in, waited = await self._creating.enter(self._worker(), args)
        return {"in": is_in, "waited": waited}

    async def created(self, args: Args) -> Args:
        """Its connect is over."""
        self._creating.leave(self._worker(), str(args["request_id"]))
        return {}
