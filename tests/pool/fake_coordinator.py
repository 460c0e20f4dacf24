"""A coordinator and its ledger in this process, for tests of the worker's end of the link.

It keeps the ledger's promises (receipts, voids, unlisted slots freed as unused) and checks the worker's:
every release must be true at the server, every move a row of the ledger's own table. Faults are scripted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import trio
from trio.testing import memory_stream_pair

from coordinator.creating import Creating
from coordinator.ledger.record import Kind, Permit
from coordinator.ledger.states import Actor, Proof, SessionState, find_move
from coordinator.link import Args, Link, LinkRefused
from coordinator.registry import Introduction, Local

DB = "orders-primary/write"
TTL_SECONDS = 5.0

Op = Callable[[Args], Any]


@dataclass
class Slot:
    """One held slot."""

    permit: Permit
    state: SessionState
    request_id: str
    pid: int = 0
    abandoned: bool = False
    terminating: bool = False


@dataclass
class FakeLedger:
    """The truth. `is_alive(tag)`: does the server have a session of that birth tag?"""

    address: str
    is_alive: Callable[[str], bool] = lambda tag: False
    slots_max: int = 4
    slots: dict[int, Slot] = field(default_factory=dict)
    receipts: dict[str, Permit | None] = field(default_factory=dict)
    releases: list[tuple[Permit, Proof]] = field(default_factory=list)
    generation: int = 100

    def tag(self, permit: Permit) -> str:
        return permit.birth_tag("abcdefgh")

    def find(self, raw: list[Any]) -> Slot:
        kind, number, generation = raw
        slot = self.slots.get(number)
        if slot is None or slot.permit != Permit(Kind(kind), number, generation):
            raise LinkRefused("gone", "")
        return slot

    def move(self, slot: Slot, state: SessionState, actor: Actor = Actor.OWNER) -> None:
        if slot.state is not state:
            find_move(slot.state, state, actor)
            slot.state = state

    def free(self, slot: Slot, proof: Proof) -> None:
        assert not self.is_alive(self.tag(slot.permit)), f"{slot.permit} freed ({proof}) under a live session"
        find_move(slot.state, SessionState.RELEASED, Actor.OWNER, proof)
        del self.slots[slot.permit.slot]
        self.releases.append((slot.permit, proof))

    # -- the operations

    def reserve(self, args: Args) -> Any:
        request_id = args["request_id"]
        if request_id in self.receipts:
            permit = self.receipts[request_id]
            if permit is None:
                raise LinkRefused("voided", "")
            return self._answer(permit)
        number = next((n for n in range(self.slots_max) if n not in self.slots), None)
        if number is None:
            raise LinkRefused("full", "all are in use")
        self.generation += 1
        permit = Permit(Kind(args["kind"]), number, self.generation)
        self.slots[number] = Slot(permit, SessionState.RESERVED, request_id)
        self.receipts[request_id] = permit
        return self._answer(permit)

    def _answer(self, permit: Permit) -> Args:
        return {"permit": [str(permit.kind), permit.slot, permit.generation], "epoch": 7,
                "address": self.address, "tag": "abcdefgh"}

    def void(self, args: Args) -> Any:
        permit = self.receipts.setdefault(args["request_id"], None)
        slot = self.slots.get(permit.slot) if permit else None
        if slot is not None and slot.permit == permit:
            self.free(slot, Proof.UNUSED)
        return {}

    def connecting(self, args: Args) -> Any:
        slot = self.slots.get(args["permit"][1])
        if slot is not None and slot.state is SessionState.RESERVED:
            self.move(slot, SessionState.CONNECTING)

    def open(self, args: Args) -> Any:
        slot = self.find(args["permit"])
        if slot.terminating or slot.abandoned:
            raise LinkRefused("terminating" if slot.terminating else "abandoned", "")
        self.move(slot, SessionState.OPEN)
        slot.pid = args["pid"]
        return {}

    def closing(self, args: Args) -> Any:
        self.move(self.find(args["permit"]), SessionState.CLOSING)
        return {}

    def release(self, args: Args) -> Any:
        try:
            slot = self.find(args["permit"])
        except LinkRefused:
            return {"released": False}
        self.free(slot, Proof(args["proof"]))
        return {"released": True}

    def unknown(self, args: Args) -> Any:
        slot = self.find(args["permit"])
        self.move(slot, SessionState.UNKNOWN)
        slot.abandoned |= args["abandoned"]
        return {}

    def reassert(self, args: Args) -> Any:
        slot = self.find(args["permit"])
        if slot.terminating:
            raise LinkRefused("terminating", "")
        self.move(slot, SessionState.CLOSING if args["closing"] else SessionState.OPEN)
        return {}

    def greet(self, args: Args) -> tuple[list[Any], list[Any]]:
        """What `hello` finds unknown and gone; frees what the worker does not list."""
        listed = {tuple(each["permit"]): SessionState(each["state"]) for each in args["permits"]}
        for slot in list(self.slots.values()):
            key = (str(slot.permit.kind), slot.permit.slot, slot.permit.generation)
            if key not in listed and slot.request_id not in args["requests"]:
                self.free(slot, Proof.UNUSED)
        held = {(str(s.permit.kind), s.permit.slot, s.permit.generation): s for s in self.slots.values()}
        unknown = [[DB, list(key)] for key in listed
                   if key in held and held[key].state is SessionState.UNKNOWN]
        gone = [[DB, list(key)] for key in listed if key not in held]
        return unknown, gone


class FakeCoordinator:
    """Serves one worker. `fault(op, nth)` may answer "before" or "after": the link breaks at the nth
    operation, with the operation carried out or not; or "late": it breaks, and the operation takes effect
    after the next hello.
    """

    def __init__(self, ledger: FakeLedger, nursery: trio.Nursery) -> None:
        self.ledger = ledger
        self.down = False
        self.alive = True
        self.fault: Callable[[str, int], str | None] = lambda op, nth: None
        self.heard: list[str] = []
        self.hellos: list[Args] = []
        self.beats: list[Args] = []
        self.links: list[Link] = []
        self.state = "ACTIVE"
        self.backend: Args | None = None  # of its epoch
        self.registers = True  # False: etcd is away
        self.hello_gate: trio.Event | None = None  # holds an answer to hello back after the ledger was read
        self.moved: list[tuple[Permit, Permit]] = []  # what hello says of permits that it lists
        self.deaf: set[str] = set()  # operations that are never answered
        self.answers: dict[str, Any] = {}  # scripted answers (a LinkRefused is raised), else the ledger's
        self.creating = Creating(dict)
        self.no_gate: LinkRefused | None = None
        self.local = Local(Introduction("boot-1", 0, 1, 1, "", (1,)))
        self._nursery = nursery
        self._late: list[Callable[[], None]] = []

    async def connect(self) -> trio.abc.Stream:
        """For Permits. Raises OSError while down."""
        await trio.lowlevel.checkpoint()
        if self.down:
            raise ConnectionRefusedError
        theirs, ours = memory_stream_pair()
        handlers = {op: self._handler(op) for op in (
            "heartbeat", "reserve", "void", "connecting", "open", "closing", "release", "unknown", "reassert",
            "epoch_ack", "backend_hint", "cancel", "fleet", "ledger_rows", "created")}
        handlers["create"] = self._create
        link = Link(ours, {**handlers, "hello": self._hello})
        self.links.append(link)
        self._nursery.start_soon(self._run, link, ours)
        return theirs

    async def _run(self, link: Link, stream: trio.abc.Stream) -> None:
        self._break_event = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, nursery.cancel_scope, self._break_event, stream)
            await link.run()
            nursery.cancel_scope.cancel()

    async def _watch(self, life: trio.CancelScope, broken: trio.Event, stream: trio.abc.Stream) -> None:
        await broken.wait()
        await trio.aclose_forcefully(stream)
        life.cancel()

    def cut(self) -> None:
        """Break the link of now."""
        self._break_event.set()

    def ledger_map(self) -> Args:
        """The `ledger` of the link."""
        return {"db": DB, "tag": "abcdefgh", "state": self.state, "reachable": True,
                "epoch": {"number": 7, "state": "ACTIVE", "address": self.ledger.address,
                          "backend": self.backend, "drain_timeout_seconds": 0.0},
                "policy": {"generation": 1, "serverSessionPermits": self.ledger.slots_max}}

    async def _hello(self, args: Args) -> Any:
        self.hellos.append(args)
        await self._maybe_break("hello", lambda: None)
        names = {tuple(_plain(old)): _plain(new) for old, new in self.moved}
        listed = [{**each, "permit": names.get(tuple(each["permit"]), each["permit"])}
                  for each in args["permits"]]
        unknown, gone = self.ledger.greet({**args, "permits": listed})
        late, self._late = self._late, []
        for each in late:
            each()
        await self._maybe_break_after("hello")
        if self.hello_gate is not None:
            await self.hello_gate.wait()
        return {"ordinal": 3, "registered": self.registers, "lease_ttl_seconds": TTL_SECONDS,
                "ledgers": {DB: self.ledger_map()}, "unknown": unknown, "gone": gone,
                "moved": [[DB, _plain(old), _plain(new)] for old, new in self.moved]}

    def _handler(self, op: str) -> Callable[[Args], Awaitable[Any]]:
        async def serve(args: Args) -> Any:
            if op in self.deaf:
                await trio.sleep_forever()
            await self._maybe_break(op, lambda: self._apply(op, args))
            answer = self._apply(op, args)
            await self._maybe_break_after(op)
            return answer

        return serve

    async def _create(self, args: Args) -> Any:
        """As the real one, which waits until there is a place."""
        if self.no_gate is not None:
            raise self.no_gate
        await self._maybe_break("create", lambda: None)
        is_in, waited = await self.creating.enter(self.local, args)
        await self._maybe_break_after("create")
        return {"in": is_in, "waited": waited}

    def _apply(self, op: str, args: Args) -> Any:
        if op == "created":
            self.creating.leave(self.local, args["request_id"])
        if op in self.answers:
            if isinstance(self.answers[op], LinkRefused):
                raise self.answers[op]
            return self.answers[op]
        if op == "heartbeat":
            self.beats.append(args)
            return {"alive": self.alive}
        if op == "ledger_rows":
            return {"rows": []}
        carry_out: Op | None = getattr(self.ledger, op, None)
        return {} if carry_out is None else carry_out(args)

    async def _maybe_break(self, op: str, carry_out: Callable[[], Any]) -> None:
        self.heard.append(op)
        self._verdict = self.fault(op, len(self.heard))
        if self._verdict == "late":
            self._late.append(lambda: _quietly(carry_out))
        if self._verdict in {"before", "late"}:
            self.cut()
            await trio.sleep_forever()

    async def _maybe_break_after(self, op: str) -> None:
        if self._verdict == "after":
            self._verdict = None
            self.cut()
            await trio.sleep_forever()


def _plain(permit: Permit) -> list[Any]:
    return [str(permit.kind), permit.slot, permit.generation]


def _quietly(carry_out: Callable[[], Any]) -> None:
    try:
        carry_out()
    except LinkRefused:
        return
