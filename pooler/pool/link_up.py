"""Keeps a worker linked to its coordinator: connect, hello, heartbeats, and again for ever.

A lost link is normal (the coordinator restarts, the ledger is away): whoever calls meanwhile gets LinkLost,
whoever can wait waits in `up()`.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
import trio

from coordinator.link import Args, Handler, Link, LinkLost, LinkRefused
from pooler.observe.events import Event
from pooler.pool.holdings import Holdings

HELLO_SECONDS_MAX = 10.0
BACK_OFF_SECONDS = (0.05, 2.0)  # first and longest pause between two tries to connect

REPEAT_SECONDS = (0.02, 1.0)  # first and longest pause before a call is repeated on the same link

# refusals that say "not now": the call is repeated
PASSING = frozenset({"ledger_unavailable", "ledger_lost", "changed", "unregistered", "no_hello"})

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Identity:
    """Who says hello."""

    boot_id: str
    index: int
    pid: int
    pid_start: int  # clock ticks since boot, /proc/<pid>/stat field 22
    cancel_address: str = ""
    schemas: tuple[int, ...] = (1,)


class Listener(Protocol):
    """Who is told what comes over the link."""

    def handlers(self) -> Mapping[str, Handler]:
        """What the coordinator may call."""

    def heard(self, answer: Args) -> None:
        """Hello was answered; nobody may call yet."""

    def cut_off(self) -> None:
        """The link was lost."""

    def epochs(self) -> dict[str, int]:
        """By database, the epoch whose sessions are granted."""

    def believed(self) -> dict[str, dict[str, int]]:
        """By database and class, the share of execution permits that it counts by."""

    def cycle(self) -> Args:
        """What a heartbeat tells once a lease cycle."""


class Uplink:
    """The link of now, if there is one."""

    def __init__(
        self, connect: Callable[[], Awaitable[trio.abc.Stream]], identity: Identity, holdings: Holdings,
        listener: Listener,
    ) -> None:
        self.registered = trio.Event()
        self.ordinal = 0
        self.lost_total = 0
        self._connect = connect
        self._identity = identity
        self._holdings = holdings
        self._listener = listener
        self._handlers = {op: _guarded(op, handler) for op, handler in listener.handlers().items()}
        self._link: Link | None = None
        self._up = trio.Event()
        self._greeting = False
        self._greeted = trio.Event()
        self._ttl_seconds = 0.0
        self._lease_until = -float("inf")
        self.on_renewed: Callable[[], object] = bool

    @property
    def linked(self) -> bool:
        """Hello was answered on a link that still stands."""
        return self._link is not None and not self._link.lost.is_set()

    async def up(self) -> None:
        """Wait until linked."""
        while not self.linked:
            await self._up.wait()

    async def settled(self) -> None:
        """Wait until linked with no hello on its way: what is reserved meanwhile, hello could not list, and
        it would be freed as unused.
        """
        while not self.linked or self._greeting:
            await (self._greeted if self.linked else self._up).wait()

    @property
    def is_settled(self) -> bool:
        """As `settled`, now."""
        return self.linked and not self._greeting

    async def call(self, op: str, /, **args: Any) -> Any:
        """As Link.call, on the link of now: LinkLost if there is none."""
        if self._link is None:
            raise LinkLost(op)
        return await self._link.call(op, **args)

    async def insist(self, op: str, /, **args: Any) -> Any:
        """Repeat a call, over as many links as it takes, until it is answered. Raises LinkRefused with a
        refusal that stands.
        """
        pause, longest = REPEAT_SECONDS
        while True:
            await self.up()
            try:
                return await self.call(op, **args)
            except LinkLost:
                if not self.linked:
                    continue
            except LinkRefused as refused:
                if refused.code not in PASSING:
                    raise
            await trio.sleep(pause * random.uniform(0.8, 1.2))  # noqa: TID251 - back-off: nothing tells when
            pause = min(pause * 2, longest)

    def notify(self, op: str, /, **args: Any) -> None:
        """As Link.notify, dropped if there is no link."""
        if self._link is not None:
            self._link.notify(op, **args)

    @property
    def ttl_seconds(self) -> float:
        """The lease's, as last heard; 0 before."""
        return self._ttl_seconds

    def lease_left_seconds(self) -> float:
        """How long the worker's lease certainly lasts."""
        return self._lease_until - trio.current_time()

    async def run(self) -> None:
        """Connect, and again whenever the link is lost."""
        first, longest = BACK_OFF_SECONDS
        pause = first
        while True:
            try:
                stream = await self._connect()
            except OSError:
                pass
            else:
                if await self._serve(stream):
                    pause = first
            await trio.sleep(pause * random.uniform(0.8, 1.2))  # noqa: TID251 - back-off: nothing tells when
            pause = min(pause * 2, longest)

    async def _serve(self, stream: trio.abc.Stream) -> bool:
        """One link's life. True if hello was answered on it."""
        link = Link(stream, self._handlers)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep, link, nursery.cancel_scope)
                await link.run()
                nursery.cancel_scope.cancel()
        except* Exception as fault:  # an answer that makes no sense costs the link, never the worker
            log.error(Event.SOMETHING_FAILED, what="the link to the coordinator", exc_info=fault)
        finally:
            answered = self._link is link
            if answered:
                self._lose()
        return answered

    def _lose(self) -> None:
        self._link = None
        self._up = trio.Event()
        self.lost_total += 1
        log.warning(Event.LINK_LOST, to="coordinator")
        self._listener.cut_off()

    async def _keep(self, link: Link, life: trio.CancelScope) -> None:
        """Hello, then heartbeats; a link on which they are not answered is given up."""
        try:
            await self._greet(link)
            self._link = link
            self.registered.set()
            self._up.set()
            log.info(Event.LINK_UP, to="coordinator", ordinal=self.ordinal)
            await self._beat(link)
        except (LinkLost, LinkRefused, trio.TooSlowError) as why:
            log.warning(Event.LINK_LOST, to="coordinator", why=type(why).__name__, text=str(why))
        life.cancel()

    async def _greet(self, link: Link) -> None:
        self._greeting = True
        try:
            with trio.fail_after(HELLO_SECONDS_MAX):
                await self._say_hello(link)
        finally:
            self._greeting = False
            self._greeted.set()
            self._greeted = trio.Event()

    async def _say_hello(self, link: Link) -> None:
        me = self._identity
        sent = trio.current_time()
        answer = await link.call(
            "hello", boot_id=me.boot_id, index=me.index, pid=me.pid, pid_start=me.pid_start,
            cancel_address=me.cancel_address, schemas=list(me.schemas), epochs=self._listener.epochs(),
            permits=self._holdings.report(), requests=self._holdings.requests(),
            shares=self._listener.believed())
        self.ordinal = answer["ordinal"]
        self._ttl_seconds = float(answer["lease_ttl_seconds"])
        if answer.get("registered", True):  # else etcd is away, and we are only linked
            self._renewed(sent)
        self._listener.heard(answer)

    def _renewed(self, sent: float) -> None:
        """By what was sent then: it lasts from there on, at the least."""
        self._lease_until = sent + self._ttl_seconds
        self.on_renewed()

    async def _beat(self, link: Link) -> None:
        beats = 0
        while True:
            await trio.sleep(self._ttl_seconds / 3)  # noqa: TID251 - a heartbeat is made of time
            sent = trio.current_time()
            beats += 1
            word = self._listener.cycle() if beats % 3 == 0 else {}  # once a lease cycle
            with trio.fail_after(self._ttl_seconds):
                answer = await link.call("heartbeat", **word)
            if answer["alive"]:
                self._renewed(sent)
            else:
                await self._greet(link)


def _guarded(op: str, handler: Handler) -> Handler:
    """A fault in one handler is the caller's answer and our log's, not the end of the link or the worker."""

    async def serve(args: Args) -> Any:
        try:
            return await handler(args)
        except (LinkRefused, LinkLost):
            raise
        except Exception as fault:
            log.error(Event.SOMETHING_FAILED, what=f"link operation {op}", why=repr(fault), exc_info=fault)
            raise LinkRefused("failed", f"{op}: {type(fault).__name__}") from fault

    return serve
