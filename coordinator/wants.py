"""What this host's workers want of other hosts, and what others want of this one: `want/<db>/<request id>`.

Every coordinator watches the wants of its ledgers. Of each pool of its own that waits in vain it keeps one on
the lease of the worker that waits; it takes it away when that pool got a session more or waits no longer. A
want into which the leader wrote one of this host's workers is told to that worker, once. Until the session
that it gives up was taken, or for a bounded time, this host's own waiters stand back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import trio

from coordinator.ledger.ledger import Ledger
from coordinator.ledger.notes import Want
from coordinator.ledger.record import UnknownSchema
from coordinator.ledger.rules import Code
from coordinator.ledger.snapshot import Wanted
from coordinator.registry import Registry
from coordinator.store.api import (
    TXN_OPERATIONS_MAX,
    Change,
    Compacted,
    Entry,
    LeaseGone,
    Put,
    Store,
    StoreUnavailable,
    StoreUnknown,
    Txn,
)
from coordinator.waiting import Holding, Pool, Waiter
from coordinator.wanting import (
    LINGER_SECONDS,
    SHED,
    STAND_BACK_SECONDS,
    WANT_AFTER_SECONDS,
    Own,
    Short,
    holder_of,
    may_want,
    neediest,
    stands_back,
    still_wanted,
    wanted_pool,
)

BACKOFF_SECONDS = 1.0
TIDY_SECONDS = 5.0  # between looks for wants of this host that nobody here has any more
LEAVE_SECONDS = 1.0


class Lines(Protocol):
    """Those who wait on this host."""

    def waiters(self, db: str) -> Iterable[Waiter]:
        """The oldest first."""

    def ask_for(self, op: str, holder: Holding, waiter: Waiter) -> None:
        """A worker of this host is to give one up, for one that waits elsewhere."""

    def stir(self, db: str) -> None:
        """Let the waiters try."""


@dataclass(slots=True)
class _Board:
    """The wants of one ledger."""

    standing: dict[str, Wanted] = field(default_factory=dict)  # as the watch told, of all hosts
    own: dict[Pool, Own] = field(default_factory=dict)
    short: dict[Pool, Short] = field(default_factory=dict)
    going: set[str] = field(default_factory=set)  # to be deleted
    asked: dict[str, int] = field(default_factory=dict)  # by key: the choice that was passed on
    until: dict[tuple[str, int], float] = field(default_factory=dict)  # see wanting.stands_back
    news: trio.Event = field(default_factory=trio.Event)


class Wants:
    """`run` must be running; `on_change` hears of every change of a ledger's wants."""

    def __init__(
        self, store: Store, ledgers: Mapping[str, Ledger], registry: Registry, lines: Lines, *, host: str,
        now_us: Callable[[], int] = lambda: 0,
    ) -> None:
        self._store = store
        self._ledgers = ledgers
        self._registry = registry
        self._lines = lines
        self._host = host
        self._now_us = now_us
        self._boards = {db: _Board() for db in ledgers}
        self._nursery: trio.Nursery | None = None
        self.on_change: list[Callable[[str], None]] = []

    async def run(self) -> None:
        """For ever; what this host wants goes with it."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for db in self._boards:
                nursery.start_soon(self._watch, db)
                nursery.start_soon(self._keep, db)

    def standing(self, db: str) -> frozenset[str]:
        """The keys of all wants of a ledger, as last heard."""
        return frozenset(self._boards[db].standing)

    def stir(self, db: str) -> None:
        """Somebody began to wait here, got a permit, or left."""
        self._boards[db].news.set()

    def short(self, waiter: Waiter) -> None:
        """A worker of this host is asked for its only session by another, which has none."""
        board, now = self._boards[waiter.pool.db], trio.current_time()
        board.short.setdefault(waiter.pool, Short(waiter, now, now)).heard(waiter, now)
        board.news.set()

    def freed(self, db: str, boot_id: str = "") -> None:
        """Something was freed, for nobody of this host: by this worker of it, or (without one) somewhere."""
        board, now = self._boards[db], trio.current_time()
        for each in self._of_others(db):
            want, choice = each.want, (each.key, each.mod_revision)
            is_ours = want.holder in self._registry.workers
            begins = want.holder == boot_id if is_ours else want.op == SHED
            if want.holder and begins and choice not in board.until:
                board.until[choice] = now + STAND_BACK_SECONDS
                if self._nursery is not None:
                    self._nursery.start_soon(self._step_forward, db, choice)

    def stands_back(self, pool: Pool) -> bool:
        """Whether a waiter of this pool leaves what is free now to another host."""
        board = self._boards[pool.db]
        if not board.until:
            return False
        own = [each for each in board.standing.values() if self._is_own(each)]
        return stands_back(pool, own, self._of_others(pool.db), board.until, trio.current_time())

    def _is_own(self, wanted: Wanted) -> bool:
        return wanted.want.boot_id in self._registry.workers

    def _of_others(self, db: str) -> list[Wanted]:
        return [each for each in self._boards[db].standing.values() if not self._is_own(each)]

    async def _step_forward(self, db: str, choice: tuple[str, int]) -> None:
        """One that was asked for has not taken it in time: it is anybody's."""
        until = self._boards[db].until.get(choice)
        if until is not None:
            await trio.sleep_until(until)
            if choice in self._boards[db].until:
                self._lines.stir(db)

    # ---- what this host wants

    async def _keep(self, db: str) -> None:
        board = self._boards[db]
        try:
            while True:
                board.news = trio.Event()
                try:
                    again = await self._settle(db)
                except (StoreUnavailable, StoreUnknown):
                    again = BACKOFF_SECONDS
                with trio.move_on_after(again):
                    await board.news.wait()
                await trio.sleep(WANT_AFTER_SECONDS)  # noqa: TID251 - however many come and go
        finally:
            with trio.move_on_after(LEAVE_SECONDS, shield=True):
                await self._leave(board)

    async def _leave(self, board: _Board) -> None:
        board.going.update(each.key for each in board.own.values())
        board.own.clear()
        with suppress(StoreUnavailable, StoreUnknown):  # they end with their leases
            await self._write(board, [])

    async def _settle(self, db: str) -> float:
        """Puts and deletes what is to be; → seconds until it has to be looked at again without news.

        Raises StoreUnavailable, StoreUnknown.
        """
        board, now = self._boards[db], trio.current_time()
        linked, held = self._registry.linked(), self._registry.holdings()
        waiters = [each for each in self._lines.waiters(db) if may_want(each, linked)]
        board.short = {pool: each for pool, each in board.short.items()
                       if now - each.last_at <= LINGER_SECONDS}
        short = [each.waiter for each in board.short.values()
                 if each.lasts(now) and may_want(each.waiter, linked)]
        waiters += short
        best = {each.pool: each for each in short} | neediest(waiters, held, linked, now)
        self._drop(board, waiters, best, held, now)
        for pool, waiter in best.items():
            if pool not in board.own:
                self._add(board, waiter, held)
        kept = {each.key for each in board.own.values()}
        board.going.update(key for key, each in board.standing.items() if self._is_own(each))
        board.going -= kept
        await self._write(board, [each for each in board.own.values() if not each.sent])
        if board.own or waiters:
            return LINGER_SECONDS
        return TIDY_SECONDS if board.standing else float("inf")

    def _drop(
        self, board: _Board, waiters: Iterable[Waiter], best: Mapping[Pool, Waiter],
        held: Mapping[Holding, int], now: float,
    ) -> None:
        """What was got, or is wanted no more, or is wanted by another worker more urgently."""
        waiting = {each.holding for each in waiters}
        for pool, own in tuple(board.own.items()):
            absent = Holding(own.want.boot_id, pool) not in waiting
            own.absent_at = min(own.absent_at, now) if absent else float("inf")
            told = board.standing.get(own.key)
            chosen = told is not None and bool(told.want.holder)
            if not still_wanted(own, pool, best.get(pool), held, chosen=chosen, now=now):
                board.going.add(own.key)
                del board.own[pool]

    def _add(self, board: _Board, waiter: Waiter, held: Mapping[Holding, int]) -> None:
        local, pool = self._registry.workers[waiter.boot_id], waiter.pool
        if local.lease is None:
            return
        want = Want(pool.name, pool.user, pool.kind, str(waiter.reason), waiter.boot_id, self._host,
                    self._now_us(), held.get(waiter.holding, 0))
        base = sum(count for holding, count in held.items() if holding.pool == pool)
        key = self._ledgers[pool.db].keys.want(waiter.request_id)
        board.own[pool] = Own(key, want, local.lease.id, base)

    async def _write(self, board: _Board, new: list[Own]) -> None:
        """One at a time: of a lease that is gone only its own fails."""
        going = sorted(board.going)
        for first in range(0, len(going), TXN_OPERATIONS_MAX):
            some = tuple(going[first:first + TXN_OPERATIONS_MAX])
            await self._store.txn(Txn(deletes=some))
            board.going.difference_update(some)
        for own in new:
            try:
                await self._store.txn(Txn(puts=(Put(own.key, own.want.encode(), own.lease),)))
            except LeaseGone:
                board.own = {pool: each for pool, each in board.own.items() if each is not own}
            else:
                own.sent = True

    # ---- what all want

    async def _watch(self, db: str) -> None:
        prefix = self._ledgers[db].keys.wants()
        while True:
            try:
                listed = await self._store.range(prefix)
                self._list(db, listed.entries)
                async with self._store.watch(prefix, after=listed.revision) as changes:
                    async for batch in changes:
                        for change in batch:
                            self._hear(db, change)
            except (StoreUnavailable, StoreUnknown, Compacted):
                pass
            await trio.sleep(BACKOFF_SECONDS)  # noqa: TID251 - a broken watch

    def _list(self, db: str, entries: Iterable[Entry]) -> None:
        found = {entry.key: entry for entry in entries}
        for key in self._boards[db].standing.keys() - found.keys():
            self._hear(db, Change(key, None, 0))
        for entry in found.values():
            self._hear(db, Change(entry.key, entry, entry.mod_revision))

    def _hear(self, db: str, change: Change) -> None:
        board = self._boards[db]
        board.standing.pop(change.key, None)
        if change.entry is not None:
            with suppress(UnknownSchema, ValueError):  # the leader's passes name it
                board.standing[change.key] = Wanted.read(change.entry)
        else:
            self._end(db, change.key)
        wanted = board.standing.get(change.key)
        if wanted is not None:
            board.news.set()  # it may be one that nobody here has any more
            self._pass_on(db, wanted)
        for listener in self.on_change:
            listener(db)

    def _end(self, db: str, key: str) -> None:
        """It is gone: whoever stood back for it need not any more, and if it was wanted it is put again."""
        board = self._boards[db]
        board.asked.pop(key, None)
        over = [choice for choice in board.until if choice[0] == key]
        for choice in over:
            del board.until[choice]
        if over:
            self._lines.stir(db)
        for own in board.own.values():
            if own.key == key and own.sent:
                own.sent = False
                local = self._registry.workers.get(own.want.boot_id)
                own.lease = local.lease.id if local is not None and local.lease is not None else own.lease
                board.news.set()

    def _pass_on(self, db: str, wanted: Wanted) -> None:
        """To the worker that was chosen, if it is one of this host's."""
        want, board = wanted.want, self._boards[db]
        if want.holder in self._registry.linked() and board.asked.get(wanted.key) != wanted.mod_revision:
            board.asked[wanted.key] = wanted.mod_revision
            self._lines.ask_for(want.op, holder_of(want, db),
                                Waiter(want.boot_id, wanted_pool(want, db), Code.FULL))
