"""The leader's answers to wants: which worker of which host gives a session up, written into the want.

One transaction for each choice, which compares this leader's key and the want as it was read: so neither one
that leads no more nor one that saw an older want chooses. With nobody waiting in vain,
nothing is written or read; where shares are even only, at times, which worker is asked for a session that it
does not use. What was chosen is known to this leader only: the next one chooses anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

import structlog
import trio

from coordinator.events import Event
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.record import Kind, UnknownSchema
from coordinator.ledger.snapshot import Held, LedgerSnapshot, Wanted
from coordinator.store.api import Change, Compare, Lost, Store, StoreUnavailable, StoreUnknown
from coordinator.view import Views
from coordinator.wanting import Choices, chosen_txn
from coordinator.wants import Wants

SETTLE_SECONDS = 0.02  # wants come in flocks: one reading for all of them
LEVEL_SECONDS = 1.0  # between looks whether it is time to choose again; they ask nothing of etcd
PAUSE_PER_WORK = 4  # however large the ledger is: a fifth of the time at most goes into reading it

_log = structlog.get_logger("coordinator.sharing")


@dataclass(slots=True)
class _Watched:
    """What this leader knows of one ledger's wants."""

    choices: Choices
    news: trio.Event = field(default_factory=trio.Event)
    moved: bool = True


class Sharing:
    """`heard` takes what the leader's watch says; `lead` chooses while this coordinator leads."""

    def __init__(
        self, store: Store, keys: FleetKeys, ledgers: Mapping[str, Ledger], views: Views, wants: Wants
    ) -> None:
        self._store = store
        self._sessions = keys.every_session()
        self._ledgers = ledgers
        self._views = views
        self._wants = wants
        self._watched: dict[str, _Watched] = {}
        wants.on_change.append(self._changed)

    def heard(self, change: Change) -> None:
        """One event of a watch: whether a session came or went."""
        entry = change.entry
        if not change.key.startswith(self._sessions) or (
                entry is not None and entry.create_revision != entry.mod_revision):
            return
        database = unquote(change.key.removeprefix(self._sessions).partition("/")[0])
        watched = self._watched.get(database)
        if watched is not None:
            watched.moved = True
            if entry is None:
                watched.choices.gone(change.key, trio.current_time())

    def _changed(self, db: str) -> None:
        if db in self._watched:
            self._watched[db].news.set()

    async def lead(self, fence: Compare) -> None:
        """For ever. What an earlier term chose counts no more."""
        self._watched = {db: _Watched(Choices(db)) for db in self._ledgers}
        try:
            async with trio.open_nursery() as nursery:
                for db in self._ledgers:
                    nursery.start_soon(self._choose_for_ever, db, fence)
        finally:
            self._watched = {}

    async def _choose_for_ever(self, db: str, fence: Compare) -> None:
        watched = self._watched[db]
        while True:
            watched.news = trio.Event()
            pause = SETTLE_SECONDS
            standing = self._wants.standing(db)
            if standing and watched.choices.is_due(standing, trio.current_time(), moved=watched.moved):
                began, watched.moved = trio.current_time(), False
                await self._choose_safely(db, fence)
                pause = max(pause, PAUSE_PER_WORK * (trio.current_time() - began))
            await trio.sleep(pause)  # noqa: TID251 - let the flock land
            with trio.move_on_after(LEVEL_SECONDS if standing else float("inf")):
                await watched.news.wait()

    async def _choose_safely(self, db: str, fence: Compare) -> None:
        try:
            await self.choose(db, fence)
        except (StoreUnavailable, StoreUnknown):
            self._watched[db].moved = True  # the views say so; the wants stand
        except (UnknownSchema, ValueError) as fault:
            _log.error(Event.SOMETHING_FAILED, database=db, why=f"sharing: {fault}")

    async def choose(self, db: str, fence: Compare) -> int:
        """Reads the ledger and writes what is to be chosen; how many choices were written.

        Raises StoreUnavailable, StoreUnknown, UnknownSchema, ValueError.
        """
        ledger, choices = self._ledgers[db], self._watched[db].choices
        snapshot = await ledger.snapshot()
        if ledger.lost or self._views.views[db].lost or snapshot.head is None:
            return 0
        written = 0
        for wanted, want in choices.choose(*_standing(snapshot, ledger), trio.current_time()):
            if isinstance(await self._store.txn(chosen_txn(fence, wanted, want)), Lost):
                choices.forget(wanted)
            else:
                written += 1
                _log.debug(Event.SHED_ASKED, database=db, worker=want.holder, user=want.holder_user,
                           op=want.op, waiter=want.boot_id)
        return written


def _standing(
    snapshot: LedgerSnapshot, ledger: Ledger
) -> tuple[Sequence[Wanted], dict[str, Held], frozenset[str]]:
    """The wants, the main sessions by key, and the workers that live."""
    held = {ledger.keys.session(each.session.kind, each.session.slot): each
            for each in snapshot.held(Kind.MAIN) if not each.unreadable}
    return snapshot.wants, held, frozenset(snapshot.workers)
