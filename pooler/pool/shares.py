"""This worker's shares of the fleet's execution permits: what it wants, what it has, what it gives back.

Demand is told where it moved: the first change after some quiet at once, further ones in steps, nothing while
nothing moves. A share that is heard holds at once; what is recalled is given back as its transactions end:
the worker stops first, then says so, and hears of nothing else until that is answered, for until then nobody
knows how much it has. What it was told last holds while nobody says otherwise, however long that is. Where
nothing was ever said of a class (by an older coordinator, or no leader gives any yet), all its permits count
here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Protocol

import structlog
import trio

from coordinator.link import Args, LinkLost, LinkRefused
from pooler.admission.classes import FOREVER, Classes, ExecutionClass
from pooler.admission.demand import Lingering, demand_of, message
from pooler.observe.events import Event
from pooler.pool.errands import Errands

STEP_SECONDS = 0.05  # between two words of demand
FALL_SECONDS = 0.1  # what falls is told when it has stayed so: a pause between two transactions is no news
PAUSE_PER_WORK = 10  # however many tenants there are, counting them takes a small part of the time

Key = tuple[str, str]  # ledger, class

log = structlog.get_logger()


class Uplink(Protocol):
    """The way to the coordinator."""

    @property
    def linked(self) -> bool: ...

    def notify(self, op: str, /, **args: object) -> None: ...

    async def insist(self, op: str, /, **args: object) -> Args: ...


@dataclass(slots=True)
class Held:
    """One class's share. `permits` None: nothing was ever said of it."""

    permits: int | None = None
    kept: int = 0  # may still begin to execute; below `permits` while some are recalled
    revision: int = 0
    giving: bool = False
    heard: Sequence[int] | None = None  # meanwhile


class Shares:
    """`run` must be running for demand to be told."""

    def __init__(self, uplink: Uplink, errands: Errands) -> None:
        self._uplink = uplink
        self._errands = errands
        self._classes = Classes()
        self._held: dict[Key, Held] = {}
        self._told: dict[str, Lingering] = {}
        self._again: dict[str, float] = {}  # seconds after which to look again, though nothing moves
        self._moved: set[str] = set()  # ledgers whose demand is to be looked at
        self._news = trio.Event()

    def count_in(self, classes: Classes) -> None:
        """Where this worker's tickets are counted."""
        self._classes = classes
        classes.listen(self._on_moved)

    def held(self, db: str, name: str) -> Held | None:
        """What was said of this class, if anything was."""
        return self._held.get((db, name))

    # ---- what is said of them

    def report(self) -> dict[str, dict[str, int]]:
        """By ledger and class, what it counts by: as hello says it."""
        found: dict[str, dict[str, int]] = {}
        for (db, name), held in self._held.items():
            if held.permits is not None:
                found.setdefault(db, {})[name] = held.permits
        return found

    def greeted(self, said: Mapping[str, Mapping[str, Sequence[int]]] | None) -> None:
        """The answer to hello, which settles everything; None where it says nothing: all stays as it was."""
        self._told.clear()
        self._stir(*self._classes.all())
        if said is None:
            return
        for held in self._held.values():
            held.giving, held.heard = False, None
            held.revision = 0  # the store may be another one: what it says next holds, whatever it counts by
        for db, classes in said.items():
            for name, share in classes.items():
                held = self._held.setdefault((db, name), Held())
                held.permits, held.kept, held.revision = share
                self._enforce(db, name, held)

    def hear(self, db: str, name: str, share: Sequence[int]) -> None:
        """[permits, kept, revision] of this class."""
        held = self._held.setdefault((db, name), Held())
        if held.giving:
            if held.heard is None or share[2] > held.heard[2]:
                held.heard = share
        elif share[2] > held.revision:
            held.permits, held.kept, held.revision = share
            self._enforce(db, name, held)

    def learned(self, db: str) -> None:
        """The classes of this ledger may be others now."""
        for (ledger, name), held in self._held.items():
            if ledger == db:
                self._enforce(db, name, held)

    def _enforce(self, db: str, name: str, held: Held) -> None:
        klass = self._classes.of(db).classes.get(name)
        if held.permits is not None:
            if klass is not None:
                klass.allot(min(held.kept, held.permits))
            self._give_back(db, name, held)

    # ---- what is given back

    def _give_back(self, db: str, name: str, held: Held) -> None:
        """What is recalled and nobody executes on; nobody begins above what is kept from here on."""
        if held.giving or held.permits is None or held.kept >= held.permits:
            return
        klass = self._classes.of(db).classes.get(name)
        left = max(held.kept, klass.executing if klass is not None else 0)
        if left < held.permits:
            held.permits, held.giving = left, True
            self._errands.start(partial(self._tell_given, db, name, held, held.revision))

    async def _tell_given(self, db: str, name: str, held: Held, revision: int) -> None:
        assert held.permits is not None
        try:
            share = await self._uplink.insist("share_lower", db=db, to=held.permits, **{"class": name})
        except LinkRefused as refused:
            log.error(Event.SOMETHING_FAILED, what="share_lower", code=refused.code, why=refused.message)
            share = {"share": [held.permits, held.kept, revision]}
        if held.giving and held.revision == revision:  # else a hello has settled it meanwhile
            held.giving = False
            held.permits, held.kept, held.revision = share["share"]
            heard, held.heard = held.heard, None
            if heard is not None and heard[2] > held.revision:
                held.permits, held.kept, held.revision = heard
            self._enforce(db, name, held)

    # ---- what is wanted

    def _on_moved(self, db: str, klass: ExecutionClass) -> None:
        held = self._held.get((db, klass.name))
        if held is not None:
            self._give_back(db, klass.name, held)
            if held.permits is not None and held.kept < held.permits:
                klass.arm()  # the end of the next transaction is waited for
        self._stir(db)

    def _stir(self, *ledgers: str) -> None:
        self._moved.update(ledgers)
        self._news.set()

    async def run(self) -> None:
        """Tells of demand, for ever."""
        while True:
            with trio.move_on_after(min(self._again.values(), default=FOREVER)):
                await self._news.wait()
            self._news = trio.Event()
            began = trio.current_time()
            moved, self._moved = self._moved | self._again.keys(), set()
            for db in moved:
                self._tell(db, began)
            pause = max(STEP_SECONDS, PAUSE_PER_WORK * (trio.current_time() - began))
            await trio.sleep(pause)  # noqa: TID251 - the pace of what is told

    def _tell(self, db: str, now: float) -> None:
        book = self._classes.of(db)
        for klass in book.classes.values():
            klass.arm()
            if (held := self._held.get((db, klass.name))) is not None:
                self._give_back(db, klass.name, held)  # what ended since it was armed last
        if not self._uplink.linked:
            self._again.pop(db, None)  # the next hello tells all
            return
        told = self._told.get(db) or self._told.setdefault(db, Lingering(FALL_SECONDS))
        news, again = told.look(demand_of(book), now)
        self._again[db] = again
        if again == FOREVER:
            del self._again[db]
        if news is not None:
            with suppress(LinkLost):  # it does not read: its link ends by itself
                self._uplink.notify("demand", db=db, classes=message(book, news, monotonic()))
